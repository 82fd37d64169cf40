"""The coordinator's part in jobs: it starts them, keeps what they tell, and says how they ended.

client ── StartJob ──▶ coordinator ── StartTask ──▶ each device      (1)
                       coordinator ◀── WatchTask ── each device      (2) kept in the job's log
client ◀── WatchJob ── coordinator                                   (3) from any event on, as often as wanted

No step waits for it. What it adds to the log is the end: the failure that explains the others, or none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from hoop.errors import HoopError, NotFound, PeerLost, UserError, named
from hoop.events import Event, EventLog
from hoop.membership import messages as m
from hoop.membership.state import CommunicatorState
from hoop.servers.conductor import Conductor
from hoop.servers.coordinator import Coordinator
from hoop.servers.launching import seat
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.rpc import translate

START_S = 30.0
STOP_S = 5.0
JOB_ENDED = "job_ended"


@dataclass
class JobRecord:
    """One job, as the coordinator knows it."""

    communicator: CommunicatorState
    log: EventLog = field(default_factory=lambda: EventLog(100_000))
    failures: list[HoopError] = field(default_factory=list)


class Jobs:
    """Every job of this coordinator."""

    def __init__(self, coordinator: Coordinator, conductor: Conductor) -> None:
        self._coordinator = coordinator
        self._conductor = conductor
        self._jobs: dict[int, JobRecord] = {}

    async def start(self, settings: str, device_ids: Sequence[int], resume: str) -> int:
        """Starts a job on these devices; it is on all of them when this returns, or on none."""
        one = await self._conductor.create(device_ids, 0)
        job = JobRecord(one)
        calls = [
            self._coordinator.call(
                device_id,
                "StartTask",
                pb.StartTaskRequest(
                    job_id=one.id, seat=seat(self._coordinator, one, rank), settings=settings, resume=resume
                ),
                START_S,
            )
            for rank, device_id in enumerate(one.members)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)  # (1)
        if failures := [error for error in outcomes if isinstance(error, BaseException)]:
            await self._abort(job, str(failures[0]))
            self._coordinator.apply(m.Destroyed(one.id))
            raise failures[0]
        self._jobs[one.id] = job
        devices = ", ".join(map(str, one.members))
        self._coordinator.events.publish("job_started", f"job {one.id} on devices {devices}", job=one.id)
        self._coordinator.in_background(self._follow(one.id, job))
        return one.id

    async def _follow(self, job_id: int, job: JobRecord) -> None:
        """Watches every rank to its end, and writes the job's."""
        watches = [self._watch(job_id, job, rank) for rank in range(len(job.communicator.members))]
        await asyncio.gather(*watches)
        error = min(job.failures, key=_weight, default=None)
        told = (
            {"kind": JOB_ENDED, "error": type(error).__name__, "text": str(error)}
            if error
            else {"kind": JOB_ENDED}
        )
        job.log.publish(JOB_ENDED, json.dumps(told), rank=0)
        how = f"failed: {error}" if error else "ended"
        self._coordinator.events.publish(JOB_ENDED, f"job {job_id} {how}", job=job_id)
        if job_id in self._coordinator.state.communicators:
            self._coordinator.apply(m.Destroyed(job_id))

    async def _watch(self, job_id: int, job: JobRecord, rank: int) -> None:
        device_id = job.communicator.members[rank]
        try:
            stream = self._coordinator.device(device_id).WatchTask(pb.WatchTaskRequest(job_id=job_id))
            async for event in stream:  # (2)
                if event.kind == "failed":
                    told = json.loads(event.json)
                    await self._failed(
                        job, named(told["error"], f"rank {rank} (device {device_id}): {told['text']}")
                    )
                job.log.publish(event.kind, event.json, rank=rank)
        except grpc.RpcError as error:
            info = self._coordinator.state.members[device_id].info
            lost = translate(error, f"{info}, rank {rank}")
            await self._failed(job, PeerLost(f"{info}, rank {rank}, was lost: {lost}"))

    async def _failed(self, job: JobRecord, error: HoopError) -> None:
        first = not job.failures
        job.failures.append(error)
        if first:
            await self._abort(job, str(error))

    async def _abort(self, job: JobRecord, reason: str) -> None:
        one = job.communicator
        await self._coordinator.abort(m.Stop(one.id, one.generation, reason, one.members))

    def log(self, job_id: int) -> EventLog:
        if job_id not in self._jobs:
            raise NotFound(f"job_id: {job_id} is unknown here")
        return self._jobs[job_id].log

    async def stop(self, job_id: int) -> None:
        """Asks every rank to stop; they agree on the step by themselves."""
        self.log(job_id)
        members = self._jobs[job_id].communicator.members
        request = pb.StopTaskRequest(job_id=job_id)
        calls = (self._coordinator.call(device_id, "StopTask", request, STOP_S) for device_id in members)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome


def is_over(event: Event) -> bool:
    """Whether a job tells nothing after this."""
    return event.kind == JOB_ENDED


def _weight(error: HoopError) -> int:
    """The failure that explains the others first: a mistake, a bug, a death, then its neighbours' complaints."""
    if isinstance(error, UserError):
        return 0
    if isinstance(error, PeerLost):
        return 2 if " was lost: " in str(error) else 3
    return 1
