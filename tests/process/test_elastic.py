"""``hoop train --devices 2:4``: begins with 2 devices, takes in more up to 4, and has the same weights as with 1."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from background import RESTING
from test_ranks import DRIVER, SLOW, SMALL, TIMEOUT_S, codes, errors, printed, start_ranks, wait_until

import hoop
from hoop import job_events as ev
from hoop.errors import PeerLost

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]


def device(start: Start, where: str, *options: object) -> Running:
    return start("device", "--join", where, *SMALL, "--jobs", DRIVER.parent, *options)


def result(running: Running) -> dict[str, Any]:
    assert running.wait(TIMEOUT_S) == 0, running.errors
    (line,) = printed(running)
    found: dict[str, Any] = json.loads(line)
    return found


def one_device(start: Start, steps: int) -> str:
    """The hash of the weights after these steps, on one device."""
    return str(result(start("train", SLOW, *SMALL, "-n", 1, "--set", f"max_steps={steps}", "--json"))["weights_sha256"])


def wait_for(cluster: hoop.Cluster, job: int, ranks: int) -> None:
    """Waits until the job has gone on with this number of ranks."""
    for observed in cluster.job(job).events(coordinator_timeout=TIMEOUT_S):
        if isinstance(observed.event, ev.Resized | ev.Recovered) and observed.event.ranks == ranks:
            return
    raise AssertionError(f"job {job} has ended before it had {ranks} ranks")


def event(cluster: hoop.Cluster, running: Running, kind: str, **fields: object) -> str:
    """Waits for an event of the coordinator; returns its text."""
    found: list[str] = []

    def happened() -> bool:
        wanted = {name: str(value) for name, value in fields.items()}
        with contextlib.suppress(PeerLost):  # a coordinator on a busy machine is slow to answer
            found.extend(
                one.text for one in cluster.events() if one.kind == kind and wanted.items() <= one.fields.items()
            )
        return bool(found)

    wait_until(happened, [running])
    return found[0]


def stop(cluster: hoop.Cluster, job: int, running: Running) -> dict[str, Any]:
    cluster.job(job).stop()
    return result(running)


def devices_of(cluster: hoop.Cluster, job: int) -> list[int]:
    return next(list(one.device_ids) for one in cluster.status().jobs if one.id == job)


def address_in(path: Path, running: Running) -> str:
    wait_until(path.exists, [running])
    return path.read_text().strip()


def test_devices_of_this_machine_join_as_they_are_ready(
    start: Start, connect: Callable[..., hoop.Cluster], tmp_path: Path
) -> None:
    address = tmp_path / "address"
    running = start("train", SLOW, *RESTING, *SMALL, "-n", "2:4", "--json", "--address-file", address)
    cluster = connect(address_in(address, running))
    began = event(cluster, running, "job_devices", devices=2, more=2)
    assert began == "job 1 has 2 devices and can use 2 more"
    event(cluster, running, "job_devices", devices=4, more=0)
    wait_for(cluster, 1, ranks=4)
    trained = stop(cluster, 1, running)
    assert trained["devices"] == 2
    assert len(trained["device_ids"]) == 4
    assert trained["weights_sha256"] == one_device(start, trained["steps"])


def test_a_job_on_a_cluster_waits_for_the_first_and_takes_no_more_than_the_most(
    start: Start, connect: Callable[..., hoop.Cluster], status: Callable[[str], dict[str, Any]]
) -> None:
    where = start("coordinator").address
    first = device(start, where, "--id", 1)
    assert first.first_line
    running = start("train", SLOW, *RESTING, "--coordinator", where, "-n", "2:3")
    wait_until(lambda: "waits for 2 devices, 1 are there" in running.errors, [running])
    cluster = connect(where)
    assert not cluster.status().jobs
    second = device(start, where, "--id", 2)
    wait_until(lambda: bool(cluster.status().jobs), [running])
    assert devices_of(cluster, 1) == [1, 2]
    for number in (3, 4):
        assert device(start, where, "--id", number).first_line
    wait_for(cluster, 1, ranks=3)
    (job,) = status(where)["jobs"]
    assert (job["min_devices"], job["max_devices"], job["can_use"]) == (1, 3, 0)
    (idle,) = {3, 4} - {*job["devices"]}
    second.process.kill()
    wait_until(lambda: idle in devices_of(cluster, 1) and len(devices_of(cluster, 1)) == 3, [running])
    cluster.job(1).stop()
    assert running.wait(TIMEOUT_S) == 0, running.errors
    text = "\n".join(printed(running))
    steps = int(text.partition("stopped after ")[2].split()[0])
    assert one_device(start, steps) in text


def test_with_fewer_than_the_least_number_the_job_waits(start: Start, connect: Callable[..., hoop.Cluster]) -> None:
    where = start("coordinator").address
    devices = [device(start, where, "--id", number) for number in (1, 2)]
    assert all(one.first_line for one in devices)
    running = start("train", SLOW, *RESTING, "--coordinator", where, "-n", "2", "--min", "2", "--json")
    cluster = connect(where)
    event(cluster, running, "job_started")
    for observed in cluster.job(1).events(coordinator_timeout=TIMEOUT_S):
        if isinstance(observed.event, ev.Steps):
            break
    devices[1].process.kill()
    waiting = event(cluster, running, "job_waiting_for_restart")
    assert waiting.startswith("job 1 has 1 device and needs 2 (--min); waits 60 s for others; start one with: hoop")
    assert devices_of(cluster, 1) == [1, 2], "no rank goes on alone"
    assert device(start, where, "--id", 3).first_line
    wait_for(cluster, 1, ranks=2)
    assert devices_of(cluster, 1) == [1, 3]
    trained = stop(cluster, 1, running)
    assert trained["weights_sha256"] == one_device(start, trained["steps"])


@pytest.mark.slow
def test_a_rank_of_a_scheduler_that_comes_late_joins(
    start: Start, connect: Callable[..., hoop.Cluster], tmp_path: Path
) -> None:
    address, number = tmp_path / "address", 987_000_000 + hash(tmp_path.name) % 100_000
    options = (SLOW, "-n", "2:3", "--json", "--address-file", address)
    ranks = start_ranks(start, 3, *options, only=[0, 1], job=number)
    cluster = connect(address_in(address, ranks[0]))
    wait_until(lambda: bool(cluster.status().jobs), ranks)
    ranks += start_ranks(start, 3, *options, only=[2], job=number)
    wait_for(cluster, 1, ranks=3)
    cluster.job(1).stop()
    assert codes(ranks) == [0, 0, 0], errors(ranks)
    (line,) = printed(ranks[0])
    trained = json.loads(line)
    assert trained["device_ids"] == [1, 2, 3]
    assert trained["weights_sha256"] == one_device(start, trained["steps"])


def test_a_range_that_the_processes_of_a_scheduler_do_not_fit_is_named(start: Start) -> None:
    (rank,) = start_ranks(start, 2, SLOW, "-n", "3:4", only=[0])
    assert rank.wait(TIMEOUT_S) == 2
    assert "hoop: --devices: 3:4, where slurm has started 2 processes, each of which is a device" in rank.errors
