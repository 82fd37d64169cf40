"""The links of one seat of a job: those of all its ranks, and of groups of some of them, made when first asked for.

A device's part in jobs: each is a task on a thread of its own, which needs nobody's word to go on.

coordinator ── StartTask ──▶ (1) its seat, its links, a thread that trains
coordinator ◀── WatchTask ── (2) what the task tells, kept until the device ends or forgets it
coordinator ── ReseatTask ─▶ (3) the members have changed: it goes on in another seat
coordinator ── MoveTask ───▶ (4) … or are about to: all have their seats, and move after a step that they agree on
coordinator ── StopTask ───▶ (5) it stops after a step that all ranks agree on
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hoop.collectives.communicator import Communicator
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
from hoop.membership import task_membership as ranks
from hoop.membership.task_membership import NextStep, TaskRanks
from hoop.memory import Arena
from hoop.servers.operation_runner import OperationRunner, RankAssignment
from hoop.transport.base import LinkStats
from hoop.wire.generated import hoop_pb2 as pb


class TaskLinks:
    """Communicators by the ranks they are of, and what can be seen of their links."""

    def __init__(
        self, runner: OperationRunner, communicator_id: int, seat: RankAssignment, whole: Communicator
    ) -> None:
        self._runner, self._id, self._seat = runner, communicator_id, seat
        everyone = tuple(range(len(seat.members)))
        self._made: dict[tuple[int, ...], tuple[int, Communicator]] = {everyone: (communicator_id, whole)}
        self._error: HoopError | None = None

    def __call__(self, ranks: Sequence[int]) -> Communicator:
        key = tuple(ranks)
        if key not in self._made:
            # Ranks of one job that form a group begin with different ranks or are equally many: that names it.
            number = self._id | (1 + key[0] + (len(key) << 12)) << 32
            self._made[key] = number, self._runner.group(number, self._seat, key)
            if self._error is not None:  # aborted while this one was being made
                self._made[key][1].endpoint.abort(self._error)
        return self._made[key][1]

    def abort(self, error: HoopError) -> None:
        """Fails what is under way on every one of them, and whatever is tried later; called by another thread."""
        self._error = error
        for _, one in list(self._made.values()):
            one.endpoint.abort(error)

    def close(self) -> None:
        for _, one in self._made.values():
            one.close()

    # ---- seen from outside, by another thread

    def _watches(self) -> Iterator[tuple[int, list[int], LinkStats]]:
        """Each communicator: its number, its devices by rank, its links."""
        for key, (number, one) in list(self._made.items()):
            yield number, [self._seat.members[rank].device_id for rank in key], one.endpoint.watch

    def failed(self) -> int:
        """The device to which a link failed, or 0."""
        found = (devices[watch.failed] for _, devices, watch in self._watches() if watch.failed is not None)
        return next(found, 0)

    def stalls(self, now: float, patience: float) -> list[pb.Stall]:
        """Where it waits in vain."""
        return [
            pb.Stall(
                job_id=self._id,
                communicator_id=number,
                generation=self._seat.generation,
                device_ids=[devices[peer] for peer in peers],
                connecting=watch.connecting,
            )
            for number, devices, watch in self._watches()
            if (peers := watch.stalled(now, patience))
        ]

    def describe(self) -> list[pb.LinkDescription]:
        """What has moved between this device and each other one."""
        found = []
        for number, devices, watch in self._watches():
            for peer, device_id in enumerate(devices):
                sent, received = watch.moved(peer)
                found.append(
                    pb.LinkDescription(
                        communicator_id=number,
                        generation=self._seat.generation,
                        device_id=device_id,
                        sent=max(0, sent),
                        received=received,
                    )
                )
        return found


KEPT = 8
"""Tasks that have ended and can still be watched."""
ENDED, FAILED, LEFT = "ended", "failed", "left"
"""The kinds of a task's last event."""
HANDOVER_S = 600.0
"""How long a task that has no rank any more stays for the others, if the coordinator never says that it may go."""
HANDED_OVER = "this device has handed over, and leaves the job"
TOLD_FIRST = ("started",)
"""What a log never forgets: whoever comes late must know what it is about."""


