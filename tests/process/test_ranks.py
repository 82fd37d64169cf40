"""``hoop train`` in processes that a scheduler started: one device each, one result, the right exit code in all.

The processes are started here with the environment of Slurm's tasks; ``test_real_schedulers.py`` starts real ones.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from background import RESTING
from scheduler_environments import slurm

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]
    Status = Callable[[str], dict[str, Any]]

DRIVER = Path(__file__).with_name("train_driver.py")
JOB, SLOW, BROKEN = (f"{DRIVER}:{name}" for name in ("job", "slow", "broken"))
SMALL = ("--memory", "16MiB")
TIMEOUT_S = 400.0
_jobs = itertools.count(1000 * os.getpid())
"""Numbers of Slurm jobs: each run has a meeting point of its own."""


def start_ranks(
    start: Start, size: int, *arguments: object, only: Sequence[int] = (), job: int | None = None
) -> list[Running]:
    """Starts the ranks of a run of ``size`` processes, or those in ``only``; all get the same arguments.

    ``job``: the number of a run that has begun.
    """
    job = next(_jobs) if job is None else job
    counts = {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": str(size)}
    return [
        start("train", *arguments, *SMALL, environment=slurm(rank, SLURM_JOB_ID=str(job), **counts))
        for rank in only or range(size)
    ]


def codes(ranks: Sequence[Running]) -> list[int]:
    return [one.wait(TIMEOUT_S) for one in ranks]


def errors(ranks: Sequence[Running]) -> str:
    return "\n".join(one.errors for one in ranks)


def printed(running: Running) -> list[str]:
    assert running.process.stdout is not None
    return [line.decode() for line in running.process.stdout.read().splitlines()]


def local(start: Start, *arguments: object) -> dict[str, Any]:
    """The result of the same training on devices of one process."""
    running = start("train", *arguments, *SMALL, "-n", 2, "--json")
    assert running.wait(TIMEOUT_S) == 0, running.errors
    (line,) = printed(running)
    found: dict[str, Any] = json.loads(line)
    return found


def wait_until(condition: Callable[[], bool], ranks: Sequence[Running]) -> None:
    """Polls for a condition that emits no event."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, errors(ranks)
        assert all(one.process.poll() is None for one in ranks), errors(ranks)
        threading.Event().wait(0.02)


def has_steps(out: Path) -> bool:
    metrics = out / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def tree(pid: int) -> list[int]:
    """A process and all of its descendants."""
    found = [pid]
    for one in found:
        found += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
    return found


