"""``import torch`` registers the backend, loads no heavy module of Hoop, and never fails because of Hoop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hoop.torch_backend import autoload

PROGRAM = """
import sys
import torch
heavy = {"grpc", "hoop.client", "hoop.collectives", "hoop.memory", "hoop.transport", "hoop.torch_backend.process_group"}
print(torch.distributed.Backend("hoop"), sorted(heavy & set(sys.modules)))
"""


def test_import_torch_registers_the_backend_and_loads_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "hoop []"


def test_registering_twice_is_harmless() -> None:
    autoload.register()
    assert dist.Backend("hoop") == "hoop"


def test_register_without_torch_distributed_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = ModuleType("torch.distributed")
    vars(bare)["is_available"] = lambda: False
    monkeypatch.setitem(sys.modules, "torch.distributed", bare)
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d")
    monkeypatch.setattr(sys.modules["torch"], "distributed", bare)
    autoload.register()


def test_a_refused_registration_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    with pytest.warns(UserWarning, match="torch.distributed did not take the backend: no such argument"):
        autoload.register()


PARSED = """
import torch.distributed as dist
from hoop.torch_backend import autoload
autoload.register()  # a second time
names = [dist.Backend(name) for name in ("gloo", "GLOO", "nccl", "hoop")]
configurations = [repr(dist.BackendConfig(dist.Backend(name))) for name in ("cpu:gloo,cuda:nccl", "undefined")]
print(*names, *configurations)
"""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1", "hoop hoop nccl hoop cpu:hoop,cuda:nccl cpu:hoop"),
        ("0", "gloo gloo nccl hoop cpu:gloo,cuda:nccl cpu:gloo"),
        (None, "gloo gloo nccl hoop cpu:gloo,cuda:nccl cpu:gloo"),
    ],
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="the default backend is the one of the accelerator")
def test_the_name_gloo_means_hoop_only_on_request(value: str | None, expected: str) -> None:
    environment = {name: text for name, text in os.environ.items() if name != autoload.REPLACE_GLOO}
    if value is not None:
        environment[autoload.REPLACE_GLOO] = value
    command = [sys.executable, "-c", PARSED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split("\n")[0] == expected


def replace_gloo(rank: int) -> None:
    os.environ[autoload.REPLACE_GLOO] = "1"
    autoload.register()


def groups_by_the_name_of_gloo(rank: int) -> list[str]:
    groups = [dist.group.WORLD, dist.new_group(backend="gloo"), dist.new_group()]
    for group in groups:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2] * 3
    return [dist.get_backend(group) for group in groups]


def test_a_program_that_names_gloo_gets_groups_of_hoop(run_ranks: Callable[..., list[Any]]) -> None:
    backends = run_ranks(2, groups_by_the_name_of_gloo, backend="gloo", before=replace_gloo)
    assert backends == [["hoop"] * 3] * 2
