"""Links fail between live devices: the training continues, and its weights equal those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from reported_rows import check_same
from trainings import ENV, hoop_train, run_driver

DRIVER = Path(__file__).parent / "linked_driver.py"
JOB = {"epochs": 2, "batch_size": 32, "shards": 4}


def check(cases: list[tuple[str, str]], folder: Path) -> None:
    """Runs each case, a strategy and its faults, and compares it with the undisturbed run."""
    disturbed = [
        {**JOB, "devices": 4 if "hybrid" in strategy else 3, "strategy": strategy, "faults": fault}
        for strategy, fault in cases
    ]
    undisturbed, *results = run_driver(DRIVER, [{**JOB, "devices": 1}, *disturbed], folder)
    for case, result in zip(cases, results, strict=True):
        # Sorted: of two faults in one step either may come first.
        assert sorted(result.get("faults", [])) == sorted(case[1].split("; ")), f"{case}: {result}"
        check_same(result, undisturbed)


def test_a_reset_connection_is_reopened_and_a_partitioned_device_is_left_out(
    tmp_path: Path,
) -> None:
    faults = "drop@rank=1,step=3; partition@rank=1,step=5"
    check([(strategy, faults) for strategy in ("data", "pipeline")], tmp_path)


@pytest.mark.slow
def test_repeated_link_failures_and_other_strategies(tmp_path: Path) -> None:
    check(
        [
            ("data", "drop@rank=0,step=2; drop@rank=1,step=5; partition@rank=2,step=9"),
            ("data", "partition@rank=0,step=3; kill@rank=1,step=3"),
            ("data", "kill@rank=0,step=1,instruction=load"),
            ("data", "stop@rank=1,step=3,seconds=5"),
            ("pipeline", "partition@rank=0,step=1"),
            ("ring", "partition@rank=2,step=4"),
            ("ps:bsp", "partition@rank=0,step=4"),
            ("hybrid:replicas=2", "drop@rank=2,step=4"),
        ],
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["data", "pipeline"])
def test_losing_a_device_before_the_first_step_changes_nothing(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, job = tmp_path / "flag", [f"{Path(__file__).parent / 'unready_job.py'}:job"]
    undisturbed = hoop_train(*job, "--devices", "1", out=tmp_path / "undisturbed")
    monkeypatch.setitem(ENV, "HOOP_TEST_FLAG", str(flag))
    options = "--devices", "3", "--strategy", strategy
    disturbed = hoop_train(*job, *options, out=tmp_path / "disturbed")
    assert flag.exists(), "no device died"
    check_same(disturbed, undisturbed)
