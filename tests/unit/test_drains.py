"""The coordinator's side of ``hoop drain`` and of devices that leave, in one process and without devices."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from hoop.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership.job_membership import HandoverStage
from hoop.servers import job_supervisor
from hoop.servers.coordinator import Coordinator, CoordinatorConfig
from hoop.servers.drains import Drains
from hoop.servers.job_record import JobRecord
from hoop.servers.job_supervisor import JobSupervisor
from hoop.servers.tasks import Task, Tasks
from hoop.wire.generated import hoop_pb2 as pb

sys.path.append(str(Path(__file__).parent / "membership"))
from roster import device

Result = TypeVar("Result")


class Cluster:
    """A coordinator with devices that are only known to it, and a job on the first of them."""

    def __init__(self, devices: Sequence[int], job_devices: Sequence[int] = (), settings: str = "{}") -> None:
        self.coordinator = Coordinator(CoordinatorConfig())
        for key in devices:
            self.coordinator.apply(m.Joined(device(key), time.monotonic()))
            self.coordinator.apply(m.Heartbeat(key, "a", time.monotonic()))
        self.supervisors: list[JobSupervisor] = []
        if job_devices:
            self.coordinator.apply(m.Created(tuple(job_devices)))
            state = self.coordinator.apply(m.JobStarted(1, settings))
            record = JobRecord(state.communicator(1), settings)
            self.job = JobSupervisor(self.coordinator, record, lambda _, __: None)
            for key in job_devices:
                self.job.handle(jm.TaskFound(key, "a", 1))
            self.job.handle(jm.TasksListed())
            self.supervisors.append(self.job)
        jobs: Any = SimpleNamespace(supervisors=self.supervisors, starting=False)
        self.drains = Drains(self.coordinator, jobs)

    def tick(self) -> None:
        self.coordinator.apply(m.Tick(time.monotonic()))


def run(work: Coroutine[Any, Any, Result]) -> Result:
    async def bounded() -> Result:
        return await asyncio.wait_for(work, 60.0)

    return asyncio.run(bounded())


async def stages(cluster: Cluster, device_id: int, timeout_s: float) -> list[str]:
    return [one.stage async for one in cluster.drains.drain(device_id, timeout_s)]


def test_a_device_without_work_is_told_to_leave_at_once() -> None:
    async def drain() -> list[str]:
        cluster, found = Cluster([1, 2]), []
        async for progress in cluster.drains.drain(2, 0.0):
            found.append(progress.stage)
            assert cluster.drains.is_dismissed("a"), "the answer to its next heartbeat"
            cluster.coordinator.apply(m.Left(2, "a"))
        assert not cluster.drains.is_dismissed("a")
        return found

    assert run(drain()) == ["leaving", "left"]


def test_a_drain_says_how_the_process_of_the_device_ends() -> None:
    async def drain() -> None:
        cluster = Cluster([1, 2])
        async for _ in cluster.drains.drain(2, 0.0, exit_code=143):
            assert cluster.drains.exit_code("a") == 143, "the answer to its next heartbeat"
            cluster.coordinator.apply(m.Left(2, "a"))
        with pytest.raises(InvalidArgument, match=r"^exit_code: 256 is not in 0..255$"):
            async for _ in cluster.drains.drain(1, 0.0, exit_code=256):
                pass

    run(drain())


@pytest.mark.parametrize(
    ("device_id", "timeout_s", "error", "text"),
    [
        (9, 1.0, NotFound, r"^device 9 is unknown; known: \[1, 2, 3\]$"),
        (
            3,
            1.0,
            FailedPrecondition,
            r"^device 3 .* is left \(it left\): it has no work to hand over; hoop status lists",
        ),
        (1, -1.0, InvalidArgument, r"^timeout_s: -1 is not in 0\.\."),
        (1, float("nan"), InvalidArgument, r"^timeout_s: nan is not in 0\.\."),
    ],
)
def test_a_drain_that_makes_no_sense_is_refused(device_id: int, timeout_s: float, error: Any, text: str) -> None:
    async def drain() -> None:
        cluster = Cluster([1, 2, 3])
        cluster.coordinator.apply(m.Left(3, "a"))
        with pytest.raises(error, match=text):
            await stages(cluster, device_id, timeout_s)
        assert cluster.coordinator.state.usable() == [1, 2]

    run(drain())


def test_a_part_without_a_replica_cannot_move() -> None:
    async def drain() -> None:
        cluster = Cluster([1, 2], [1, 2], '{"strategy": "pipeline", "replicate": false}')
        with pytest.raises(FailedPrecondition, match=r"^device 2 has a part of job 1 .* hoop attach 1 --stop$"):
            await stages(cluster, 2, 0.0)

    run(drain())


def test_the_last_device_of_a_job_is_kept_after_the_deadline() -> None:
    """The error names device, reason and remedy; everything is as it was."""

    async def drain() -> None:
        cluster = Cluster([1], [1])
        before = cluster.job.view
        with pytest.raises(DeadlineExceeded, match=r"^device 1 was not drained, it keeps its work: job 1 has no other"):
            await stages(cluster, 1, 0.0)
        assert cluster.job.view == before
        assert cluster.coordinator.state.usable() == [1]

    run(drain())


def test_a_client_that_goes_away_cancels_its_drain() -> None:
    async def drain() -> None:
        cluster = Cluster([1], [1])
        progress = cluster.drains.drain(1, 60.0)
        first = await anext(progress)
        assert (first.stage, first.job_id) == ("waiting", 1)
        assert "waits 60 s more, then the drain fails" in first.text
        with pytest.raises(FailedPrecondition, match=r"^device 1 .* is being drained already"):
            await stages(cluster, 1, 0.0)
        assert list(cluster.job.view.leaving) == [1]
        await progress.aclose()
        assert cluster.job.view.leaving == {}
        assert cluster.coordinator.state.usable() == [1]

    run(drain())


def test_progress_names_the_device_that_is_loading_the_job() -> None:
    async def drain() -> pb.DrainProgress:
        cluster = Cluster([1], [1])
        cluster.coordinator.apply(m.Joined(device(5), time.monotonic()))
        assert cluster.job.view.tasks[5].stage == jm.TaskStage.LOADING
        progress = cluster.drains.drain(1, 0.0)
        first = await anext(progress)
        await progress.aclose()
        await cluster.coordinator.stop()
        return first

    found = run(drain())
    assert (found.stage, list(found.device_ids)) == ("loading", [5])
    assert found.text == "job 1: device 5 is loading the job (0 s)"


def test_a_device_that_leaves_by_itself_is_told_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks again while another device loads the job; with nobody to take over it leaves at once."""
    monkeypatch.setattr("hoop.servers.drains.LOADING_S", 0.0)

    async def hand_over() -> tuple[str, str]:
        cluster = Cluster([1], [1])
        alone = await cluster.drains.hand_over(1, "a")
        cluster = Cluster([1], [1])
        cluster.coordinator.apply(m.Joined(device(5), time.monotonic()))
        first = await cluster.drains.hand_over(1, "a")
        assert cluster.job.handover(1).stage == HandoverStage.LOADING
        await cluster.coordinator.stop()
        return alone, first

    assert run(hand_over()) == ("", "job 1: device 5 is loading the job (0 s); waits for that before it leaves")


