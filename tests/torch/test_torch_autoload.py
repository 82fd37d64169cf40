"""``import torch`` registers the backend, loads no heavy module of Hoop, and never fails because of Hoop."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import preloaded
import pytest
import torch
import torch.distributed as dist
from gpus import has_gpu

from hoop.torch_backend import autoload

PROGRAM = """
import sys
import torch

heavy = {"grpc", "hoop.client", "hoop.collectives", "hoop.memory", "hoop.transport", "hoop.torch_backend.process_group"}
print(torch.distributed.Backend("hoop"), sorted(heavy & set(sys.modules)))
"""


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


REPLACED, KEPT = (f"{name} {name} nccl hoop cpu:{name},cuda:nccl cpu:{name}" for name in ("hoop", "gloo"))
HAS_ACCELERATOR = has_gpu() or torch.backends.mps.is_available()
"""Then the default backend is its own."""


def printed(run: Callable[..., Any], value: str | None) -> list[str]:
    """The lines that both programs print, in one process with this value of the variable."""
    environment = {name: text for name, text in os.environ.items() if name != autoload.REPLACE_GLOO}
    if value is not None:
        environment[autoload.REPLACE_GLOO] = value
    command = [sys.executable, "-c", PROGRAM + PARSED]
    done = run(command, capture_output=True, text=True, check=True, env=environment)
    return str(done.stdout).splitlines()


def test_import_torch_registers_the_backend_and_loads_nothing_heavy() -> None:
    """And the name "gloo" stays Gloo's."""
    registered, names, *_ = printed(subprocess.run, None)
    assert registered == "hoop []"
    assert HAS_ACCELERATOR or names == KEPT


@pytest.mark.parametrize(
    ("value", "run", "expected"),
    [
        pytest.param("1", subprocess.run, REPLACED, id="1"),
        pytest.param("0", preloaded.run, KEPT, id="0"),  # torch is imported already; the second call reads it
    ],
)
@pytest.mark.skipif(HAS_ACCELERATOR, reason="the default backend is the one of the accelerator")
def test_the_name_gloo_means_hoop_only_on_request(value: str, run: Callable[..., Any], expected: str) -> None:
    assert printed(run, value)[1] == expected


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
