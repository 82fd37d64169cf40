"""Nobody reads what a peer has not written yet; ``python -m hoop.lab.bench.ordering`` looks for longer."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SECONDS = 1.0


def look(ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "hoop.lab.bench.ordering",
        "--ranks",
        str(ranks),
        "--seconds",
        str(SECONDS),
    ]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_meeting_orders_memory(ranks: int) -> None:
    found = look(ranks)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.count(", 0 stale") == ranks


def test_the_test_finds_a_missing_order() -> None:
    found = look(2, "--unordered")
    assert found.returncode == 1, json.dumps(found.stdout)
