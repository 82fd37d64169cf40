"""The formatter, the linter and the type checker find nothing: what `make check` runs, beside the other tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        pytest.param(["ruff", "format", "--check", "--quiet", "."], "make format", id="format"),
        pytest.param(["ruff", "check", "--quiet", "."], "make format repairs some of it", id="lint"),
        pytest.param(["mypy"], "make check shows it again", id="types"),
    ],
)
def test_nothing_is_found(command: list[str], remedy: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n({remedy})"
