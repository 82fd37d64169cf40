"""Fixtures: a path for an arena, an arena there, and processes that share it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import hoop.memory.arena
from hoop.memory import Arena


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "device.arena"


@pytest.fixture
def arena(path: Path) -> Iterator[Arena]:
    with Arena.create(path, 64 * 1024) as created:
        yield created


@pytest.fixture
def python() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python programs in processes that do not outlive the test."""
    with ExitStack() as stack:

        def start(program: str, *arguments: object) -> subprocess.Popen[str]:
            child = subprocess.Popen(
                [sys.executable, "-c", program, *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": str(Path(hoop.memory.arena.__file__).parents[2])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            return child

        yield start
