"""Barriers order memory: no rank reads stale data. ``python -m hoop.lab.bench.ordering`` checks it for longer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SECONDS = 1.0
TIMEOUT_S = 400.0
"""On a busy machine each of 2000 rounds waits until the other rank has a core."""


def run_check(ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "hoop.lab.bench.ordering",
        "--ranks",
        str(ranks),
        "--seconds",
        str(SECONDS),
    ]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_barrier_orders_memory(ranks: int) -> None:
    result = run_check(ranks)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(", 0 stale") == ranks


def test_the_check_finds_missing_ordering() -> None:
    result = run_check(2, "--unordered")
    assert result.returncode == 1, json.dumps(result.stdout)
