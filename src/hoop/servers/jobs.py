"""The coordinator's part in jobs: it starts them, keeps what they tell, and writes how they ended.

client ── StartJob ──▶ coordinator ── StartTask ──▶ each device      (1) then the journal has it
                       coordinator ◀── WatchTask ── each device      (2) kept in the job's log
client ◀── WatchJob ── coordinator                                   (3) from any event on, as often as wanted

No step waits for it. Who takes part is decided in ``membership.job_membership``. It may be killed and started again:
its journal names the jobs, and the devices, which went on, send their events again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial

import grpc

from hoop.errors import HoopError, NotFound, PeerLost, named
from hoop.events import Event
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership.state import CommunicatorState, JobState
from hoop.servers.coordinator import Coordinator
from hoop.servers.job_record import JOB_ENDED, JobRecord, follow_events, is_over
from hoop.servers.operations import OperationQueue, assign_ranks
from hoop.servers.rank_assignment import START_S, JobSupervisor
from hoop.topology import DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.job_settings import job_name
from hoop.wire.service import translate, unreachable

STOP_S = 5.0
DRAIN_S = 10.0
"""How long a device that leaves is asked to wait for the others to take over: a step, mostly."""
LAST_EVENTS_S = 5.0
"""How long the last events of a job that is over are waited for."""


class Jobs:
    """Every job of this coordinator."""

    def __init__(self, coordinator: Coordinator, conductor: OperationQueue) -> None:
        self._coordinator = coordinator
        self._conductor = conductor
        self._jobs: dict[int, JobRecord] = {}
        self._supervisors: dict[int, JobSupervisor] = {}
        """Of the jobs that run."""

    async def start(self, settings: str, device_ids: Sequence[int], resume: str) -> int:
        """Starts a job on these devices; it is on all of them when this returns, or on none."""
        one = await self._conductor.create(device_ids, 0)
        job = JobRecord(one, settings)
        supervisor = JobSupervisor(self._coordinator, job, self._listen)
        supervisor.excuse(one.members)

        def request(rank: int) -> pb.StartTaskRequest:
            place = assign_ranks(self._coordinator, one, rank)
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
            supervisor.close()
            await self._abort(job, str(error))
            await self._coordinator.change(m.Destroyed(one.id))
            raise
        self._jobs[one.id], self._supervisors[one.id] = job, supervisor
        devices = ", ".join(map(str, one.members))
        self._coordinator.events.publish("job_started", f"job {one.id} on devices {devices}", job=one.id)
        for device_id in one.members:
            self._listen(job, device_id)
            info = self._coordinator.state.member(device_id).info
            supervisor.handle(jm.TaskFound(device_id, info.incarnation, one.generation))
        supervisor.handle(jm.TasksListed())
        self._coordinator.in_background(self._follow(supervisor))
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
        for device_id in known.devices:
            self._listen(job, device_id)
        if job.watches:
            await asyncio.wait(job.watches.values())
        self._tell_end(job, named(known.error, known.text) if known.error else None)

    async def _find(self, job: JobRecord) -> None:
        """Asks everybody what it runs: members that have no rank of the newest generation, newcomers that load."""
        one, state = job.communicator, self._coordinator.state
        supervisor = JobSupervisor(self._coordinator, job, self._listen, state.jobs[job.id].devices)
        self._supervisors[job.id] = supervisor
        usable = [device_id for device_id, member in state.members.items() if member.usable]
        calls = (self._coordinator.call(key, "Describe", pb.DescribeRequest(), STOP_S) for key in usable)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        ended: list[asyncio.Task[None]] = []
        for device_id, answer in zip(usable, answers, strict=True):
            if isinstance(answer, BaseException) and device_id not in one.members:
                continue  # it arrives when it is heard from
            generations = [one.generation]  # a member that cannot be asked is the detector's business
            if not isinstance(answer, BaseException):
                generations = [task.generation for task in answer.tasks if task.job_id == job.id]
            for generation in generations:
                if device_id not in one.members:
                    supervisor.excuse([device_id])
                self._listen(job, device_id)
                incarnation = self._coordinator.state.members[device_id].info.incarnation
                supervisor.handle(jm.TaskFound(device_id, incarnation, generation))
            if not generations and device_id in one.members:  # it may have come to the end meanwhile
                self._listen(job, device_id)
                ended.append(job.watches[state.members[device_id].info.incarnation])
        if ended:
            await asyncio.wait(ended, timeout=STOP_S)
        supervisor.handle(jm.TasksListed())
        devices = ", ".join(map(str, one.members))
        self._coordinator.events.publish("job_found", f"job {job.id} on devices {devices}", job=job.id)
        await self._follow(supervisor)

    # ---- while it runs

    async def _follow(self, supervisor: JobSupervisor) -> None:
        """Until the job is over; then writes how it ended."""
        job = supervisor.record
        await supervisor.over.wait()
        if job.watches:  # what its tasks still have to tell
            await asyncio.wait(job.watches.values(), timeout=LAST_EVENTS_S)
        for watch in job.watches.values():
            watch.cancel()
        self._supervisors.pop(job.id, None)
        error = job.outcome()
        try:
            words = (type(error).__name__, str(error)) if error else ("", "")
            await self._coordinator.change(m.JobEnded(job.id, *words))
        except HoopError as trouble:  # a full disk: clients that wait must hear of the end all the same
            self._coordinator.events.publish("coordinator_failing", str(trouble))
        self._tell_end(job, error)
        self._jobs = {key: one for key, one in self._jobs.items() if key in self._coordinator.state.jobs}
        how = f"failed: {error}" if error else "ended"
        self._coordinator.events.publish(JOB_ENDED, f"job {job.id} {how}", job=job.id)

    def _tell_end(self, job: JobRecord, error: HoopError | None) -> None:
        told = {"kind": JOB_ENDED}
        if error is not None:
            told |= {"error": type(error).__name__, "text": str(error)}
        job.tell(JOB_ENDED, json.dumps(told))

    def _listen(self, job: JobRecord, device_id: int) -> None:
        """Watches a device's task, unless that is being done."""
        info = self._coordinator.state.member(device_id).info
        if not job.watched(info.incarnation):
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
            if job.id not in self._supervisors:
                return
            if not answers and not await self._gone(info):
                continue  # it lives: only the stream broke
            self._task_lost(job, info, lost)
            return

    def _task_lost(self, job: JobRecord, info: DeviceInfo, lost: HoopError) -> None:
        supervisor = self._supervisors.get(job.id)
        if supervisor is None or supervisor.view.over:
            return
        job.losses.append(PeerLost(f"{info} was lost: {lost}"))
        told = {"kind": "lost", "device": info.device_id, "text": str(lost)}
        job.tell("lost", json.dumps(told), job.rank(info.device_id), info.device_id)
        supervisor.handle(jm.TaskLost(info.device_id, info.incarnation))

    async def _told(self, job: JobRecord, info: DeviceInfo, event: pb.JobEvent) -> None:
        """One event of a device's task: for the log, and for the job's membership where it is about that."""
        device_id = info.device_id
        task: tuple[int, str] = (device_id, info.incarnation)
        supervisor = self._supervisors.get(job.id)
        if supervisor is None:  # the job has ended: only what it told is of interest
            job.tell(event.kind, event.json, job.rank(device_id), device_id, event.origin)
            return
        rank, member = job.rank(device_id), supervisor.has_rank(device_id)
        match event.kind:
            case "failed" if not member:  # a newcomer that could not get ready: the others need not care
                supervisor.refuse(info, json.loads(event.json)["text"])
                return
            case "started":
                job.data = json.loads(event.json).get("same", "")
            case "failed":
                told = json.loads(event.json)
                text = f"rank {rank} (device {device_id}): {told['text']}"
                await self._failed(job, named(told["error"], text))
                supervisor.handle(jm.TaskFinished(*task, failed=True))
            case "waiting":
                told = json.loads(event.json)
                supervisor.complained(told["generation"], device_id, told["failed"])
                lacks = told.get("lacks", ""), told.get("error", "")
                supervisor.handle(jm.TaskWaiting(*task, told["generation"], *lacks))
                return
            case "loaded":
                supervisor.excuse([device_id], 0.0)
                return
            case "ready" if not member:
                if refusal := job.refusal(info, json.loads(event.json)):
                    supervisor.refuse(info, refusal)
                    return
                supervisor.excuse([device_id], 0.0)  # one that was only away has nothing to load
                supervisor.handle(jm.TaskReady(*task))
            case "moved" | "recovered":
                supervisor.resumed(int(json.loads(event.json)["generation"]))
            case "ended":
                job.ended = True
                supervisor.handle(jm.TaskFinished(*task, finished=True))
            case "left":
                supervisor.handle(jm.TaskFinished(*task))
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
        job.failures.append(error)
        if len(job.failures) == 1:
            await self._abort(job, str(error))

    async def _abort(self, job: JobRecord, reason: str) -> None:
        one = job.communicator
        await self._coordinator.abort(m.Stop(one.id, one.generation, reason, one.members))

    # ---- from outside

    def events(self, job_id: int, after: int) -> AsyncIterator[Event]:
        """What a job told, and tells until it ends."""
        return follow_events(self._job(job_id).log, after, is_over)  # (3)

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
        """Returns when no job needs this device any more, nobody can take over, or it takes too long."""
        waits = []
        for supervisor in list(self._supervisors.values()):
            waits += supervisor.drain(device_id)
        if waits:
            await asyncio.wait([asyncio.ensure_future(one) for one in waits], timeout=DRAIN_S)

    async def stop(self, job_id: int) -> None:
        """Asks every rank to stop; they agree on the step by themselves. If all are lost, nobody is waited for."""
        job, request = self._job(job_id), pb.StopTaskRequest(job_id=job_id)
        supervisor = self._supervisors.get(job_id)
        if supervisor is not None:
            supervisor.handle(jm.StopRequested())
        calls = (self._coordinator.call(key, "StopTask", request, STOP_S) for key in job.communicator.members)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [one for one in outcomes if isinstance(one, BaseException)]
        if len(errors) == len(outcomes):  # one device that hears it tells all the others
            raise errors[0]


def _set(changed: asyncio.Event, _: Event) -> None:
    changed.set()
