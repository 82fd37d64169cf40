"""The public names of Hoop are those pinned here, so that adding or removing one shows up in this file's diff."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import pytest

import hoop

PUBLIC = [
    "Buffer",
    "Callback",
    "Cluster",
    "Communicator",
    "DataParallel",
    "Device",
    "Handle",
    "HoopError",
    "Hybrid",
    "Job",
    "MlflowLogger",
    "OpenTelemetryLogger",
    "ParameterServer",
    "PeerError",
    "Pipeline",
    "Ray",
    "Result",
    "RingModel",
    "Splits",
    "TensorBoardLogger",
    "TensorData",
    "UserError",
    "WandbLogger",
    "connect",
    "train",
]
"""Sorted. Hoop's stable API is this list and nothing else."""

MAX_NAMES = 25


def complaints(module: ModuleType, pinned: list[str]) -> list[str]:
    """Violations in the public names of a module."""
    names = sorted(getattr(module, "__all__", []))
    found = []
    if names != pinned:
        missing, new = sorted(set(pinned) - set(names)), sorted(set(names) - set(pinned))
        found.append(f"__all__ is not the pinned list (missing: {missing}, new: {new})")
    if len(names) > MAX_NAMES:
        found.append(f"{len(names)} public names, at most {MAX_NAMES}")
    for name in names:
        try:
            value = getattr(module, name)
        except AttributeError:
            found.append(f"{name} is in __all__ and cannot be imported")
            continue
        if not name.startswith("__") and not has_docstring(value):
            found.append(f"{name} has no docstring of its own")
    return found


def has_docstring(value: object) -> bool:
    """Whether it has its own docstring: a plain value inherits that of its class, and dataclasses generate one."""
    doc = value.__doc__ or ""
    if not isinstance(value, type | ModuleType) and doc == type(value).__doc__:
        return False
    return bool(doc.strip()) and not doc.startswith(f"{getattr(value, '__name__', '')}(")


def test_public_names_are_pinned_importable_and_documented() -> None:
    found = complaints(hoop, PUBLIC)
    assert not found, "\n" + "\n".join(found)


def test_the_pinned_list_is_sorted() -> None:
    assert sorted(set(PUBLIC)) == PUBLIC


def module_with(**values: object) -> ModuleType:
    module = ModuleType("door")
    vars(module).update(values, __all__=sorted(values))
    return module


def documented() -> None:
    """Says what it does."""


def bare() -> None:
    pass


@dataclass
class Bare:
    field: int = 0


def test_a_valid_module_passes() -> None:
    assert complaints(module_with(documented=documented, __version__="1"), ["__version__", "documented"]) == []


@pytest.mark.parametrize(
    ("door", "pinned", "complaint"),
    [
        (module_with(documented=documented), [], "new: ['documented']"),
        (module_with(), ["connect"], "missing: ['connect']"),
        (ModuleType("door"), ["connect"], "missing: ['connect']"),
        (module_with(bare=bare), ["bare"], "bare has no docstring"),
        (module_with(Bare=Bare), ["Bare"], "Bare has no docstring"),
        (module_with(value=7), ["value"], "value has no docstring"),
        (
            module_with(**{f"n{i:02}": documented for i in range(26)}),
            [f"n{i:02}" for i in range(26)],
            "26 public",
        ),
    ],
)
def test_a_violation_is_reported(door: ModuleType, pinned: list[str], complaint: str) -> None:
    (found,) = complaints(door, pinned)
    assert complaint in found


def test_a_missing_name_is_reported() -> None:
    module = module_with(documented=documented)
    del module.documented
    assert complaints(module, ["documented"]) == ["documented is in __all__ and cannot be imported"]


def test_completion_shows_the_public_names_and_no_others() -> None:
    assert [name for name in dir(hoop) if not name.startswith("__")] == PUBLIC
    assert hoop.__version__