@dataclass(frozen=True)
class TaskContext:
    """What a device gives to whoever trains on it."""

    job_id: int
    arena: Arena
    communicator: Communicator
    group: Callable[[Sequence[int]], Communicator]
    hosts: tuple[str, ...]
    """The machine of each rank, by rank."""
    reseated: Callable[[float, HoopError | None], TaskContext]
    """Waits, at most this many seconds, for a rank in a newer generation; the links of this one are closed.

    The error, if there is one, is what the ranks of this generation could not go on without: a part of the state, or
    memory for it. The coordinator then waits for more devices, or ends the job with it. Raises ``MembershipChanged``
    when the coordinator has released this device, and ``DeadlineExceeded`` when the time is over.
    """
    moving: Callable[[], bool]
    """Whether everybody has a seat of the next generation, to be taken after a step that all agree on."""
    moved: Callable[[], TaskContext]
    """That seat; the links of this one stay open until ``settled``."""
    settled: Callable[[], None] = lambda: None
    """Everybody is here: the links of the seat before may go."""
    device: int = 0
    """Its number in the cluster."""
    joining: bool = False
    """The job runs already, among others; this is a place to get ready in, alone."""
    heard: Callable[[float], bool] = lambda patience: False
    """Waits so many seconds until whoever watches has been sent all that was told; whether it has."""
    run: str = ""
    """The run's own name, the same at every device for as long as it lasts."""
    outlives: bool = False
    """Whether the arena is there for who is restarted on it."""
    left_out: bool = False
    """The others went on without this device: what it knows of the run may be of long ago."""

    @property
    def neighbours(self) -> tuple[int, int]:
        """Which of the job's devices on this host this is, and how many there are."""
        rank = self.communicator.rank
        same = [one for one, host in enumerate(self.hosts) if host == self.hosts[rank]]
        return same.index(rank), len(same)


Emit = Callable[[Mapping[str, Any]], None]
Trainer = Callable[[TaskContext, str, Emit, Callable[[], bool], bytes | None], None]
"""Trains in a place by these settings (JSON) until done or told to stop; the last is a checkpoint to go on from."""


@dataclass
class Task:
    """One job on this device."""

    log: EventLog = field(default_factory=lambda: EventLog(pinned=TOLD_FIRST))
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    """Of this log: with an event's number it names the event for good."""
    stop: threading.Event = field(default_factory=threading.Event)
    ranks: TaskRanks = field(default_factory=TaskRanks)
    assignment: pb.Seat | None = None
    """The newest one."""
    why: str = "its generation is over"
    """What the coordinator last said of that."""
    run: str = ""
    leave: Callable[[], None] = lambda: None
    """Closes the links of the seat it has now."""
    links: TaskLinks | None = None
    """Those links."""
    thread: threading.Thread | None = None
    finished: bool = False
    """It came to the end of the training, or to where all ranks agreed to stop."""
    _sent: int = 0
    _sending: threading.Condition = field(default_factory=threading.Condition)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def check_links(self) -> None:
        """Fails whatever the task does on its links, if they are of no use any more."""
        if self.links is not None and ranks.outdated(self.ranks):
            self.links.abort(PeerLost(self.why))

    def tell(self, told: Mapping[str, Any]) -> None:
        self.log.publish(str(told["kind"]), json.dumps(told))

    def sent(self, sequence: int) -> None:
        """Events up to this one have left this process, for whoever watches."""
        with self._sending:
            self._sent = max(self._sent, sequence)
            self._sending.notify_all()

    def heard(self, patience: float) -> bool:
        last = self.log.last
        with self._sending:
            return self._sending.wait_for(lambda: self._sent >= last, patience)

    def change(self, change: Callable[[TaskRanks], TaskRanks], assignment: pb.Seat | None = None) -> None:
        """Applies what the coordinator said; wakes the training thread if it waits."""
        with self._changed:
            self.ranks = change(self.ranks)
            if assignment is not None and assignment.generation == self.ranks.newest:
                self.assignment = assignment
            self._changed.notify_all()

    def _recalled(self) -> bool:
        return ranks.next_step(self.ranks) != NextStep.HAND_OVER

    def next_assignment(self, patience: float) -> pb.Seat:
        """The newest assignment that was not taken yet, waiting for one.

        Raises ``MembershipChanged`` when the coordinator has released this device.
        """
        deadline = time.monotonic() + patience
        with self._changed:
            while True:
                match ranks.next_step(self.ranks):
                    case NextStep.TAKE:
                        assert self.assignment is not None, "an assignment is pending"
                        return self.assignment
                    case NextStep.HAND_OVER:
                        # Until the others have moved: they may still read what is here, or need it after all.
                        if not self._changed.wait_for(self._recalled, HANDOVER_S):
                            raise MembershipChanged(HANDED_OVER)
                    case NextStep.LEAVE:
                        raise MembershipChanged(HANDED_OVER)
                    case NextStep.WAIT:
                        if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                            raise DeadlineExceeded(f"no rank in a newer generation within {patience:g} s")


