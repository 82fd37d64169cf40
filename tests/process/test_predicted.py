"""A training run reports the step time that the simulator predicted, the measured one, and the relative error."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import preloaded
import pytest
from preload_server import MEASURES

from hoop.simulate.cost_model import FREE_MACHINE, BlockCost, Costs, LinearCost


def train(strategy: str, *options: str) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "hoop",
        "train",
        "mnist",
        "--devices=2",
        "--memory=32MiB",
        f"--strategy={strategy}",
        "--json",
        *options,
    ]
    command += ["--set=max_steps=12", "--set=evaluate_every=0"]
    environment = {**os.environ, MEASURES: "fully"}
    done = preloaded.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stderr
    result: dict[str, float] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize("strategy", ["data", pytest.param("pipeline:1f1b", marks=pytest.mark.slow)])
def test_a_run_reports_its_prediction_and_the_error(strategy: str) -> None:
    result = train(strategy)
    predicted, measured = result["predicted_step_seconds"], result["step_seconds"]
    assert 1e-4 < predicted < 1
    assert result["prediction_error"] == pytest.approx(measured / predicted - 1)


@pytest.mark.slow
def test_a_run_is_predicted_from_a_calibration_file(tmp_path: Path) -> None:
    block = BlockCost("b", LinearCost(10.0), LinearCost(20.0))
    file = tmp_path / "costs.json"
    file.write_text(Costs((block,) * 3, 64, FREE_MACHINE).to_json())
    predicted = train("data", f"--costs={file}")["predicted_step_seconds"]
    whole = 2 * 90  # two shards of three blocks on each device
    assert whole * 0.999 < predicted < whole * 10, "longer only by how late the slower device was in the measurement"
