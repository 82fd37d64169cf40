"""The coordinator's part in jobs: it starts them, keeps what they tell, reseats them when a member is lost.

client ── StartJob ──▶ coordinator ── StartTask ──▶ each device      (1)
                       coordinator ◀── WatchTask ── each device      (2) kept in the job's log
                       coordinator ── ReseatTask ─▶ each survivor    (3) the next generation, without whoever was lost
                       coordinator ── StartTask ──▶ a newcomer       (4) it gets ready alone; then all are reseated
client ◀── WatchJob ── coordinator                                   (5) from any event on, as often as wanted

No step waits for it. What it adds to the log is who was lost, and how it ended: the failure that
explains the others, or none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from hoop.errors import HoopError, NotFound, PeerLost, UserError, named
from hoop.events import Event, EventLog
from hoop.membership import messages as m
from hoop.membership.state import CommunicatorState
from hoop.servers.conductor import Conductor
from hoop.servers.coordinator import Coordinator
from hoop.servers.launching import seat
from hoop.wire.convert import describe
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.rpc import translate

START_S = 30.0
RESEAT_S = 10.0
STOP_S = 5.0
JOB_ENDED = "job_ended"


@dataclass
class JobRecord:
    """One job, as the coordinator knows it."""

    communicator: CommunicatorState
    settings: str
    log: EventLog = field(default_factory=lambda: EventLog(100_000))
    failures: list[HoopError] = field(default_factory=list)
    ended: bool = False
    """Whether some device came to the end."""
    losses: list[HoopError] = field(default_factory=list)
    """Devices that were lost on the way."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    watches: set[asyncio.Task[None]] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    """Newcomers that wait for a seat."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a newcomer is ready."""

    @property
    def elastic(self) -> bool:
        """Whether it can take more devices while it runs: where every device has the whole model, or mirrors."""
        try:
            settings = json.loads(self.settings)
            return str(settings.get("strategy", "data")) == "data" or bool(settings.get("mirror", True))
        except (ValueError, AttributeError):
            return False

    def rank(self, device_id: int) -> int:
        """A device's rank now; 0 where it is no member (any more, or yet), and its id is what counts."""
        members = self.communicator.members
        return members.index(device_id) if device_id in members else 0


