"""The examples run unchanged, within the timeout, and reach the expected accuracy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNS = {
    "lab_training.py": ("--steps", "60", "--devices", "2"),
    "custom_model.py": ("--epochs", "3", "--devices", "1", "2"),
    "torch_backend.py": ("--steps", "60"),
}
NOT_RUN_HERE = {"lab_client.py", "gpu_sim_messages.py"}
"""The first is run by test_lab_client.py, the second is a table and not a program."""


def run(name: str, *options: str) -> str:
    done = preloaded.run(
        [sys.executable, str(EXAMPLES / name), *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*RUNS, *NOT_RUN_HERE}


@pytest.mark.slow_if(when=lambda params: params["name"] == "torch_backend.py")
@pytest.mark.parametrize("name", RUNS)
def test_an_example_learns(name: str) -> None:
    output = run(name, *RUNS[name])
    (*_, accuracy) = re.findall(r"accuracy (\d+\.\d+)%", output)
    assert float(accuracy) > 70, output
    if name == "custom_model.py":
        assert "the same weights, to the bit" in output
