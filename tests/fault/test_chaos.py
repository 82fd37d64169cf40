"""Random faults from a seed: the same seed gives the same ones, and none of them changes the weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hoop.errors import InvalidArgument
from hoop.lab.chaos.fault_actions import FaultOutcome
from hoop.lab.chaos.run import Chaos, ChaosConfig, _violation, table, verdict
from hoop.lab.chaos.schedule import KINDS, draw_schedule
from hoop.report.metrics import read_metrics
from hoop.runs.ledger import NAME, Ledger, lines

PATIENCE_S = 280.0
OPTIONS = ["--faults=2", "--seed=3", "--devices=2", "--pace=3", "--kinds=kill,coordinator", "--json"]


def test_a_seed_gives_the_same_faults_again() -> None:
    assert draw_schedule(200, 7) == draw_schedule(200, 7)
    assert draw_schedule(200, 7) != draw_schedule(200, 8)
    assert {one.kind for one in draw_schedule(200, 7)} == set(KINDS)
    assert {one.target([3, 1, 2]) for one in draw_schedule(200, 7)} == {1, 2, 3}
    assert [one.number for one in draw_schedule(3, 0, ["kill"])] == [1, 2, 3]
    with pytest.raises(InvalidArgument, match="there are kill, stop"):
        draw_schedule(1, 0, ["flood"])


def test_the_table_has_a_line_a_kind() -> None:
    found = Chaos(
        ChaosConfig(),
        [FaultOutcome(1, "kill", 2, 5, 0.1, 0.2, 3.0), FaultOutcome(2, "kill", 1, 9, 0.3, 0.4, 5.0)],
    )
    (row,) = table(found).rows
    assert row == ["kill", 2, 0.2, 0.3, pytest.approx(0.3), 0.4, 4.0, 5.0, 0, 0]
    assert "NOT those of" in verdict(found)
    found.violation = "step 4 follows step 2"
    assert "THE RECORD DOES NOT HOLD: step 4 follows step 2" in verdict(found)
    found.seconds, found.failed = 20.0, "the job has ended"
    assert "one every 10.0 s (360 an hour)" in verdict(found)
    assert "the next was not survived" in verdict(found)


def test_a_record_with_a_hole_or_another_loss_is_a_violation(tmp_path: Path) -> None:
    """``hoop chaos`` fails by it, like by other weights."""
    whole, holed, other = (tmp_path / name for name in ("whole", "holed", "other"))
    job = f"{Path(__file__).parents[1] / 'process' / 'train_driver.py'}:job"
    command = [sys.executable, "-m", "hoop", "train", job, "--devices=1", "--epochs=1", f"--out={whole}"]
    subprocess.run(command, check=True, timeout=PATIENCE_S, stdout=subprocess.DEVNULL)
    steps = len(read_metrics(whole / "metrics.jsonl")) - 1
    assert _violation(whole, whole, steps) == ""
    assert "the ledger has 7 of 8 steps" in _violation(whole, whole, steps + 1)
    shutil.copytree(whole, holed)
    ledger = Ledger(holed / NAME)
    for line in lines(whole / NAME):
        if line.entry.get("step") != 3:
            ledger.append([line.entry])
    ledger.close()
    assert "step 4 follows step 2" in _violation(holed, whole, steps)
    shutil.copytree(whole, other)
    text = (other / "metrics.jsonl").read_text().replace('"loss":', '"loss":1', 1)
    (other / "metrics.jsonl").write_text(text)
    assert "at place 1 are (1, 1" in _violation(other, whole, steps)


@pytest.mark.timeout(300)
def test_a_short_run_under_faults_comes_to_the_same_weights(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    run = subprocess.run(
        [sys.executable, "-m", "hoop", "chaos", *OPTIONS, f"--out={out}"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["equal"]
    assert found["weights_sha256"] == found["undisturbed_sha256"]
    assert sorted(one["kind"] for one in found["faults"]) == ["coordinator", "kill"]
    assert all(one["pause_s"] is not None for one in found["faults"]), "each of them fired, and was noticed"
    assert found["stubborn"] == [], "all left when they were told to"
    assert found["failed"] == ""
    assert found["violation"] == "", "the ledger holds, and the losses are those of the undisturbed run"
    assert found["faults_an_hour"] == pytest.approx(3600 * 2 / found["seconds"])
    assert json.loads(out.read_text()) == found


@pytest.mark.timeout(300)
def test_a_job_that_does_not_start_is_told_of_and_nothing_is_left() -> None:
    """Whoever waits for it does not wait for ever."""
    run = subprocess.run(
        [sys.executable, "-m", "hoop", "chaos", "--faults=1", "--devices=2", "--job=no_such_job"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ,
        check=False,
    )
    assert run.returncode == 1
    assert "hoop train has ended with code 2" in run.stderr
    assert "no_such_job" in run.stderr