def test_a_device_that_loads_a_job_is_not_dead_while_it_sends_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """After half a minute a pause of one lease was enough before, however long it took to load the job."""

    async def load() -> list[bool]:
        now = time.monotonic()
        clock = SimpleNamespace(monotonic=lambda: now)
        monkeypatch.setattr(job_supervisor, "time", clock)
        cluster, alive = Cluster([1, 2], [1, 2]), []
        coordinator = cluster.coordinator
        cluster.job.suspend_heartbeats([2])

        def advance(seconds: float, *senders: int) -> None:
            nonlocal now
            for _ in range(8 * int(seconds)):
                now += 0.125
                for key in senders:
                    coordinator.apply(m.Heartbeat(key, "a", now))
                coordinator.apply(m.Tick(now))
            alive.append(coordinator.state.members[2].usable)

        advance(100, 1, 2)
        kinds = [event.kind for event in cluster.job.record.log.after(0)]
        assert kinds == ["waiting_for_device"] * 10, "every 10 s"
        advance(20, 1)
        advance(15, 1)
        await coordinator.stop()
        return alive

    assert run(load()) == [True, True, False], "a device that is stopped while it loads is noticed"


def test_a_device_that_is_invited_again_while_it_loads_is_not_ready_yet() -> None:
    """It was declared dead and came back: it got a rank before it had loaded the job, and the others waited for it."""
    task = Task(joining=True)
    Tasks._rejoin(None, task, 2)  # type: ignore[arg-type]
    assert task.log.last == 0
