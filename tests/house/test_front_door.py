"""The public names of Hoop, pinned: adding or removing one is a decision, and shows up here in the diff."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import pytest

import hoop

PUBLIC = [
    "Buffer",
    "Cluster",
    "Communicator",
    "DataParallel",
    "Device",
    "Handle",
    "HoopError",
    "Hybrid",
    "Job",
    "ParameterServer",
    "PeerError",
    "Pipeline",
    "Result",
    "RingModel",
    "Splits",
    "TensorData",
    "UserError",
    "connect",
    "train",
]
"""Sorted. Hoop's own promise to its users is this list and nothing else."""

MOST_NAMES = 25


def complaints(door: ModuleType, pinned: list[str]) -> list[str]:
    """What is wrong with the public names of a module."""
    names = sorted(getattr(door, "__all__", []))
    found = []
    if names != pinned:
        missing, new = sorted(set(pinned) - set(names)), sorted(set(names) - set(pinned))
        found.append(f"__all__ is not the pinned list (missing: {missing}, new: {new})")
    if len(names) > MOST_NAMES:
        found.append(f"{len(names)} public names, at most {MOST_NAMES}")
    for name in names:
        try:
            thing = getattr(door, name)
        except AttributeError:
            found.append(f"{name} is in __all__ and cannot be imported")
            continue
        if not name.startswith("__") and not has_docstring(thing):
            found.append(f"{name} has no docstring of its own")
    return found


def has_docstring(thing: object) -> bool:
    """Whether someone wrote one: a plain value's is its class's, a dataclass's is made up of its fields."""
    doc = thing.__doc__ or ""
    if not isinstance(thing, type | ModuleType) and doc == type(thing).__doc__:
        return False
    return bool(doc.strip()) and not doc.startswith(f"{getattr(thing, '__name__', '')}(")


def test_public_names_are_pinned_importable_and_documented() -> None:
    found = complaints(hoop, PUBLIC)
    assert not found, "\n" + "\n".join(found)


def test_the_pinned_list_is_sorted() -> None:
    assert sorted(set(PUBLIC)) == PUBLIC


def door_with(**things: object) -> ModuleType:
    door = ModuleType("door")
    vars(door).update(things, __all__=sorted(things))
    return door


def documented() -> None:
    """Says what it does."""


def bare() -> None:
    pass


@dataclass
class Bare:
    field: int = 0


def test_a_good_door_passes() -> None:
    assert complaints(door_with(documented=documented, __version__="1"), ["__version__", "documented"]) == []


@pytest.mark.parametrize(
    ("door", "pinned", "complaint"),
    [
        (door_with(documented=documented), [], "new: ['documented']"),
        (door_with(), ["connect"], "missing: ['connect']"),
        (ModuleType("door"), ["connect"], "missing: ['connect']"),
        (door_with(bare=bare), ["bare"], "bare has no docstring"),
        (door_with(Bare=Bare), ["Bare"], "Bare has no docstring"),
        (door_with(value=7), ["value"], "value has no docstring"),
        (
            door_with(**{f"n{i:02}": documented for i in range(26)}),
            [f"n{i:02}" for i in range(26)],
            "26 public",
        ),
    ],
)
def test_a_bad_door_is_described(door: ModuleType, pinned: list[str], complaint: str) -> None:
    (found,) = complaints(door, pinned)
    assert complaint in found


def test_a_name_that_is_not_there_is_described() -> None:
    door = door_with(documented=documented)
    del door.documented
    assert complaints(door, ["documented"]) == ["documented is in __all__ and cannot be imported"]
