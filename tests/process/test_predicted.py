"""A real run says what the simulator predicted, what happened, and the error."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("strategy", ["data", "pipeline:1f1b"])
def test_a_run_tells_its_prediction(strategy: str) -> None:
    command = [
        sys.executable,
        "-m",
        "hoop",
        "train",
        "mnist",
        "--devices=2",
        f"--strategy={strategy}",
        "--json",
    ]
    command += ["--set=max_steps=12", "--set=evaluate_every=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    predicted, measured = result["predicted_step_seconds"], result["step_seconds"]
    assert 1e-4 < predicted < 1
    assert result["prediction_error"] == pytest.approx(measured / predicted - 1)
