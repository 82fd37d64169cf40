"""The coordinator's part in jobs: it starts them, keeps what they tell, and writes how they ended.

client ── StartJob ──▶ coordinator ── StartTask ──▶ each device      (1) then the journal has it
                       coordinator ◀── WatchTask ── each device      (2) kept in the job's log
client ◀── WatchJob ── coordinator                                   (3) from any event on, as often as wanted

No step waits for it. Who takes part is decided in ``seating``. It may be killed and started again: its journal names
the jobs, and the devices, which went on, tell again what they told.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial

import grpc

from hoop.errors import HoopError, NotFound, PeerLost, named
from hoop.events import Event
from hoop.membership import messages as m
from hoop.membership.state import CommunicatorState, JobState
from hoop.servers.conductor import Conductor
from hoop.servers.coordinator import Coordinator
from hoop.servers.following import following
from hoop.servers.job_record import JOB_ENDED, JobRecord, is_over
from hoop.servers.launching import seat
from hoop.servers.reunion import reunite
from hoop.servers.seating import START_S, Seating
from hoop.topology import DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.job_settings import job_name
from hoop.wire.rpc import translate, unreachable

STOP_S = 5.0


class Jobs:
    """Every job of this coordinator."""

    def __init__(self, coordinator: Coordinator, conductor: Conductor) -> None:
        self._coordinator = coordinator
        self._conductor = conductor
        self._jobs: dict[int, JobRecord] = {}
        self._seating = Seating(coordinator, conductor, self._listen)

    async def start(self, settings: str, device_ids: Sequence[int], resume: str) -> int:
        """Starts a job on these devices; it is on all of them when this returns, or on none."""
        one = await self._conductor.create(device_ids, 0)
        job = JobRecord(one, settings)
        self._seating.excuse(one.members)

        def request(rank: int) -> pb.StartTaskRequest:
            place = seat(self._coordinator, one, rank)
            return pb.StartTaskRequest(
                job_id=one.id, seat=place, settings=settings, resume=resume, run=job.run
            )

        calls = [
            self._coordinator.call(device_id, "StartTask", request(rank), START_S)
            for rank, device_id in enumerate(one.members)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)  # (1)
        try:
            if failures := [error for error in outcomes if isinstance(error, BaseException)]:
                raise failures[0]
            await self._coordinator.change(m.JobStarted(one.id, settings, job.run))
        except BaseException as error:
            await self._abort(job, str(error))
            await self._coordinator.change(m.Destroyed(one.id))
            raise
        self._jobs[one.id] = job
        devices = ", ".join(map(str, one.members))
        self._coordinator.events.publish("job_started", f"job {one.id} on devices {devices}", job=one.id)
        for device_id in one.members:
            self._listen(job, device_id)
        self._coordinator.in_background(self._follow(job))
        return one.id

    # ---- after a restart

    def resume(self) -> None:
        """The jobs that the journal names: those that run are followed again, of the others the end is known."""
        for known in self._coordinator.state.jobs.values():
            one = self._coordinator.state.communicators.get(known.id)
            job = JobRecord(one or CommunicatorState(known.id, known.devices), known.settings, known.run)
            self._jobs[known.id] = job
            self._coordinator.in_background(self._remember(job, known) if known.ended else self._find(job))

    async def _remember(self, job: JobRecord, known: JobState) -> None:
        """What the devices still know of a job that has ended."""
        job.over.set()
        for device_id in known.devices:
            self._listen(job, device_id)
        if job.watches:
            await asyncio.wait(job.watches.values())
        self._tell_end(job, named(known.error, known.text) if known.error else None)

    async def _find(self, job: JobRecord) -> None:
        """Asks everybody what it runs: members that are not in their seats, newcomers that were getting ready."""
        one, state = job.communicator, self._coordinator.state
        usable = [device_id for device_id, member in state.members.items() if member.usable]
        calls = (self._coordinator.call(key, "Describe", pb.DescribeRequest(), STOP_S) for key in usable)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for device_id, answer in zip(usable, answers, strict=True):
            if isinstance(answer, BaseException):
                continue  # the detector's business
            seats = [task.generation for task in answer.tasks if task.job_id == job.id]
            if seats == [0]:  # it gets ready
                job.joining.add(state.members[device_id].info.incarnation)
            elif device_id in one.members and seats and seats[0] != one.generation:
                job.uneven.set()
            if seats and device_id not in one.members:
                self._seating.excuse([device_id])
                self._listen(job, device_id)
        for device_id in one.members:
            self._listen(job, device_id)
        devices = ", ".join(map(str, one.members))
        self._coordinator.events.publish("job_found", f"job {job.id} on devices {devices}", job=job.id)
        await self._follow(job)

    # ---- while it runs

    async def _follow(self, job: JobRecord) -> None:
        """Until no member's task is under way any more; then writes how it ended."""
        unsubscribe = self._coordinator.events.subscribe(partial(self._seating.welcome, job))
        going = True
        while going:
            supervision = self._coordinator.in_background(self._seating.supervise(job))
            while self._under_way(job):
                await asyncio.wait(job.watches.values(), return_when="FIRST_COMPLETED")
                job.watches = {key: watch for key, watch in job.watches.items() if not watch.done()}
            job.uneven.set()  # whoever supervises sees that nobody is in a seat
            await supervision
            going = await reunite(self._coordinator, self._seating, job)
        unsubscribe()
        job.over.set()
        error = job.outcome()
        try:
            words = (type(error).__name__, str(error)) if error else ("", "")
            await self._coordinator.change(m.JobEnded(job.id, *words))
        except HoopError as trouble:  # a full disk: whoever waits must hear of the end all the same
            self._coordinator.events.publish("coordinator_failing", str(trouble))
        self._tell_end(job, error)
        self._jobs = {key: one for key, one in self._jobs.items() if key in self._coordinator.state.jobs}
        how = f"failed: {error}" if error else "ended"
        self._coordinator.events.publish(JOB_ENDED, f"job {job.id} {how}", job=job.id)

    def _under_way(self, job: JobRecord) -> bool:
        state = self._coordinator.state
        return any(job.seated(state, device_id) for device_id in job.communicator.members)

    def _tell_end(self, job: JobRecord, error: HoopError | None) -> None:
        told = {"kind": JOB_ENDED}
        if error is not None:
            told |= {"error": type(error).__name__, "text": str(error)}
        job.tell(JOB_ENDED, json.dumps(told))

    def _listen(self, job: JobRecord, device_id: int) -> None:
        """Watches a device's task, unless that is being done."""
        info = self._coordinator.state.member(device_id).info
        if not job.watched(self._coordinator.state, device_id):
            job.watches[info.incarnation] = self._coordinator.in_background(self._watch(job, info))

    async def _watch(self, job: JobRecord, info: DeviceInfo) -> None:
        """What one device tells, until its task ends or it is lost."""
        heard, device_id = 0, info.device_id
        while True:
            try:
                request = pb.WatchTaskRequest(job_id=job.id, after=heard)
                async for event in self._coordinator.device(device_id).WatchTask(request):  # (2)
                    heard = event.sequence
                    if event.origin not in job.heard:
                        job.heard.add(event.origin)
                        await self._told(job, info, event)
                return
            except grpc.RpcError as error:
                lost = translate(error, f"{info}")
                answers = not unreachable(error)  # and has no such task: it was restarted
            if job.over.is_set():
                return
            if not answers and not await self._gone(info):
                continue  # it lives: only the stream broke
            job.forget(info)
            job.losses.append(PeerLost(f"{info} was lost: {lost}"))
            told = {"kind": "lost", "device": device_id, "text": str(lost)}
            job.tell("lost", json.dumps(told), job.rank(device_id), device_id)
            if answers:
                job.uneven.set()
            return

    async def _told(self, job: JobRecord, info: DeviceInfo, event: pb.JobEvent) -> None:
        device_id = info.device_id
        rank, member = job.rank(device_id), device_id in job.communicator.members
        member = member and info.incarnation not in job.joining
        match event.kind:
            case "failed" if not member:  # a newcomer that could not get ready: the others need not care
                self._seating.without(job, info, json.loads(event.json)["text"])
                return
            case "started":
                job.data = json.loads(event.json).get("same", "")
            case "failed":
                told = json.loads(event.json)
                text = f"rank {rank} (device {device_id}): {told['text']}"
                await self._failed(job, named(told["error"], text))
            case "waiting":
                waiting = json.loads(event.json)
                self._seating.complained(job, waiting["generation"], device_id, waiting["failed"])
                return
            case "loaded":
                self._seating.excuse([device_id], 0.0)
                return
            case "ready" if not member:
                if refusal := job.refusal(info, json.loads(event.json)):
                    self._seating.without(job, info, refusal)
                    return
                self._seating.excuse([device_id], 0.0)  # one that was only away has nothing to load
                job.ready.add(device_id)
                job.changed.set()
            case "moved" | "recovered":
                self._seating.settled(job)
            case "ended":
                job.ended = True
        job.tell(event.kind, event.json, rank, device_id, event.origin)

    async def _gone(self, info: DeviceInfo) -> bool:
        """Whether a device whose stream broke is lost; asks it, and waits for the verdict."""
        while (member := self._coordinator.state.members[info.device_id]).usable:
            if member.info.incarnation != info.incarnation:
                return True
            changed = asyncio.Event()
            unsubscribe = self._coordinator.events.subscribe(partial(_set, changed))
            try:
                await self._coordinator.call(info.device_id, "Describe", pb.DescribeRequest(), STOP_S)
                return False
            except HoopError:
                if not self._coordinator.state.members[info.device_id].usable:
                    break
                await asyncio.wait([asyncio.ensure_future(changed.wait())], timeout=STOP_S)
            finally:
                unsubscribe()
        return True

    async def _failed(self, job: JobRecord, error: HoopError) -> None:
        first = not job.failures
        job.failures.append(error)
        if first and not job.over.is_set():
            await self._abort(job, str(error))

    async def _abort(self, job: JobRecord, reason: str) -> None:
        one = job.communicator
        await self._coordinator.abort(m.Stop(one.id, one.generation, reason, one.members))

    # ---- from outside

    def events(self, job_id: int, after: int) -> AsyncIterator[Event]:
        """What a job told, and tells until it ends."""
        return following(self._job(job_id).log, after, is_over)  # (3)

    def _job(self, job_id: int) -> JobRecord:
        if job_id not in self._jobs:
            raise NotFound(f"job_id: {job_id} is unknown here; known: {sorted(self._jobs) or 'none'}")
        return self._jobs[job_id]

    def messages(self) -> list[pb.Job]:
        """Those that run, and the last that ended."""
        found = []
        for one in self._coordinator.state.jobs.values():
            running = self._coordinator.state.communicators.get(one.id)
            devices = running.members if running is not None and not one.ended else one.devices
            status = "running" if not one.ended else "failed" if one.error else "ended"
            found.append(
                pb.Job(
                    id=one.id,
                    name=job_name(one.settings),
                    device_ids=devices,
                    status=status,
                    reason=one.text[:1000],
                )
            )
        return found

    async def drain(self, device_id: int) -> None:
        """Returns when no job needs this device any more, or nobody could take over."""
        await self._seating.drain([job for job in self._jobs.values() if not job.over.is_set()], device_id)

    async def stop(self, job_id: int) -> None:
        """Asks every rank to stop; they agree on the step by themselves. If all are lost, nobody is waited for."""
        job, request = self._job(job_id), pb.StopTaskRequest(job_id=job_id)
        if not self._under_way(job):
            job.abandoned.set()
        calls = (self._coordinator.call(key, "StopTask", request, STOP_S) for key in job.communicator.members)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [one for one in outcomes if isinstance(one, BaseException)]
        if len(errors) == len(outcomes):  # one who hears it tells all the others
            raise errors[0]


def _set(changed: asyncio.Event, _: Event) -> None:
    changed.set()
