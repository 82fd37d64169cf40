"""A device's tasks: each job on this device is a task on a thread of its own, which trains without the coordinator.

    coordinator ── StartTask ──────────▶ (1) stores the rank assignment, opens the links, starts a thread that trains
    coordinator ◀── WatchTask ────────── (2) the task's events; the log keeps them until the device ends
    coordinator ── ReassignTask ───────▶ (3) the members have changed, or will: a rank in the next generation
    coordinator ── CommitReassignment ─▶ (4) … they will, and all have ranks: take them after a step that all agree on
    coordinator ── StopTask ───────────▶ (5) the task stops after a step that all ranks agree on

``membership.task_membership`` holds the rules for assignments that come late, twice, or out of order.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from hoop import job_events as ev
from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import ActivitySource, RankContext, RankProgress, StepTrace, group_id
from hoop.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HoopError,
    MembershipChanged,
    NotFound,
    PeerError,
    PeerLost,
)
from hoop.events import Event, EventLog
from hoop.job_events import Emit, JobEvent
from hoop.membership import task_membership as ranks
from hoop.membership.task_membership import NextStep, TaskRanks
from hoop.memory import Arena, DeviceMemory
from hoop.memory.cuda_arena import CudaArena
from hoop.servers.hang_watch import HangWatch, StandStill
from hoop.servers.job_progress import JobProgress, StepsReport
from hoop.servers.operation_runner import OperationRunner, RankAssignment
from hoop.transport.base import LinkStats
from hoop.wire.generated import hoop_pb2 as pb

log = logging.getLogger("hoop.servers")
MAX_TASKS = 8
"""Maximum number of tasks that a device keeps. The oldest is forgotten first, if it has ended; until then it can be
watched."""
HANDOVER_S = 600.0
"""Seconds that a task without a rank keeps its memory for the other ranks, if the coordinator never dismisses it."""
MAX_LISTED_LINKS = 64
"""Maximum number of links of a task that a heartbeat lists, those that carried most bytes."""
MAX_LISTED_SHARDS = 256
"""Maximum number of shards of a task that a heartbeat lists, and of stages."""
RELEASE_S = 1.0
"""Seconds that a task that hangs has to react to its release; after that its process ends."""
HUNG_EXIT_CODE = 3
HANDED_OVER = "this device has handed over, and leaves the job"
PINNED_EVENTS = (ev.Started.kind,)
"""Kinds of events that a log never drops: a late watcher needs them to understand the rest."""


TrainFunction = Callable[[RankContext, str, Emit, Callable[[], bool], bytes | None], None]
"""Function that trains until done or stopped; it takes the context, settings (JSON), ``emit``, "stop requested?" and
the checkpoint to resume from."""


@dataclass
class Task:
    """One job on this device."""

    log: EventLog = field(default_factory=lambda: EventLog(pinned=PINNED_EVENTS))
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Name of this log. With the sequence number it identifies an event for good."""
    stop: threading.Event = field(default_factory=threading.Event)
    ranks: TaskRanks = field(default_factory=TaskRanks)
    assignment: pb.RankAssignment | None = None
    """Newest rank assignment."""
    stop_reason: str = "its generation is over"
    """Reason why the coordinator stopped the last generation."""
    run: str = ""
    joining: bool = False
    """True if the task was started while the job ran."""
    close_links: Callable[[], None] = lambda: None
    """Function that closes the links of the assignment in use."""
    links: TaskLinks | None = None
    """Links of the assignment in use."""
    thread: threading.Thread | None = None
    loaded: bool = False
    """True if the task has loaded the job's code and data."""
    finished: bool = False
    """True if the task reached the end of the training, or a step at which all ranks agreed to stop."""
    unread_result: str = ""
    """Name of the buffer with this rank's part of the final state, until a client has read it."""
    activity: ActivitySource | None = None
    """Activity of the task's rank; None before its first step, and when it has ended."""
    watch: HangWatch | None = None
    """Watches whether the training thread makes progress."""
    progress: JobProgress = field(default_factory=JobProgress)
    """Steps that this device reported; only one rank of a job reports them."""
    _sent: int = 0
    _sending: threading.Condition = field(default_factory=threading.Condition)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    # ---- events

    def emit(self, event: JobEvent) -> None:
        self.loaded = self.loaded or isinstance(event, ev.Loaded)
        if isinstance(event, ev.SnapshotTaken) and event.final:
            self.unread_result = event.buffer
        text = event.to_json()
        self.progress.add(event.kind, text)
        self.log.publish(event.kind, text)

    def mark_sent(self, sequence: int) -> None:
        """Events up to this sequence number have left this process, for a watcher."""
        with self._sending:
            self._sent = max(self._sent, sequence)
            self._sending.notify_all()

    def wait_delivered(self, timeout: float) -> bool:
        """Waits until all events emitted so far have been sent; returns False after ``timeout`` seconds."""
        last = self.log.last
        with self._sending:
            return self._sending.wait_for(lambda: self._sent >= last, timeout)

    # ---- rank assignments

    def update_ranks(
        self, change: Callable[[TaskRanks], TaskRanks], assignment: pb.RankAssignment | None = None
    ) -> None:
        """Applies a message of the coordinator, and wakes the training thread if it waits."""
        with self._changed:
            self.ranks = change(self.ranks)
            if assignment is not None and assignment.generation == self.ranks.newest:
                self.assignment = assignment
            self._changed.notify_all()

    def abort_outdated_links(self) -> None:
        """Fails every operation on the task's links, if they are of no use any more."""
        if self.links is not None and ranks.outdated(self.ranks):
            self.links.abort(PeerLost(self.stop_reason))

    def _not_handing_over(self) -> bool:
        return ranks.next_step(self.ranks) != NextStep.HAND_OVER

    def next_assignment(self, timeout: float) -> pb.RankAssignment:
        """The newest assignment that was not taken yet; waits for one.

        Raises ``MembershipChanged`` when the coordinator has released this device.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                match ranks.next_step(self.ranks):
                    case NextStep.TAKE:
                        assert self.assignment is not None, "an assignment is pending"
                        return self.assignment
                    case NextStep.HAND_OVER:
                        # Stay until the other ranks have moved: they may read this memory, or need it after all.
                        if not self._changed.wait_for(self._not_handing_over, HANDOVER_S):
                            raise MembershipChanged(HANDED_OVER)
                    case NextStep.LEAVE:
                        raise MembershipChanged(HANDED_OVER)
                    case NextStep.WAIT:
                        if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                            raise DeadlineExceeded(f"no rank in a newer generation within {timeout:g} s")


class TaskLinks:
    """The communicators of one rank assignment: of all ranks, and of groups of ranks, opened when first asked for."""

    def __init__(
        self, runner: OperationRunner, communicator_id: int, assignment: RankAssignment, world: Communicator
    ) -> None:
        self._runner, self._id, self._assignment = runner, communicator_id, assignment
        all_ranks = tuple(range(len(assignment.members)))
        self._communicators: dict[tuple[int, ...], tuple[int, Communicator]] = {all_ranks: (communicator_id, world)}
        """Id and communicator of each group of ranks."""
        self._error: HoopError | None = None

    def __call__(self, ranks: Sequence[int]) -> Communicator:
        """The communicator of these ranks; the same ranks get the same one."""
        key = tuple(ranks)
        if key not in self._communicators:
            number = group_id(self._id, key)
            self._communicators[key] = number, self._runner.connect_group(number, self._assignment, key)
            if self._error is not None:  # aborted while the group was being opened
                self._communicators[key][1].endpoint.abort(self._error)
        return self._communicators[key][1]

    def abort(self, error: HoopError) -> None:
        """Fails current and later operations on all communicators. Called by another thread."""
        self._error = error
        for _, one in list(self._communicators.values()):
            one.endpoint.abort(error)

    def close(self) -> None:
        for _, one in self._communicators.values():
            one.close()

    # ---- statistics, read by another thread

    def _link_stats(self) -> Iterator[tuple[int, list[int], LinkStats]]:
        """Id, device ids by rank and link statistics of each communicator."""
        for key, (communicator_id, one) in list(self._communicators.items()):
            devices = [self._assignment.members[rank].device_id for rank in key]
            yield communicator_id, devices, one.endpoint.link_stats

    def failed_device(self) -> int:
        """The device whose link failed, or 0."""
        found = (
            devices[stats.failed_peer] for _, devices, stats in self._link_stats() if stats.failed_peer is not None
        )
        return next(found, 0)

    def stalls(self, now: float, timeout: float) -> list[pb.Stall]:
        """The peers that this device has waited for, without a byte, for ``timeout`` seconds."""
        return [
            pb.Stall(
                job_id=self._id,
                communicator_id=communicator_id,
                generation=self._assignment.generation,
                device_ids=[devices[peer] for peer in peers],
                connecting=stats.connecting,
            )
            for communicator_id, devices, stats in self._link_stats()
            if (peers := stats.stalled_peers(now, timeout))
        ]

    @property
    def rank(self) -> int:
        return self._assignment.rank

    def describe(self) -> list[pb.LinkDescription]:
        """Bytes sent and received on the link to each peer."""
        return [self._message(*one) for one in self._byte_counts()]

    def busiest(self, most: int) -> list[pb.LinkDescription]:
        """The links that have carried bytes, those with most bytes first. Links in shared memory count none."""
        carried = [one for one in self._byte_counts() if one[2] > 0 or one[3] > 0]
        return [self._message(*one) for one in sorted(carried, key=lambda one: -one[2] - one[3])[:most]]

    def _byte_counts(self) -> Iterator[tuple[int, int, int, int]]:
        """Counts of each link: communicator, device id of the peer, bytes sent, bytes received."""
        for communicator_id, devices, stats in self._link_stats():
            for peer, device_id in enumerate(devices):
                yield communicator_id, device_id, *stats.byte_counts(peer)

    def _message(self, communicator_id: int, device_id: int, sent: int, received: int) -> pb.LinkDescription:
        return pb.LinkDescription(
            communicator_id=communicator_id,
            generation=self._assignment.generation,
            device_id=device_id,
            sent=max(0, sent),
            received=received,
        )


class Tasks:
    """All tasks of this device."""

    def __init__(
        self,
        arena: Arena,
        memory: DeviceMemory,
        runner: OperationRunner,
        trainer: TrainFunction | None,
        persistent_memory: bool,
    ) -> None:
        """``arena``: for the state of jobs. ``memory``: in which clients leave the checkpoints that jobs resume from.

        ``persistent_memory``: a restarted device finds the arena again.
        """
        self._arena, self._memory, self._persistent_memory = arena, memory, persistent_memory
        self.gpu_arenas: list[CudaArena] = []
        """Memory of the jobs on a GPU."""
        self._runner = runner
        self._trainer = trainer
        self._tasks: OrderedDict[int, Task] = OrderedDict()
        self.result_read = asyncio.Event()
        """Set when a client has read a buffer to its end."""

    # ---- start (1)

    def start(self, request: pb.StartTaskRequest) -> None:
        """Starts the training thread of a job.

        ``request.joining``: other devices run it already. The thread loads code and data, and waits for a rank.
        """
        trainer = self._trainer
        if trainer is None:
            raise FailedPrecondition("this device does not train; start it with: hoop device")
        known = self._tasks.get(request.job_id)
        if known is not None and known.alive and request.joining:
            self._rejoin(known, request.generation)
            return
        if known is not None and known.finished and request.joining:
            return  # it has ended, and the coordinator has not received that yet: the result is in memory here
        if known is not None and not request.joining:
            raise FailedPrecondition(f"job {request.job_id} is on this device already")
        resume = None
        if request.resume:
            buffer = self._memory.buffer(request.resume)
            resume = self._memory.read(buffer.address, buffer.size)
            self._memory.free(request.resume)
        task = Task(run=request.run, joining=request.joining, ranks=ranks.invited(TaskRanks(), request.generation))
        self._free_stale_buffers(request.job_id, request.joining)
        context = self._open_assignment(request.job_id, task, request.assignment, request.joining)
        context = replace(context, future_size=request.future_ranks)

        def work() -> None:
            last: JobEvent = ev.Ended()
            try:
                trainer(context, request.settings, task.emit, task.stop.is_set, resume)
                task.finished = True
            except MembershipChanged as error:
                last = ev.Left(str(error))
            except HoopError as error:
                last = ev.Failed(type(error).__name__, str(error))
            except BaseException as error:  # a bug, or the user's own code: emit the whole traceback
                last = ev.Failed(type(error).__name__, traceback.format_exc())
            finally:
                task.close_links()  # peers that wait for this rank must not wait any longer
                task.emit(last)

        task.thread = threading.Thread(target=work, name=f"hoop-job-{request.job_id}", daemon=True)
        self._tasks[request.job_id] = task
        while len(self._tasks) > MAX_TASKS and not next(iter(self._tasks.values())).alive:
            self._tasks.popitem(last=False)
        task.thread.start()
        watching = threading.Thread(target=_watch, args=(task, context.device), daemon=True)
        watching.name = f"hoop-watch-{request.job_id}"
        watching.start()

    def _free_stale_buffers(self, job_id: int, joining: bool) -> None:
        """Frees buffers of unknown jobs: this device was killed, and restarted on the same arena.

        The trainer uses, and frees, the buffers of a job that the device joins again.
        """
        for buffer in self._arena.buffers():
            named = re.match(r"job(\d+)\.", buffer.name)
            own = named is not None and int(named[1]) == job_id
            if named and (not joining if own else int(named[1]) not in self._tasks):
                self._arena.free(buffer.name)

    def _rejoin(self, task: Task, generation: int) -> None:
        """The device was declared dead, and other devices continued without it: it waits for a rank like a new one.

        A task that joins and still loads the job emits ``ready`` itself, when it has loaded it.
        """
        if task.joining and not task.loaded:
            task.update_ranks(partial(ranks.invited, generation=generation))
            return
        task.update_ranks(partial(ranks.rejoined, generation=generation))
        task.close_links()
        task.emit(ev.Loaded())
        task.emit(ev.Ready())

    # ---- rank assignments, on the training thread

    def _open_assignment(
        self,
        job_id: int,
        task: Task,
        message: pb.RankAssignment,
        joining: bool = False,
        close_previous_links: Callable[[], None] = lambda: None,
    ) -> RankContext:
        """Opens the links of a rank assignment, and makes it the task's current one."""
        assignment, communicator = self._runner.connect(message)
        log.debug(
            "job %d: rank %d of %d, generation %d",
            job_id,
            assignment.rank,
            len(assignment.members),
            assignment.generation,
        )
        left_out = task.ranks.left_out
        if not joining:
            task.update_ranks(partial(ranks.took, generation=assignment.generation))
        links = TaskLinks(self._runner, message.communicator_id, assignment, communicator)
        generation = 0 if joining else assignment.generation

        def close_links() -> None:
            links.close()
            self._runner.release(message.communicator_id, assignment)

        def wait_reassignment(timeout: float, lacks: HoopError | None = None) -> RankContext:
            close_previous_links()
            failed_device = links.failed_device()
            close_links()
            return self._wait_reassignment(job_id, task, generation, failed_device, timeout, lacks)

        def commit_reassignment() -> RankContext:
            message = task.next_assignment(0.0)
            self._runner.detach(message.communicator_id, assignment)
            return self._open_assignment(job_id, task, message, close_previous_links=close_links)

        task.close_links, task.links = close_links, links
        task.abort_outdated_links()  # the generation may have been stopped while the links were being opened
        return RankContext(
            job_id=job_id,
            arena=self._arena,
            communicator=communicator,
            group=links,
            local_rank_and_size=assignment.local_rank_and_size,
            hosts=assignment.hosts,
            wait_reassignment=wait_reassignment,
            reassignment_ready=lambda: task.ranks.move,
            commit_reassignment=commit_reassignment,
            close_previous_links=close_previous_links,
            device=assignment.members[assignment.rank].device_id,
            joining=joining,
            wait_delivered=task.wait_delivered,
            publish_activity=partial(setattr, task, "activity"),
            run=task.run,
            persistent_memory=self._persistent_memory,
            left_out=left_out,
            gpu_arenas=self.gpu_arenas,
        )

    def _wait_reassignment(
        self, job_id: int, task: Task, generation: int, failed_device: int, timeout: float, lacks: HoopError | None
    ) -> RankContext:
        """Emits ``waiting``, and takes the newest assignment; drops a stale one and waits for the next."""
        waiting = ev.Waiting(generation, failed_device)
        if lacks is not None:
            waiting = replace(waiting, lacks=str(lacks), error=type(lacks).__name__)
        task.emit(waiting)
        deadline = time.monotonic() + timeout
        while True:
            try:
                message = task.next_assignment(deadline - time.monotonic())
            except DeadlineExceeded:
                raise DeadlineExceeded(
                    f"job {job_id}: the coordinator assigned no rank in a generation after {generation} "
                    f"within {timeout:g} s"
                ) from None
            try:
                return self._open_assignment(job_id, task, message)
            except MembershipChanged:  # the runner knows a newer generation; its assignment will come
                task.update_ranks(partial(ranks.gave_up, generation=message.generation))
            except (PeerError, OSError) as error:  # no descriptor left, or a listener that is closing
                task.update_ranks(partial(ranks.gave_up, generation=message.generation))
                task.emit(ev.Waiting(message.generation, text=str(error)))

    # ---- messages of the coordinator (3), (4), (5)

    def reassign(self, request: pb.ReassignTaskRequest) -> None:
        """Gives a running task a rank in a newer generation, or takes its rank away.

        The task takes a new rank when all ranks move, or when its links fail. An unplanned one fails the links now.
        """
        task = self.task(request.job_id)
        if not task.alive:
            raise FailedPrecondition(f"job {request.job_id} has ended on this device")
        if not request.HasField("assignment"):
            task.update_ranks(partial(ranks.released, generation=request.generation, final=request.final))
        else:
            assigned = partial(ranks.assigned, generation=request.assignment.generation, planned=request.planned)
            task.update_ranks(assigned, request.assignment)
        task.abort_outdated_links()
        if task.ranks.dismissed and task.watch is not None and task.watch.hangs:
            threading.Thread(target=_end_if_hung, args=(task,), name="hoop-hung", daemon=True).start()

    def move(self, job_id: int, generation: int) -> None:
        """All members have their planned ranks of this generation: the task moves with the other ranks."""
        self.task(job_id).update_ranks(partial(ranks.moving, generation=generation))

    def abort(self, communicator_id: int, generation: int, error: HoopError) -> None:
        """Stops a generation: all operations on the task's links, and on those of its groups, fail at once."""
        task = self._tasks.get(communicator_id)  # a job and its communicator have the same id
        if task is not None and task.alive:
            task.stop_reason = str(error)
            task.update_ranks(partial(ranks.stopped, generation=generation))
            task.abort_outdated_links()

    def stop(self, job_id: int) -> None:
        self.task(job_id).stop.set()

    # ---- status

    def task(self, job_id: int) -> Task:
        if job_id not in self._tasks:
            raise NotFound(f"job_id: {job_id} is not on this device")
        return self._tasks[job_id]

    def running(self) -> dict[int, str]:
        """The run of each task that runs, by job. Any thread may ask."""
        return {job_id: task.run for job_id, task in list(self._tasks.items()) if task.alive}

    def unread_results(self) -> list[int]:
        """Ids of the jobs that have ended and whose final state, or a part of it, no client has read here."""
        return [job_id for job_id, task in self._tasks.items() if task.unread_result and not task.alive]

    def note_read(self, buffer: str) -> None:
        """A client has read a buffer to its end. The event loop of the device calls it."""
        for task in self._tasks.values():
            if task.unread_result == buffer:
                task.unread_result = ""
        self.result_read.set()

    def progress(self, job_id: int) -> StepsReport | None:
        """The newest steps that this device reported of a job, if it is the rank that reports them."""
        task = self._tasks.get(job_id)
        return task.progress.steps() if task is not None else None

    def describe(self) -> list[pb.TaskDescription]:
        """The running tasks."""
        return [
            pb.TaskDescription(
                job_id=job_id,
                generation=task.ranks.generation,
                links=task.links.describe() if task.links is not None else (),
            )
            for job_id, task in self._tasks.items()
            if task.alive
        ]

    def stalls(self, timeout: float) -> list[pb.Stall]:
        """Peers that tasks have waited for, without a byte, for ``timeout`` seconds. Every heartbeat calls this."""
        links = [task.links for task in self._tasks.values() if task.alive and task.links is not None]
        return [stall for one in links for stall in one.stalls(time.monotonic(), timeout)]

    def activities(self) -> list[pb.TaskActivity]:
        """What the running tasks do. Every heartbeat calls this."""
        running = [(job_id, task) for job_id, task in list(self._tasks.items()) if task.alive]
        return [
            _activity_message(job_id, task, source)
            for job_id, task in running[-MAX_TASKS:]
            if (source := task.activity) is not None
        ]

    def trace(self, job_id: int, steps: int, timeout_s: float) -> StepTrace:
        """Records the next steps of a task. Waits for them: not for an event loop's thread."""
        source = self.task(job_id).activity
        if source is None:
            raise FailedPrecondition(f"job_id: {job_id} does no steps on this device now")
        return source.trace(steps, timeout_s)

    def on_damage(self, text: str) -> None:
        """A received message failed its checksum: emits an event in every running task."""
        for task in list(self._tasks.values()):
            if task.alive:
                task.emit(ev.Damaged(text))

    def close(self) -> None:
        """Asks every task to stop. The device closes the transports, which end the links."""
        for task in self._tasks.values():
            task.stop.set()


