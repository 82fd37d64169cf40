"""Every benchmark of training, prediction and recovery starts: it is run by hand, and must not have rotted by then."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(
    path
    for theme in ("training", "prediction", "recovery")
    for path in (ROOT / "benchmarks" / theme).glob("*.py")
    if "__main__" in path.read_text()
)


def test_there_are_scripts() -> None:
    assert {"mnist.py", "softmax.py", "strategies.py", "kernels.py", "predict.py", "recovery.py"} <= {
        path.name for path in SCRIPTS
    }


def test_they_start() -> None:
    """All at once: what takes long is to load PyTorch."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    running = {
        script.name: subprocess.Popen(
            [sys.executable, str(script), "--help"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for script in SCRIPTS
    }
    told = {name: (*one.communicate(timeout=100), one.returncode) for name, one in running.items()}
    for name, (said, complaints, code) in told.items():
        assert code == 0, complaints
        assert said.startswith(f"usage: {name}")
