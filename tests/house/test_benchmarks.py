"""Every benchmark of training, prediction and recovery still starts; people run them by hand."""

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


def test_scripts_are_found() -> None:
    assert {"mnist.py", "softmax.py", "strategies.py", "kernels.py", "predict.py", "recovery.py"} <= {
        path.name for path in SCRIPTS
    }


def test_every_script_starts() -> None:
    """All at the same time, because loading PyTorch takes long."""
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
    results = {name: (*one.communicate(timeout=100), one.returncode) for name, one in running.items()}
    for name, (output, errors, code) in results.items():
        assert code == 0, errors
        assert output.startswith(f"usage: {name}")
