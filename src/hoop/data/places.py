"""Where datasets are: the directories of ``HOOP_DATA``, then ``~/.cache/hoop``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from hoop.errors import NotFound

VARIABLE = "HOOP_DATA"


def cache() -> Path:
    """Where downloads go, and where everyone looks last."""
    return Path("~/.cache/hoop").expanduser()


def places() -> list[Path]:
    """Directories to look in, in order; ``HOOP_DATA`` has several like ``PATH`` does."""
    named = [Path(part).expanduser() for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return [*named, cache()]


def found(names: Iterable[str], also: Iterable[Path] = ()) -> Iterator[Path]:
    """What exists of these names, place by place; the places that only some datasets know come last."""
    names = list(names)
    for place in [*places(), *also]:
        yield from (place / name for name in names if (place / name).exists())


def missing(dataset: str, wanted: str, remedy: str) -> NotFound:
    """The error that says where was looked and what to do."""
    looked = ", ".join(f"{place}{'' if place.is_dir() else ' (no such directory)'}" for place in places())
    return NotFound(
        f"dataset {dataset} is not in {looked}: put {wanted} into one of them, name its directory in {VARIABLE}, "
        f"or {remedy}"
    )