class Jobs:
    """Every job of this coordinator."""

    def __init__(self, coordinator: Coordinator, conductor: Conductor) -> None:
        self._coordinator = coordinator
        self._conductor = conductor
        self._jobs: dict[int, JobRecord] = {}

    async def start(self, settings: str, device_ids: Sequence[int], resume: str) -> int:
        """Starts a job on these devices; it is on all of them when this returns, or on none."""
        one = await self._conductor.create(device_ids, 0)
        job = JobRecord(one, settings)

        def request(rank: int) -> pb.StartTaskRequest:
            place = seat(self._coordinator, one, rank)
            return pb.StartTaskRequest(job_id=one.id, seat=place, settings=settings, resume=resume)

        calls = [
            self._coordinator.call(device_id, "StartTask", request(rank), START_S)
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

    # ---- while it runs

    async def _follow(self, job_id: int, job: JobRecord) -> None:
        """Watches every device to its end, and writes the job's."""
        for device_id in job.communicator.members:
            job.watches.add(self._coordinator.in_background(self._watch(job_id, job, device_id)))
        supervision = self._coordinator.in_background(self._supervise(job_id, job))
        unsubscribe = self._coordinator.events.subscribe(partial(self._welcome, job_id, job))
        while job.watches:
            done, _ = await asyncio.wait(job.watches, return_when="FIRST_COMPLETED")
            job.watches -= done
        unsubscribe()
        job.over.set()
        await supervision
        if not job.ended:
            job.failures += job.losses
        error = min([*job.failures, *job.losses], key=_weight) if job.failures else None
        told = {"kind": JOB_ENDED}
        if error is not None:
            told |= {"error": type(error).__name__, "text": str(error)}
        job.log.publish(JOB_ENDED, json.dumps(told), rank=0, device=0)
        how = f"failed: {error}" if error else "ended"
        self._coordinator.events.publish(JOB_ENDED, f"job {job_id} {how}", job=job_id)
        if job_id in self._coordinator.state.communicators:
            self._coordinator.apply(m.Destroyed(job_id))

    async def _watch(self, job_id: int, job: JobRecord, device_id: int) -> None:
        """What one device tells, until its task ends or it is lost."""
        heard = 0
        while True:
            try:
                request = pb.WatchTaskRequest(job_id=job_id, after=heard)
                async for event in self._coordinator.device(device_id).WatchTask(request):  # (2)
                    heard = event.sequence
                    rank = job.rank(device_id)
                    if event.kind == "failed" and device_id in job.communicator.members:
                        told = json.loads(event.json)
                        text = f"rank {rank} (device {device_id}): {told['text']}"
                        await self._failed(job, named(told["error"], text))
                    elif (
                        event.kind == "failed"
                    ):  # a newcomer that could not get ready: the others need not care
                        self._coordinator.events.publish("job_not_joined", event.json, job=job_id)
                        continue
                    if event.kind == "ready":
                        job.ready.add(device_id)
                        job.changed.set()
                    job.ended = job.ended or event.kind == "ended"
                    job.log.publish(event.kind, event.json, rank=rank, device=device_id)
                return
            except grpc.RpcError as error:
                info = self._coordinator.state.members[device_id].info
                lost = translate(error, f"{info}")
            if not await self._gone(device_id):
                continue  # it lives: only the stream broke
            job.losses.append(PeerLost(f"{info} was lost: {lost}"))
            told = {"kind": "lost", "device": device_id, "text": str(lost)}
            job.log.publish("lost", json.dumps(told), rank=job.rank(device_id), device=device_id)
            return

    async def _gone(self, device_id: int) -> bool:
        """Whether a device whose stream broke is lost; asks it, and waits for the verdict."""
        while self._coordinator.state.members[device_id].usable:
            changed = asyncio.Event()
            unsubscribe = self._coordinator.events.subscribe(partial(_set, changed))
            try:
                await self._coordinator.call(device_id, "Describe", pb.DescribeRequest(), STOP_S)
                return False
            except HoopError:
                if not self._coordinator.state.members[device_id].usable:
                    break
                await asyncio.wait([asyncio.ensure_future(changed.wait())], timeout=STOP_S)
            finally:
                unsubscribe()
        return True

    async def _supervise(self, job_id: int, job: JobRecord) -> None:
        """When a member is lost, those who are left get the next generation's seats."""
        while not job.over.is_set():
            one = job.communicator
            broken = self._coordinator.stops.setdefault((one.id, one.generation), asyncio.Event())
            if not self._coordinator.state.communicator(one.id).broken_by:
                await _first(broken.wait(), job.over.wait(), job.changed.wait())
            if job.over.is_set():
                break
            job.changed.clear()
            newcomers, job.ready = sorted(job.ready), set()
            try:
                job.communicator = await self._conductor.rebuild(job_id, newcomers)  # (3)
                await self._reseat(job_id, job)
            except HoopError as error:
                if not any(self._coordinator.state.members[key].usable for key in one.members):
                    return
                self._coordinator.events.publish("job_failing", f"job {job_id}: {error}", job=job_id)
            finally:
                self._coordinator.stops.pop((one.id, one.generation), None)

    def _welcome(self, job_id: int, job: JobRecord, event: Event) -> None:
        """A device that joins the cluster is asked to get ready for a job that can use it."""
        if event.kind == "device_joined" and job.elastic and not job.over.is_set():
            device_id = int(event.fields["device"])
            self._coordinator.in_background(self._invite(job_id, job, device_id))

    async def _invite(self, job_id: int, job: JobRecord, device_id: int) -> None:
        info = self._coordinator.state.member(device_id).info
        alone = pb.Seat(communicator_id=job_id | 1 << 62, generation=1, rank=0, members=[describe(info)])
        request = pb.StartTaskRequest(job_id=job_id, seat=alone, settings=job.settings, joining=True)
        try:
            await self._coordinator.call(device_id, "StartTask", request, START_S)  # (4)
        except HoopError as error:
            self._coordinator.events.publish("job_not_joined", f"{info}: {error}", job=job_id)
            return
        job.watches.add(self._coordinator.in_background(self._watch(job_id, job, device_id)))

    async def _reseat(self, job_id: int, job: JobRecord) -> None:
        one = job.communicator
        devices = list(one.members)
        told = {"kind": "reseated", "generation": one.generation, "devices": devices}
        job.log.publish("reseated", json.dumps(told), rank=0, device=0)
        calls = [
            self._coordinator.call(
                device_id,
                "ReseatTask",
                pb.ReseatTaskRequest(job_id=job_id, seat=seat(self._coordinator, one, rank)),
                RESEAT_S,
            )
            for rank, device_id in enumerate(one.members)
        ]
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, PeerLost):
                raise outcome  # another one was lost meanwhile; its loss comes round as well

    async def _failed(self, job: JobRecord, error: HoopError) -> None:
        first = not job.failures
        job.failures.append(error)
        if first:
            await self._abort(job, str(error))

    async def _abort(self, job: JobRecord, reason: str) -> None:
        one = job.communicator
        await self._coordinator.abort(m.Stop(one.id, one.generation, reason, one.members))

    # ---- from outside

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


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Returns when one of these does."""
    tasks = [asyncio.ensure_future(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when="FIRST_COMPLETED")
    finally:
        for task in tasks:
            task.cancel()


def _set(changed: asyncio.Event, _: Event) -> None:
    changed.set()


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
