"""``import torch`` registers the backend, loads no heavy module of Hoop, and never fails because of Hoop."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest
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
