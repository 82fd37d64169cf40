"""``hoop chaos``: a seed determines the random faults, and none of them changes the weights."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

from hoop.errors import InvalidArgument
from hoop.lab.chaos.fault_actions import KINDS, FaultOutcome, draw_schedule
from hoop.lab.chaos.run import Chaos, ChaosConfig, table, verdict, violation
from hoop.report.metrics import read_metrics
from hoop.runs.ledger import NAME, Ledger, lines

TIMEOUT_S = 800.0
OPTIONS = ["--faults=2", "--seed=3", "--devices=2", "--pace=3", "--kinds=kill,coordinator", "--json"]


def test_a_seed_determines_the_faults() -> None:
    assert draw_schedule(200, 7) == draw_schedule(200, 7)
    assert draw_schedule(200, 7) != draw_schedule(200, 8)
    assert {fault.kind for fault in draw_schedule(200, 7)} == set(KINDS)
    assert {fault.target([3, 1, 2]) for fault in draw_schedule(200, 7)} == {1, 2, 3}
    assert [fault.number for fault in draw_schedule(3, 0, ["kill"])] == [1, 2, 3]
    with pytest.raises(InvalidArgument, match="there are kill, stop"):
        draw_schedule(1, 0, ["flood"])


def test_the_table_has_one_row_per_fault_kind() -> None:
    chaos = Chaos(
        ChaosConfig(),
        [FaultOutcome(1, "kill", 2, 5, 0.1, 0.2, 3.0), FaultOutcome(2, "kill", 1, 9, 0.3, 0.4, 5.0)],
    )
    (row,) = table(chaos).rows
    assert row == ["kill", 2, 0.2, 0.3, pytest.approx(0.3), 0.4, 4.0, 5.0, 0, 0]
    assert "NOT those of" in verdict(chaos)
    chaos.violation = "step 4 follows step 2"
    assert "THE RECORD DOES NOT HOLD: step 4 follows step 2" in verdict(chaos)
    chaos.seconds, chaos.failed = 20.0, "the job has ended"
    assert "one every 10.0 s (360 an hour)" in verdict(chaos)
    assert "the next was not survived" in verdict(chaos)


def test_a_missing_step_or_a_different_loss_is_a_violation(tmp_path: Path) -> None:
    """``hoop chaos`` fails on a violation, as it does on different weights."""
    complete, incomplete, changed = (tmp_path / name for name in ("whole", "holed", "other"))
    job = f"{Path(__file__).parents[1] / 'process' / 'train_driver.py'}:job"
    command = [*preloaded.HOOP, "train", job, "--devices=1", "--epochs=1", f"--out={complete}"]
    preloaded.run(command, check=True, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    steps = len(read_metrics(complete / "metrics.jsonl")) - 1
    assert violation(complete, complete, steps) == ""
    assert "the ledger has 7 of 8 steps" in violation(complete, complete, steps + 1)
    shutil.copytree(complete, incomplete)
    ledger = Ledger(incomplete / NAME)
    for line in lines(complete / NAME):
        if line.entry.get("step") != 3:
            ledger.append([line.entry])
    ledger.close()
    assert "step 4 follows step 2" in violation(incomplete, complete, steps)
    shutil.copytree(complete, changed)
    text = (changed / "metrics.jsonl").read_text().replace('"loss":', '"loss":1', 1)
    (changed / "metrics.jsonl").write_text(text)
    assert "at place 1 are (1, 1" in violation(changed, complete, steps)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_short_run_under_faults_ends_with_the_same_weights(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    run = subprocess.run(
        [sys.executable, "-m", "hoop", "chaos", *OPTIONS, f"--out={out}"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["equal"]
    assert report["weights_sha256"] == report["undisturbed_sha256"]
    assert sorted(fault["kind"] for fault in report["faults"]) == ["coordinator", "kill"]
    assert all(fault["pause_s"] is not None for fault in report["faults"]), "a fault did not fire or was not detected"
    assert report["stubborn"] == [], "a process did not exit after the signal"
    assert report["failed"] == ""
    assert report["violation"] == "", "the audit fails, or losses differ from the undisturbed run"
    assert report["faults_an_hour"] == pytest.approx(3600 * 2 / report["seconds"])
    assert json.loads(out.read_text()) == report


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_job_that_does_not_start_is_reported() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hoop", "chaos", "--faults=1", "--devices=2", "--job=no_such_job"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=os.environ,
        check=False,
    )
    assert run.returncode == 1
    assert "hoop train has ended with code 2" in run.stderr
    assert "no_such_job" in run.stderr
