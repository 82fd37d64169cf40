"""Jobs of the coordinator: it starts them, collects their events, and records how they end.

client ── StartJob ──▶ coordinator ── StartTask ──▶ each device      (1) then the journal has the job
                       coordinator ◀── WatchTask ── each device      (2) events go to the job's log
client ◀── WatchJob ── coordinator                                   (3) from any event on, as often as wanted

No training step waits for the coordinator. ``membership.job_membership`` decides which devices take part;
``job_supervisor.JobSupervisor`` carries that out. The coordinator may be killed and restarted: its journal names the
jobs, and the devices, which kept training, send their events again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial

import grpc

from hoop import job_events as ev
from hoop.errors import FailedPrecondition, HoopError, NotFound, PeerCause, PeerLost, ResourceExhausted, error_from_name
from hoop.events import Event
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership.reachability import describe, left_out
from hoop.membership.state import CommunicatorState, JobState
from hoop.servers.coordinator import Coordinator
from hoop.servers.job_progress import JobProgress, PauseHistogram
from hoop.servers.job_record import JobRecord, follow_events, is_over
from hoop.servers.job_supervisor import START_S, JobSupervisor
from hoop.servers.link_checks import JoinCheck
from hoop.servers.operations import OperationQueue, rank_assignment_message
from hoop.topology import DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.job_settings import job_name
from hoop.wire.service import translate, unreachable

STOP_S = 5.0
LAST_EVENTS_S = 5.0
"""Seconds that the coordinator waits for the last events of a job that is over."""

MEMBERSHIP_EVENTS = (
    ev.Loaded,
    ev.Ready,
    ev.Started,
    ev.Waiting,
    ev.Resized,
    ev.Recovered,
    ev.SnapshotTaken,
    ev.Hung,
    ev.Ended,
    ev.Left,
    ev.Failed,
)
"""Events of a task that the coordinator acts on."""


class Jobs:
    """Every job of this coordinator: running ones, and the last that ended."""

    def __init__(self, coordinator: Coordinator, operations: OperationQueue, join_check: JoinCheck) -> None:
        self._coordinator = coordinator
        self._join_check = join_check
        self._operations = operations
        self._jobs: dict[int, JobRecord] = {}
        self._supervisors: dict[int, JobSupervisor] = {}
        """Supervisors of the running jobs, by job id."""
        self._starting = 0
        """Number of jobs that are being started."""
        self.recovery_pauses = PauseHistogram()
        """Pauses after a failure, of all jobs since the coordinator started."""
        self.resize_pauses = PauseHistogram()
        """Pauses for a join or a leave, of all jobs since the coordinator started."""

    # ---- start

    async def start(self, settings: str, device_ids: Sequence[int], resume: str) -> int:
        """Starts a job on these devices, without those to which others cannot connect.

        When this returns, it runs on all of them; if it raises, on none.
        """
        running, most = len(self._supervisors) + self._starting, self._coordinator.config.max_jobs
        if running >= most:
            raise ResourceExhausted(
                f"{running} jobs run here, the limit; wait for one to end, stop one, or raise it with "
                "hoop coordinator --max-jobs"
            )
        self._starting += 1
        try:
            return await self._start(settings, device_ids, resume)
        finally:
            self._starting -= 1

    async def _start(self, settings: str, device_ids: Sequence[int], resume: str) -> int:
        await self._join_check.settle(device_ids)
        refused = self._unreachable(device_ids)
        taken = [key for key in device_ids if key not in refused]
        if device_ids and not taken:
            raise FailedPrecondition(f"devices: none can take part. {'; '.join(refused.values())}")
        one = await self._operations.create(taken, 0)
        job = JobRecord(one, settings)
        supervisor = JobSupervisor(self._coordinator, job, self._watch_task)
        supervisor.suspend_heartbeats(one.members)

        def request(rank: int) -> pb.StartTaskRequest:
            assignment = rank_assignment_message(self._coordinator, one, rank)
            return pb.StartTaskRequest(
                job_id=one.id, assignment=assignment, settings=settings, resume=resume, run=job.run
            )

        calls = [
            self._coordinator.call(device_id, lambda device: device.StartTask, request(rank), START_S)
            for rank, device_id in enumerate(one.members)
        ]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)  # (1)
        try:
            if failures := [error for error in outcomes if isinstance(error, BaseException)]:
                raise failures[0]
            await self._coordinator.apply_with_retry(m.JobStarted(one.id, settings, job.run))
        except BaseException as error:
            supervisor.close()
            await self._abort(job, str(error))
            await self._dismiss(job)
            await self._coordinator.apply_with_retry(m.Destroyed(one.id))
            raise
        self._jobs[one.id], self._supervisors[one.id] = job, supervisor
        devices = ", ".join(map(str, one.members))
        self._coordinator.events.publish("job_started", f"job {one.id} on devices {devices}", job=one.id)
        supervisor.announce_size()
        for device_id in one.members:
            self._watch_task(job, device_id)
            info = self._coordinator.state.member(device_id).info
            supervisor.handle(jm.TaskFound(device_id, info.incarnation, one.generation))
        for device_id, reason in refused.items():
            supervisor.announce_refusal(device_id, reason)
        supervisor.handle(jm.TasksListed())
        self._coordinator.in_background(self._run_to_end(supervisor))
        return one.id

    def _unreachable(self, device_ids: Sequence[int]) -> dict[int, str]:
        """The devices that a job on ``device_ids`` does without, and why; others that are left out are named too."""
        state = self._coordinator.state
        others = [key for key in left_out(state, state.usable()) if key not in device_ids]
        found = [*left_out(state, [key for key in device_ids if key in state.members]), *others]
        return {key: f"{state.members[key].info} takes no part: {describe(state, key)}" for key in sorted(found)}

    # ---- after a restart of the coordinator

    def resume(self) -> None:
        """Restores the jobs of the journal: finds the tasks of running ones, and the events of ended ones."""
        for known in self._coordinator.state.jobs.values():
            one = self._coordinator.state.communicators.get(known.id)
            job = JobRecord(one or CommunicatorState(known.id, known.devices), known.settings, known.run)
            self._jobs[known.id] = job
            self._coordinator.in_background(
                self._restore_ended(job, known) if known.ended else self._restore_running(job)
            )

    async def _restore_ended(self, job: JobRecord, known: JobState) -> None:
        """Collects the events of an ended job that its devices still have."""
        for device_id in known.devices:
            self._watch_task(job, device_id)
        if job.watches:
            await asyncio.wait(job.watches.values())
        self._emit_end(job, error_from_name(known.error, known.text) if known.error else None)

    async def _restore_running(self, job: JobRecord) -> None:
        """Asks every device for its task: a member may lack its newest rank, and a new device may be loading."""
        one, state = job.communicator, self._coordinator.state
        supervisor = JobSupervisor(self._coordinator, job, self._watch_task, state.jobs[job.id].devices)
        self._supervisors[job.id] = supervisor
        usable = [device_id for device_id, member in state.members.items() if member.usable]
        calls = (
            self._coordinator.call(key, lambda device: device.Describe, pb.DescribeRequest(), STOP_S) for key in usable
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        ended: list[asyncio.Task[None]] = []
        for device_id, answer in zip(usable, answers, strict=True):
            if isinstance(answer, BaseException) and device_id not in one.members:
                continue  # it is invited when it sends a heartbeat again
            generations = [one.generation]  # for a member that does not answer; the failure detector decides
            if not isinstance(answer, BaseException):
                generations = [task.generation for task in answer.tasks if task.job_id == job.id]
            for generation in generations:
                if device_id not in one.members:
                    supervisor.suspend_heartbeats([device_id])
                self._watch_task(job, device_id)
                incarnation = self._coordinator.state.members[device_id].info.incarnation
                supervisor.handle(jm.TaskFound(device_id, incarnation, generation))
            if not generations and device_id in one.members:  # its task may have ended meanwhile
                self._watch_task(job, device_id)
                ended.append(job.watches[state.members[device_id].info.incarnation])
        if ended:
            await asyncio.wait(ended, timeout=STOP_S)
        supervisor.handle(jm.TasksListed())
        devices = ", ".join(map(str, one.members))
        self._coordinator.events.publish("job_found", f"job {job.id} on devices {devices}", job=job.id)
        await self._run_to_end(supervisor)

    # ---- while a job runs

    async def _run_to_end(self, supervisor: JobSupervisor) -> None:
        """Waits until the job is over, then records its outcome."""
        job = supervisor.record
        await supervisor.over.wait()
        if job.watches:  # the tasks' last events
            await asyncio.wait(job.watches.values(), timeout=LAST_EVENTS_S)
        for watch in job.watches.values():
            watch.cancel()
        self._supervisors.pop(job.id, None)
        error = job.outcome()
        try:
            name, text = (type(error).__name__, str(error)) if error else ("", "")
            await self._coordinator.apply_with_retry(m.JobEnded(job.id, error=name, text=text))
        except HoopError as journal_error:  # a full disk: clients must still learn that the job ended
            self._coordinator.events.publish("coordinator_failing", str(journal_error))
        self._emit_end(job, error)
        self._jobs = {key: one for key, one in self._jobs.items() if key in self._coordinator.state.jobs}
        how = f"failed: {error}" if error else "ended"
        self._coordinator.events.publish(ev.JobEnded.kind, f"job {job.id} {how}", job=job.id)

    def _emit_end(self, job: JobRecord, error: HoopError | None) -> None:
        failed = (type(error).__name__, str(error)) if error is not None else ("", "")
        job.emit(ev.JobEnded(error=failed[0], text=failed[1]))

    # ---- events of a device's task

    def _watch_task(self, job: JobRecord, device_id: int) -> None:
        """Starts to receive the events of a device's task, unless a watch runs already."""
        info = self._coordinator.state.member(device_id).info
        if not job.watched(info.incarnation):
            job.watches[info.incarnation] = self._coordinator.in_background(self._receive_events(job, info))

    async def _receive_events(self, job: JobRecord, info: DeviceInfo) -> None:
        """Receives the events of one device until its task ends or the device is lost."""
        received, device_id = 0, info.device_id
        while True:
            try:
                request = pb.WatchTaskRequest(job_id=job.id, after=received)
                async for event in self._coordinator.device(device_id).WatchTask(request):  # (2)
                    received = event.sequence
                    if event.origin not in job.seen_origins:
                        job.seen_origins.add(event.origin)
                        await self._on_event(job, info, event)
                return
            except grpc.RpcError as error:
                lost = translate(error, f"{info}")
                answers = not unreachable(error)  # it has no such task: it was restarted
            if job.id not in self._supervisors:
                return
            if not answers and not await self._device_lost(info):
                continue  # only the stream broke
            self._on_task_lost(job, info, lost)
            return

    def _on_task_lost(self, job: JobRecord, info: DeviceInfo, lost: HoopError) -> None:
        supervisor = self._supervisors.get(job.id)
        if supervisor is None or supervisor.view.over:
            return
        if info.incarnation in supervisor.view.refused:
            return  # it was refused, or hung: the job goes on without it already
        job.losses.append(PeerLost(f"{info} was lost: {lost}", cause=PeerCause.DEVICE_LOST))
        job.emit(ev.DeviceLost(info.device_id, str(lost)), job.rank(info.device_id), info.device_id)
        supervisor.handle(jm.TaskLost(info.device_id, info.incarnation))

    async def _on_event(self, job: JobRecord, info: DeviceInfo, message: pb.JobEvent) -> None:
        """Passes an event to the job's membership, if it concerns that, and adds it to the job's log."""
        device_id, incarnation = info.device_id, info.incarnation
        rank = job.rank(device_id)
        supervisor = self._supervisors.get(job.id)
        if supervisor is None:  # the job has ended: only its log is of interest
            job.append(message.kind, message.json, rank, device_id, message.origin)
            return
        member = supervisor.has_rank(device_id)
        match self._membership_event(job, info, message):
            case ev.Failed() as event if not member:  # it could not load the job: the ranks go on without it
                supervisor.refuse(info, f"{info} on {info.host} cannot take part: {event.text}")
                return
            case ev.Started() as event:
                job.data, job.environment, job.sharded_update = event.same, event.environment, event.sharded_update
            case ev.Failed() as event:
                text = f"rank {rank} (device {device_id} on {info.host}): {event.text}"
                await self._add_failure(job, error_from_name(event.error, text))
                supervisor.handle(jm.TaskFinished(device_id, incarnation, failed=True))
            case ev.Waiting() as event:
                supervisor.report_link_fault(event.generation, device_id, event.failed)
                supervisor.handle(jm.TaskWaiting(device_id, incarnation, event.generation, event.lacks, event.error))
                return
            case ev.Loaded():
                supervisor.suspend_heartbeats([device_id], 0.0)
                return
            case ev.Ready() as event if not member:
                if refusal := job.refusal(info, event):
                    supervisor.refuse(info, refusal)
                    return
                if rounding := job.rounding(info, event):
                    job.emit(rounding)
                supervisor.suspend_heartbeats([device_id], 0.0)  # a device that was only unreachable loads nothing
                supervisor.handle(jm.TaskReady(device_id, incarnation))
            case ev.Resized() | ev.Recovered() as event:
                self._count_pause(job, event)
                job.sharded_update = event.sharded_update
                supervisor.on_resumed(event.generation)
            case ev.SnapshotTaken() as event if event.final:
                supervisor.handle(jm.FinalPartTaken(device_id, event.steps, event.turn, event.parts))
            case ev.Hung() as event if event.over:
                supervisor.handle(jm.TaskHung(device_id, incarnation, event.generation, event.text))
                if not supervisor.has_rank(device_id):
                    return  # the others go on without it: the event ``lost`` says why
            case ev.Ended():
                job.ended = True
                supervisor.handle(jm.TaskFinished(device_id, incarnation, finished=True))
            case ev.Left():
                supervisor.handle(jm.TaskFinished(device_id, incarnation))
        job.append(message.kind, message.json, rank, device_id, message.origin)

    def _count_pause(self, job: JobRecord, event: ev.Resized | ev.Recovered) -> None:
        """Counts the pause once a generation, however many ranks report it."""
        if event.generation > job.resumed_generation:
            job.resumed_generation = event.generation
            pauses = self.recovery_pauses if isinstance(event, ev.Recovered) else self.resize_pauses
            pauses.add(event.pause_s)

    def _membership_event(self, job: JobRecord, info: DeviceInfo, message: pb.JobEvent) -> ev.JobEvent | None:
        """The event, if it is of a kind that concerns membership; others are only logged and need not be parsed."""
        if ev.KINDS.get(message.kind) not in MEMBERSHIP_EVENTS:
            return None
        try:
            return ev.from_json(message.kind, message.json)
        except ValueError as error:
            text = f"job {job.id}: an event of {info} cannot be read: {error}"
            self._coordinator.events.publish("job_failing", text, job=job.id)
            return None

    async def _device_lost(self, info: DeviceInfo) -> bool:
        """Whether a device whose event stream broke is lost: calls it, and waits for the failure detector."""
        while (member := self._coordinator.state.members[info.device_id]).usable:
            if member.info.incarnation != info.incarnation:
                return True
            changed = asyncio.Event()
            unsubscribe = self._coordinator.events.subscribe(partial(_set, changed))
            try:
                await self._coordinator.call(
                    info.device_id, lambda device: device.Describe, pb.DescribeRequest(), STOP_S
                )
                return False
            except HoopError:
                if not self._coordinator.state.members[info.device_id].usable:
                    break
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), STOP_S)
            finally:
                unsubscribe()
        return True

    async def _add_failure(self, job: JobRecord, error: HoopError) -> None:
        job.failures.append(error)
        if len(job.failures) == 1:
            await self._abort(job, str(error))

    async def _abort(self, job: JobRecord, reason: str) -> None:
        one = job.communicator
        await self._coordinator.abort(m.Stop(one.id, one.generation, reason, one.members))

    async def _dismiss(self, job: JobRecord) -> None:
        """Ends the tasks of a job that did not start: they would keep their memory and wait for another rank."""
        request = job.release(final=True)
        calls = (
            self._coordinator.call(key, lambda device: device.ReassignTask, request, STOP_S)
            for key in job.communicator.members
        )
        await asyncio.gather(*calls, return_exceptions=True)

    # ---- requests of clients and devices

    def events(self, job_id: int, after: int, interval_s: float = 0.0) -> AsyncIterator[Event]:
        """The events of a job with a higher sequence number than ``after``, until it ends.

        ``interval_s``: shortest time between two groups of new events.
        """
        return follow_events(self._job(job_id).log, after, is_over, interval_s)  # (3)

    def _job(self, job_id: int) -> JobRecord:
        if job_id not in self._jobs:
            raise NotFound(f"job_id: {job_id} is unknown here; known: {sorted(self._jobs) or 'none'}")
        return self._jobs[job_id]

    def descriptions(self) -> list[pb.Job]:
        """The running jobs, and the last that ended."""
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
                    min_devices=self._jobs[one.id].user_min_devices if one.id in self._jobs else 0,
                    max_devices=self._jobs[one.id].max_devices if one.id in self._jobs else 0,
                )
            )
        return found

    def progress(self, job_id: int) -> JobProgress | None:
        """How far a job is; None if it is unknown. Any thread may ask."""
        job = self._jobs.get(job_id)
        return job.progress if job is not None else None

    @property
    def supervisors(self) -> list[JobSupervisor]:
        """The supervisors of all running jobs."""
        return list(self._supervisors.values())

    @property
    def starting(self) -> bool:
        """Whether a job is being started, which may be on any device."""
        return self._starting > 0

    async def stop(self, job_id: int) -> None:
        """Asks every rank to stop; the ranks agree on the last step. A job without any rank ends at once."""
        job, request = self._job(job_id), pb.StopTaskRequest(job_id=job_id)
        supervisor = self._supervisors.get(job_id)
        if supervisor is not None:
            supervisor.handle(jm.StopRequested())
        calls = (
            self._coordinator.call(key, lambda device: device.StopTask, request, STOP_S)
            for key in job.communicator.members
        )
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [one for one in outcomes if isinstance(one, BaseException)]
        if len(errors) == len(outcomes):  # one rank that gets the request is enough: all ranks vote
            raise errors[0]


def _set(changed: asyncio.Event, _: Event) -> None:
    changed.set()