def test_ranks_train_as_devices_of_one_process_do(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = start_ranks(start, 3, JOB, "--json", "--out", out)
    assert codes(ranks) == [0, 0, 0], errors(ranks)
    (line,), *others = map(printed, ranks)
    assert others == [[], []], "rank 0 prints the result, and no other rank prints anything"
    trained = json.loads(line)
    assert trained["devices"] == 3
    assert trained["device_ids"] == [1, 2, 3]
    assert trained["weights_sha256"] == local(start, JOB)["weights_sha256"]
    assert json.loads((out / "result.json").read_text())["weights_sha256"] == trained["weights_sha256"]


def test_a_signal_to_all_processes_stops_the_run_and_it_is_resumed(start: Start, tmp_path: Path) -> None:
    """As Slurm does before the time limit: SIGTERM to every process of every task, also those that Hoop forked."""
    out = tmp_path / "run"
    ranks = start_ranks(start, 2, SLOW, *RESTING, "--out", out, "--auto-resume")  # there is nothing to resume from yet
    wait_until(lambda: has_steps(out), ranks)
    for pid in [pid for one in ranks for pid in tree(one.pid)]:
        os.kill(pid, signal.SIGTERM)
    assert codes(ranks) == [143, 143], errors(ranks)
    stopped = json.loads((out / "result.json").read_text())
    assert stopped["stopped"] is True
    limit = f"max_steps={stopped['steps'] + 30}"
    again = start_ranks(start, 2, SLOW, "--out", out, "--auto-resume", "--set", limit, "--json")
    assert codes(again) == [0, 0], errors(again)
    (line,) = printed(again[0])
    assert json.loads(line)["weights_sha256"] == local(start, SLOW, "--set", limit)["weights_sha256"]


def test_a_rank_that_does_not_come_is_named(start: Start) -> None:
    (rank,) = start_ranks(start, 2, JOB, "--meet-timeout", "4s", only=[0])  # in which its own device has come
    assert rank.wait(TIMEOUT_S) == 3
    assert "hoop: rank 1 of 2 did not come to 127.0.0.1:" in rank.errors
    assert "--meet-timeout waits longer" in rank.errors


def test_without_rank_0_another_rank_says_so(start: Start) -> None:
    (rank,) = start_ranks(start, 2, JOB, "--meet-timeout", "1s", only=[1])
    assert rank.wait(TIMEOUT_S) == 3
    assert f"hoop: rank 1 of 2 (slurm) on {socket.gethostname()}: the coordinator at 127.0.0.1:" in rank.errors


def test_a_job_that_is_missing_on_a_host_is_named_with_the_host(start: Start, tmp_path: Path) -> None:
    (rank,) = start_ranks(start, 2, tmp_path / "my_job.py:job", only=[1])
    assert rank.wait(TIMEOUT_S) == 2
    assert f"hoop: rank 1 of 2 (slurm) on {socket.gethostname()}: job: " in rank.errors


def test_a_mistake_in_the_jobs_code_ends_all_ranks_with_its_code(start: Start) -> None:
    ranks = start_ranks(start, 2, BROKEN)
    assert codes(ranks) == [2, 2], errors(ranks)
    assert "ZeroDivisionError: on purpose" in ranks[0].errors


@pytest.mark.slow
def test_a_rank_that_gets_a_signal_hands_over_and_may_come_back(start: Start, status: Status, tmp_path: Path) -> None:
    """As a pod that is evicted, and started again elsewhere."""
    out, address, job = tmp_path / "run", tmp_path / "address", next(_jobs)
    arguments = (SLOW, *RESTING, "--out", out, "--address-file", address)
    ranks = start_ranks(start, 3, *arguments, job=job)
    wait_until(lambda: has_steps(out), ranks)

    def devices() -> list[int]:
        (found,) = status(address.read_text().strip())["jobs"]
        return sorted(found["devices"])

    os.kill(ranks[1].pid, signal.SIGTERM)
    assert ranks[1].wait(TIMEOUT_S) == 143, ranks[1].errors
    assert devices() == [1, 3]
    (again,) = start_ranks(start, 3, *arguments, only=[1], job=job)
    wait_until(lambda: devices() == [1, 2, 3], [ranks[0], ranks[2], again])
    os.kill(ranks[0].pid, signal.SIGTERM)
    assert codes([ranks[0], again, ranks[2]]) == [143, 143, 143], errors(ranks)
    stopped = json.loads((out / "result.json").read_text())
    undisturbed = local(start, SLOW, "--set", f"max_steps={stopped['steps']}")
    assert stopped["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.slow
def test_a_killed_rank_changes_nothing_and_the_others_end_well(start: Start, tmp_path: Path) -> None:
    limit = "max_steps=2000"
    out = tmp_path / "run"
    ranks = start_ranks(start, 3, SLOW, "--out", out, "--set", limit)
    wait_until(lambda: has_steps(out), ranks)
    ranks[2].kill()
    assert codes(ranks[:2]) == [0, 0], errors(ranks)
    trained = json.loads((out / "result.json").read_text())
    assert trained["weights_sha256"] == local(start, SLOW, "--set", limit)["weights_sha256"]


@pytest.mark.slow
def test_without_rank_0_the_others_end(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "run"
    ranks = start_ranks(start, 2, SLOW, "--out", out)
    wait_until(lambda: has_steps(out), ranks)
    ranks[0].kill()
    assert ranks[1].wait(TIMEOUT_S) == 3, ranks[1].errors
    assert f"rank 1 of 2 (slurm) on {socket.gethostname()}: rank 0 is gone" in ranks[1].errors