def _activity_message(job_id: int, task: Task, source: ActivitySource) -> pb.TaskActivity:
    found, links = source.read(), task.links
    return pb.TaskActivity(
        job_id=job_id,
        generation=task.ranks.generation,
        rank=links.rank if links is not None else 0,
        at_s=time.monotonic(),
        steps=found.steps,
        load_s=found.load_s,
        forward_s=found.forward_s,
        backward_s=found.backward_s,
        communicate_s=found.communicate_s,
        update_s=found.update_s,
        idle_s=found.idle_s,
        bytes_sent=found.bytes_sent,
        shards=found.shards[:MAX_LISTED_SHARDS],
        stages=found.stages[:MAX_LISTED_SHARDS],
        links=links.busiest(MAX_LISTED_LINKS) if links is not None else (),
    )


def _watch(task: Task, device: int) -> None:
    """Emits ``hung`` if a task's thread makes no progress, and waits for nobody."""
    thread = task.thread
    assert thread is not None, "it has been started"
    assert thread.ident is not None, "it has been started"

    def report(stand_still: StandStill) -> None:
        text = stand_still.text(device)
        log.warning("%s", text)
        task.emit(
            ev.Hung(device, stand_still.step, stand_still.seconds, stand_still.limit_s, text, task.ranks.generation)
        )

    def progress() -> RankProgress | None:
        return task.activity.progress() if task.activity is not None else None

    watch = task.watch = HangWatch(thread.ident, progress, report)
    try:
        while thread.is_alive():
            thread.join(watch.interval_s)
            watch.look(time.monotonic())
    finally:
        watch.close()


def _end_if_hung(task: Task) -> None:
    """Ends this process if a task does not react to its release: nothing else ends code of a user that hangs."""
    assert task.thread is not None, "it has been started"
    task.thread.join(RELEASE_S)
    if task.thread.is_alive() and task.watch is not None and task.watch.hangs:
        log.error("this device ends: its training thread hangs, and the others go on without it")
        os._exit(HUNG_EXIT_CODE)


def is_last(event: Event) -> bool:
    """Whether this is the last event of a task."""
    return ev.KINDS.get(event.kind) in ev.TASK_ENDS
