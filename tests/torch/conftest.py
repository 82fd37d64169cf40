"""Fixtures that run the ranks of a process group."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

# One thread per rank. The forkserver, from which the ranks are forked, inherits it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from world import World


@pytest.fixture(autouse=True, scope="session")
def installed() -> None:
    """``import torch`` finds the backend in the ranks by Hoop's entry point, which ``sys.path`` alone does not have."""
    assert "hoop" in entry_points(group="torch.backends").names, "Hoop is not installed: pip install -e ."


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Creates worlds, ``world(3, timeout=2.0)``, and closes them after the test."""
    worlds: list[World] = []

    def make(size: int, **options: Any) -> World:
        folder = tmp_path / str(len(worlds))
        folder.mkdir()
        worlds.append(World(folder, size, **options))
        return worlds[-1]

    yield make
    for one in worlds:
        one.close()


@pytest.fixture
def run_ranks(world: Callable[..., World]) -> Callable[..., list[Any]]:
    """Runs a function on every rank, ``run_ranks(3, function, …)``, and returns the result of each."""

    def run(size: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        ranks = world(size, **options)
        ranks.start(function, *args)
        return ranks.results()

    return run
