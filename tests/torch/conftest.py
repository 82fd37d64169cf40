"""Worlds of two to four ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Every rank on one core; read by the process from which the ranks are forked.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Makes a world: ``world(3, timeout=2.0)``."""
    made: list[World] = []

    def make(size: int, **options: Any) -> World:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(World(folder, size, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def together(world: Callable[..., World]) -> Callable[..., list[Any]]:
    """Runs a function on every rank: ``together(3, function, …)``; gives what each returned."""

    def run(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        ranks = world(size, **options)
        ranks.start(function, *args)
        return ranks.results()

    return run