class Tasks:
    """The jobs this device takes part in."""

    def __init__(
        self, arena: Arena, runner: OperationRunner, trainer: Trainer | None, outlives: bool
    ) -> None:
        """``outlives``: who is restarted finds the arena again."""
        self._arena, self._outlives = arena, outlives
        self._runner = runner
        self._trainer = trainer
        self._tasks: OrderedDict[int, Task] = OrderedDict()

    def start(self, request: pb.StartTaskRequest) -> None:
        trainer = self._trainer
        if trainer is None:
            raise FailedPrecondition("this device does not train; start it with: hoop device")
        known = self._tasks.get(request.job_id)
        if known is not None and known.alive and request.joining:
            self._back(known)
            return
        if known is not None and known.finished and request.joining:
            return  # it came to the end, which the coordinator has not heard yet: the result is in memory here
        if known is not None and not request.joining:
            raise FailedPrecondition(f"job {request.job_id} is on this device already")
        resume = None
        if request.resume:
            buffer = self._arena.buffer(request.resume)
            resume = self._arena.read(buffer.address, buffer.size)
            self._arena.free(request.resume)
        task = Task(run=request.run)
        self._clear(request.job_id, request.joining)
        place = self._place(request.job_id, task, request.seat, request.joining)

        def work() -> None:
            last: dict[str, Any] = {"kind": ENDED}
            try:
                trainer(place, request.settings, task.tell, task.stop.is_set, resume)
                task.finished = True
            except MembershipChanged as error:
                last = {"kind": LEFT, "text": str(error)}
            except HoopError as error:
                last = {"kind": FAILED, "error": type(error).__name__, "text": str(error)}
            except BaseException as error:  # a bug, or the user's own code: told whole, to whoever watches
                last = {"kind": FAILED, "error": type(error).__name__, "text": traceback.format_exc()}
            finally:
                task.leave()  # whoever waits for this rank must not wait any longer
                task.tell(last)

        task.thread = threading.Thread(target=work, name=f"hoop-job-{request.job_id}", daemon=True)
        self._tasks[request.job_id] = task
        while len(self._tasks) > KEPT and not next(iter(self._tasks.values())).alive:
            self._tasks.popitem(last=False)
        task.thread.start()

    def _clear(self, job_id: int, joining: bool) -> None:
        """Frees what jobs have left that nobody here knows: this device was killed, and restarted on its memory.

        What it left of a job that it joins again is the trainer's to use, and to free.
        """
        for buffer in self._arena.buffers():
            named = re.match(r"job(\d+)\.", buffer.name)
            own = named is not None and int(named[1]) == job_id
            if named and (not joining if own else int(named[1]) not in self._tasks):
                self._arena.free(buffer.name)

    def _back(self, task: Task) -> None:
        """It was thought dead, and the others went on without it: as good as one who has just come."""
        task.change(ranks.rejoined)
        task.leave()
        task.tell({"kind": "loaded"})
        task.tell({"kind": "ready", "seconds": 0.0})

    def _place(
        self,
        job_id: int,
        task: Task,
        message: pb.Seat,
        joining: bool = False,
        before: Callable[[], None] = lambda: None,
    ) -> TaskContext:
        seat, communicator = self._runner.take(message)
        left_out = task.ranks.left_out
        if not joining:
            task.change(partial(ranks.took, generation=seat.generation))
        links = TaskLinks(self._runner, message.communicator_id, seat, communicator)
        generation = 0 if joining else seat.generation

        def leave() -> None:
            links.close()
            self._runner.release(message.communicator_id, seat)

        def reseated(patience: float, lacks: HoopError | None = None) -> TaskContext:
            before()
            failed = links.failed()
            leave()
            return self._reassigned(job_id, task, generation, failed, patience, lacks)

        def moved() -> TaskContext:
            message = task.next_assignment(0.0)
            self._runner.leave_open(message.communicator_id, seat)
            return self._place(job_id, task, message, before=leave)

        task.leave, task.links = leave, links
        task.check_links()  # its end may have been said while they were being made
        device = seat.members[seat.rank].device_id
        place = communicator, links, seat.hosts, reseated, lambda: task.ranks.move, moved, before
        about = device, joining, task.heard, task.run, self._outlives, left_out
        return TaskContext(job_id, self._arena, *place, *about)

    def _reassigned(
        self,
        job_id: int,
        task: Task,
        generation: int,
        failed: int,
        patience: float,
        lacks: HoopError | None,
    ) -> TaskContext:
        """Says that the task waits, and takes the newest rank there is; a stale one is dropped for the next."""
        about = {"lacks": str(lacks), "error": type(lacks).__name__} if lacks is not None else {}
        task.tell({"kind": "waiting", "generation": generation, "failed": failed, **about})
        deadline = time.monotonic() + patience
        while True:
            try:
                message = task.next_assignment(deadline - time.monotonic())
            except DeadlineExceeded:
                raise DeadlineExceeded(
                    f"job {job_id}: the coordinator assigned no rank in a generation after {generation} "
                    f"within {patience:g} s"
                ) from None
            try:
                return self._place(job_id, task, message)
            except MembershipChanged:  # a newer generation is known already, and on its way here
                task.change(partial(ranks.took, generation=message.generation))
            except (PeerError, OSError) as error:  # no descriptor left, a listener that is closing
                task.change(partial(ranks.took, generation=message.generation))
                told = {"kind": "waiting", "generation": message.generation, "failed": 0, "text": str(error)}
                task.tell(told)

    def reseat(self, request: pb.ReseatTaskRequest) -> None:
        """A rank in a newer generation for a task that is under way, or none any more.

        The task takes it when its links fail, or when all ranks move. Where it is not planned, its links fail now.
        """
        task = self.task(request.job_id)
        if not task.alive:
            raise FailedPrecondition(f"job {request.job_id} has ended on this device")
        if not request.HasField("seat"):
            task.change(partial(ranks.released, final=request.final))
        else:
            assigned = partial(ranks.assigned, generation=request.seat.generation, planned=request.planned)
            task.change(assigned, request.seat)
        task.check_links()

    def move(self, job_id: int) -> None:
        self.task(job_id).change(ranks.moving)

    def abort(self, communicator_id: int, generation: int, error: HoopError) -> None:
        """The generation is over: whatever the task does on its links, and those of its groups, ends at once."""
        task = self._tasks.get(communicator_id)  # a job's communicator has its number
        if task is not None and task.alive:
            task.why = str(error)
            task.change(partial(ranks.stopped, generation=generation))
            task.check_links()

    def under_way(self) -> list[pb.TaskDescription]:
        return [
            pb.TaskDescription(
                job_id=job_id,
                generation=task.ranks.generation,
                links=task.links.describe() if task.links is not None else (),
            )
            for job_id, task in self._tasks.items()
            if task.alive
        ]

    def stalls(self, patience: float) -> list[pb.Stall]:
        """Where tasks wait for others without a byte from them, for so long; to be asked again and again."""
        links = [task.links for task in self._tasks.values() if task.alive and task.links is not None]
        return [stall for one in links for stall in one.stalls(time.monotonic(), patience)]

    def task(self, job_id: int) -> Task:
        if job_id not in self._tasks:
            raise NotFound(f"job_id: {job_id} is not on this device")
        return self._tasks[job_id]

    def stop(self, job_id: int) -> None:
        self.task(job_id).stop.set()

    def damaged(self, text: str) -> None:
        """A message came otherwise than it was sent; whoever watches a task of this device is told."""
        for task in list(self._tasks.values()):
            if task.alive:
                task.tell({"kind": "damaged", "text": text})

    def close(self) -> None:
        """Asks every task to stop; their links are closed by whoever owns them."""
        for task in self._tasks.values():
            task.stop.set()


def is_last(event: Event) -> bool:
    """Whether a task tells nothing after this."""
    return event.kind in (ENDED, FAILED, LEFT)
