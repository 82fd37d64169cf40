"""Every benchmark of training and prediction starts: it is run by hand, and must not have rotted by then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path
    for folder in ("training", "prediction")
    for path in (ROOT / "benchmarks" / folder).glob("*.py")
    if "__main__" in path.read_text()
)


def test_there_are_scripts() -> None:
    assert {"mnist.py", "softmax.py", "strategies.py", "kernels.py", "predict.py"} <= {
        path.name for path in SCRIPTS
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_it_starts(script: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, str(script), "--help"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {script.name}")
