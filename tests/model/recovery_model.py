"""Simulates a job under faults in virtual time: Hoop's own state machines with simulated messages and processes.

Real: ``membership.step``, ``job_membership.advance``, ``task_membership``, ``recovery.agree``, the journal.
Simulated: the network (each direction between two processes delays, holds back or loses messages), the processes
(killed, paused, restarted on their arenas) and training: a step is two collective operations, and a piece of the state
is a number.

    Run(Setup(devices=3, partitioned=True), random.Random(7)).run_to_end()

Raises ``Violation`` if an invariant does not hold:

    one history     ranks of a generation do the same step; state comes from a rank that holds it
    no false loss   a job ends as lost only if no memory and no arena holds every piece of any step
    no false death  a device that lives, and that nothing has silenced for a lease, is not declared dead, however slow
                    it, others and the coordinator are
    the product     a job ends with success only if all parts of its final state are known; it ends so if the training
                    reached its end and every part is in the memory of a device that lives
    progress        the job ends within ``BOUND_S`` after the last fault
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from hoop.errors import HoopError, MembershipChanged
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership import task_membership as tm
from hoop.membership.heartbeats import DetectorConfig
from hoop.membership.journal import replay
from hoop.membership.recovery import NO_STATE, WHOLE, RankStatus, RecoveryPlan, SliceSpec, StateLost, agree
from hoop.membership.replication import replica_holders
from hoop.membership.state import State
from hoop.membership.state_machine import step
from hoop.plan.plan import split_evenly
from hoop.topology import Address, DeviceInfo
from hoop.wire.channels import LOCAL_LEASE_S

CONFIG = DetectorConfig(heartbeat_s=0.2, lease_s=1.5, isolation_s=60.0)
ONE_HOST = replace(CONFIG, lease_s=LOCAL_LEASE_S)
JOB = 1
STEPS = 6
STEP_S = 0.3
PIECES = 5
PARTITIONED = {f"p{n}": 1 for n in range(PIECES)}
UNPARTITIONED = {WHOLE.name: 1}
CALL_S = 5.0
PROBE_S = 0.75
STARVED_S = 0.3, 2.5
"""Seconds for which a process that is starved is frozen at a time."""
JITTER_S = 0.1, 0.7
"""Seconds for which a process that is slow is frozen at a time: less than the lease of several hosts."""
HANG_S = 4.0
GRACE_S = 60.0
BOUND_S = 300.0
"""Longest time from the last fault to the end of the job: several grace periods, and backoff."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Fault:
    """A fault that begins at a time and lasts for ``seconds``; a killed device stays dead if they are negative."""

    at: float
    kind: str
    """kill, pause, hang, starve, jitter, hold, cut, deaf, mute, link, slow, leave, join, coordinator_kill,
    coordinator_pause, coordinator_starve, coordinator_jitter, coordinator_cut"""
    device: int = 0
    peer: int = 0
    seconds: float = 1.0


@dataclass(frozen=True)
class Setup:
    """A job and its faults."""

    devices: int = 3
    partitioned: bool = False
    arenas: bool = True
    faults: tuple[Fault, ...] = ()
    max_delay_s: float = 0.02
    """Longest delay of a message."""
    replicas: int = 1
    """Replicas of each part, if partitioned."""
    pipelines: int = 1
    """If partitioned: pipelines of a hybrid, as long as they divide the members, else one."""
    loading_s: float = 0.0
    """If partitioned: how long the first ranks load the job, at most. They have no state before all have loaded it."""
    one_host: bool = False
    """Whether the coordinator sees the devices' processes: those that have ended, and those that run."""

    @property
    def config(self) -> DetectorConfig:
        return ONE_HOST if self.one_host else CONFIG

    def can_be_silenced(self, number: int) -> bool:
        """Whether a fault keeps the coordinator from a device for a lease or longer: it may be declared dead."""
        if self.one_host:
            return False  # no fault lasts for a lease
        if self.max_delay_s >= 1.0:
            return True  # two heartbeats may be a lease apart
        kinds = {fault.kind for fault in self.faults if fault.device == number}
        if kinds & {"pause", "starve", "cut", "link"}:
            return True
        joins = any(fault.kind == "kill" or (fault.kind == "hold" and fault.at < 1.0) for fault in self.faults)
        if "hold" in kinds and 2 * self.max_delay_s > PROBE_S:
            return True  # its answers take longer than a probe may
        if "hold" in kinds and joins:
            return True  # an answer proves nothing before its first heartbeat: another process may have its address
        if any(fault.kind == "coordinator_cut" for fault in self.faults):
            return True
        if kinds & {"mute", "deaf"}:  # others reach it, and say so in time if there is no other fault
            cut_s = max(fault.seconds for fault in self.faults if fault.kind in ("mute", "deaf"))
            return (
                cut_s > 4.4
                or self.max_delay_s > 0.1
                or sum(fault.kind not in ("leave", "slow") for fault in self.faults) > 1
            )
        return False

    @property
    def whole(self) -> dict[str, int]:
        """The number of elements of each piece of the state."""
        return PARTITIONED if self.partitioned else UNPARTITIONED


@dataclass
class Operation:
    """A collective operation of one generation."""

    members: tuple[int, ...]
    entered: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, Callable[[dict[int, Any] | None], None]] = field(default_factory=dict)
    failed: bool = False

    @property
    def complete(self) -> bool:
        """Whether all members have entered."""
        return len(self.entered) == len(self.members)


@cache
def pieces_of_rank(
    rank: int, size: int, pipelines: int, replicas: int
) -> tuple[frozenset[SliceSpec], frozenset[SliceSpec]]:
    """The rank's own pieces of a partitioned state, and those of which it holds a replica."""
    stages = size // pipelines if size % pipelines == 0 else size
    parts = [[SliceSpec(f"p{n}", 0, 1, 1) for n in part] for part in split_evenly(PIECES, stages)]
    groups = [tuple(range(stage, size, stages)) for stage in range(stages)] if stages < size else []
    holders = replica_holders(size, (), replicas, groups)
    held = (piece for owner in range(size) if rank in holders[owner] for piece in parts[owner % stages])
    return frozenset(parts[rank % stages]), frozenset(held)


class Device:
    """A device's process: its task, if it has one, and the pieces of the state that it holds."""

    def __init__(self, run: Run, number: int, arena: dict[int, set[SliceSpec]] | None) -> None:
        self.run, self.number = run, number
        self.incarnation = f"{number}.{next(run.numbers)}"
        self.alive, self.paused, self.member = True, False, False
        self.starved = False
        """Paused because it waits for a core: its host's kernel says that it runs."""
        self.held = False
        """Paused because code holds its interpreter's lock: its host's kernel says that it runs, and gRPC answers."""
        self.deferred: list[Callable[[], None]] = []
        """Actions deferred while the process is paused."""
        self.arena = arena or {}
        """Pieces by step, which survive the process."""
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.task: tm.TaskRanks | None = None
        self.assignment: tuple[int, tuple[int, ...]] = (0, ())
        self.ended = False
        self.fence = 0
        """Incremented when the task leaves its links: completions of operations from before are ignored."""
        self.working = False
        """The task uses the links of a generation."""
        self.done, self.survived, self.reshard_count, self.fresh_start = NO_STATE, False, 0, False
        self.live: dict[int, set[SliceSpec]] = {}
        """Pieces by step that it can provide to other ranks."""
        self.leaving = False
        self.hangs = False
        """Its next computation makes no progress, and its thread reacts to nothing."""
        self.stuck: Callable[[], None] | None = None
        """What its thread goes on with when it does not hang any more; None: it does not hang."""
        self.final_part: tuple[int, int] | None = None
        """Turn and number of parts of the final state of which it has one, when the ranks have agreed on the end."""

    # ---- the process

    def run_after(self, delay: float, action: Callable[[], None]) -> None:
        """Runs the action on this process after a delay, unless it is dead; a paused process runs it on resume."""
        self.run.schedule(delay, partial(self.run_now, action))

    def run_now(self, action: Callable[[], None]) -> None:
        """Runs the action on this process now, unless it is dead; a paused process runs it on resume."""
        if self.paused:
            self.deferred.append(action)
        elif self.alive:
            action()

    def starve(self, until: float, freeze_s: tuple[float, float] = STARVED_S) -> None:
        """It gets its core in bursts, up to a time."""
        if self.run.now < until:
            random, longest = self.run.random, freeze_s[1]
            self.paused = self.starved = True
            self.run.schedule(random.uniform(*freeze_s), self.resume)
            self.run.schedule(random.uniform(longest, longest + 1.0), partial(self.starve, until, freeze_s))

    def resume(self) -> None:
        self.paused = self.starved = self.held = False
        deferred, self.deferred = self.deferred, []
        for action in deferred:
            self.run_after(0.0, action)

    def answers(self, incarnation: str) -> bool:
        """Whether this process is there and answers a connection."""
        return self.alive and self.incarnation == incarnation and (self.held or not self.paused)

    def kill(self) -> None:
        self.alive = False
        self.run.fail_operations_waiting_for(self)

    @property
    def left(self) -> bool:
        """Whether its task has left the job."""
        return bool(self.log) and self.log[-1][0] == "left"

    def recoverable_state(self) -> dict[int, set[SliceSpec]]:
        """Returns the state that can be recovered from it: of its memory while it lives, of its arena afterwards."""
        if self.left:
            return {}  # it was released: other devices hold its state
        if self.alive and self.task is not None and not self.ended:
            return self.live
        return self.arena

    @cached_property
    def info(self) -> DeviceInfo:
        """The description with which it joins."""
        return DeviceInfo(
            self.number,
            Address("127.0.0.1", 4000 + self.number),
            Address("127.0.0.1", 5000 + self.number),
            0,
            1 << 20,
            "here",
            self.number,
            self.incarnation,
            keeps_memory=self.run.setup.arenas,
        )

    # ---- heartbeats

    def heartbeat(self) -> None:
        run = self.run
        handle = run.handle_heartbeat if self.member else run.handle_join
        run.send(self.number, 0, partial(run.on_coordinator_now, partial(handle, self)))
        self.run_after(CONFIG.heartbeat_s, self.heartbeat)

    def answered(self, known: bool) -> None:
        self.member = known

    # ---- calls of the coordinator

    def start_task(self, generation: int, members: tuple[int, ...], joining: bool) -> None:
        if self.task is not None and not self.ended:
            self.task = tm.rejoined(self.task, generation)
            self._leave_links()
            self.emit("ready")
            return
        if self.ended and joining and self.log[-1][0] == "ended":
            return  # it has finished, and the coordinator does not know yet
        self.task, self.ended = tm.TaskRanks(), False
        if joining:
            self.task = tm.invited(self.task, generation)
            self.live = {step: set(pieces) for step, pieces in self.arena.items()}
            self.done, self.survived, self.fresh_start = max(self.live, default=NO_STATE), False, False

            def begin() -> None:
                self.emit("ready")
                self.check_assignment()

            self.run_after(self.run.random.uniform(0.05, 0.5), begin)
            return
        self.task = tm.took(self.task, generation)
        self.done, self.survived, self.fresh_start = 0, True, True
        self.assignment = generation, members
        self.working = True
        if self.run.setup.partitioned and self.run.setup.loading_s:
            self._set_up(members)
        else:
            self._begin(members)

    def _set_up(self, members: tuple[int, ...]) -> None:
        """The ranks partition the model together, each when it has loaded the job."""
        fence = self.fence

        def loaded() -> None:
            if fence == self.fence and self.working:
                self._enter("set up", None, lambda _: self._begin(members))

        self.run_after(self.run.random.uniform(0, self.run.setup.loading_s), loaded)

    def _begin(self, members: tuple[int, ...]) -> None:
        self._keep_state(0, members)
        self._train()

    def reassign(self, generation: int, members: tuple[int, ...], planned: bool) -> bool:
        if self.task is None or self.ended:
            return False
        try:
            self.task = tm.assigned(self.task, generation, planned)
        except MembershipChanged:
            return False
        if generation == self.task.newest:
            self.assignment = generation, members
        self._check()
        return True

    def release(self, generation: int, final: bool) -> None:
        if self.task is not None and not self.ended:
            self.task = tm.released(self.task, generation, final)
            if self.task.dismissed and self.stuck is not None:
                self.run_after(1.0, lambda: self.run.kill(self, 1.0) if self.stuck is not None else None)
            self._check()

    def move(self, generation: int) -> None:
        if self.task is not None:
            self.task = tm.moving(self.task, generation)

    def abort(self, generation: int) -> None:
        if self.task is not None:
            self.task = tm.stopped(self.task, generation)
            self._check()

    def _check(self) -> None:
        assert self.task is not None
        if self.stuck is not None:
            return
        if self.working and tm.outdated(self.task):
            self.fail(0)
        elif not self.working:
            self.check_assignment()

    # ---- the task

    def emit(self, kind: str, **fields: Any) -> None:
        self.log.append((kind, fields))
        self.run.deliver_events(self)

    def _leave_links(self) -> None:
        """Leaves the links of its generation."""
        if self.working:
            self.working = False
            self.fence += 1
            self.run.fail_operations_waiting_for(self)

    def fail(self, failed: int, lacks: str = "") -> None:
        """Leaves the links after a failure, emits ``waiting`` and waits for an assignment."""
        assert self.task is not None
        self._leave_links()
        self.emit("waiting", generation=self.task.taken, failed=failed, lacks=lacks)
        self.check_assignment()

    def check_assignment(self) -> None:
        """Takes the newest assignment, or leaves if it was released."""
        if self.task is None or self.working or self.ended:
            return
        match tm.next_step(self.task):
            case tm.NextStep.LEAVE:
                self._end("left")
            case tm.NextStep.TAKE:
                self.run_after(self.run.random.uniform(0, 0.3), self._take_assignment)

    def _take_assignment(self) -> None:
        if self.task is None or self.working or self.ended or tm.next_step(self.task) != tm.NextStep.TAKE:
            return
        if self.task.left_out:
            self.survived = False
        self.task = tm.took(self.task, self.assignment[0])
        self.working = True
        self.run.fail_operations_waiting_for(self)  # peers may still wait in an older generation
        mine = RankStatus(
            self.number,
            self.done,
            0,
            self.survived,
            [(step, sorted(pieces)) for step, pieces in self.live.items()],
            reshard_count=self.reshard_count,
            fresh_start=self.fresh_start,
            first_size=self.run.setup.devices if self.fresh_start else 0,
        )
        self._enter("agree", mine, self._agreed)

    def _end(self, how: str) -> None:
        self.ended = True
        self.run.last_step_done |= how == "ended" and self.done == STEPS
        self.working = False
        self.fence += 1
        self.run.fail_operations_waiting_for(self)
        self.emit(how)

    def _enter(self, name: str, payload: Any, then: Callable[[dict[int, Any]], None]) -> None:
        """Enters a collective operation of its generation; ``then`` gets the payloads of all ranks."""
        fence = self.fence

        def finished(payloads: dict[int, Any] | None) -> None:
            if fence == self.fence and self.working:
                if payloads is None:
                    self.fail(0)
                else:
                    then(payloads)

        self.run.enter(self, name, payload, lambda payloads: self.run_now(lambda: finished(payloads)))

    def _agreed(self, statuses: dict[int, RankStatus]) -> None:
        assert self.task is not None
        members = self.members
        try:
            plan = agree([statuses[number] for number in members], self.run.setup.whole)
        except StateLost as lost:
            self.fail(0, str(lost))
            return
        for piece, rank in plan.sources.items():
            provider = self.run.devices[members[rank]]
            in_generation = (
                provider.alive and provider.working and provider.task and provider.task.taken == self.task.taken
            )
            if in_generation and piece not in provider.live.get(plan.step, ()):
                raise Violation(f"device {provider.number} was to provide {piece} of step {plan.step}")
        rank = members.index(self.number)
        if not self.run.setup.partitioned and plan.done[rank] == NO_STATE:
            self.live, self.done = {}, NO_STATE  # its state is being overwritten
        self._enter("restore", None, lambda _: self._restored(plan))

    def _restored(self, plan: RecoveryPlan) -> None:
        if not self.run.setup.partitioned:
            self._keep_state(plan.step, self.members)
            self._resume(plan)
            return
        mine = self._pieces(self.members)[0]
        self.live.setdefault(plan.step, set()).update(mine)
        self._enter("keep", None, lambda _: self._replicated(plan))

    def _replicated(self, plan: RecoveryPlan) -> None:
        for pieces in self._pieces(self.members):
            self.live.setdefault(plan.step, set()).update(pieces)
        self._enter("meet", None, lambda _: self._restore_committed(plan))

    def _restore_committed(self, plan: RecoveryPlan) -> None:
        self._keep_state(plan.step, self.members)
        self._resume(plan)

    def _resume(self, plan: RecoveryPlan) -> None:
        self.done, self.survived, self.reshard_count = plan.step, True, plan.reshard_count
        assert self.task is not None
        if self.members[0] == self.number:
            self.emit("recovered", generation=self.task.taken)
        self._train()

    def _pieces(self, members: tuple[int, ...]) -> tuple[frozenset[SliceSpec], frozenset[SliceSpec]]:
        """Returns its own pieces of the state in this partition, and those of which it holds a replica."""
        setup = self.run.setup
        return pieces_of_rank(members.index(self.number), len(members), setup.pipelines, setup.replicas)

    def _keep_state(self, done: int, members: tuple[int, ...]) -> None:
        """Keeps the state after this step, and discards older state that it could provide."""
        if self.run.setup.partitioned:
            own, replicas = self._pieces(members)
            self.live = {done: {*own, *replicas}}
            if self.run.setup.arenas:  # copies of its own part after the last two steps
                kept = sorted(self.arena)[-1:]
                self.arena = {step: self.arena[step] for step in kept if step != done} | {done: set(own)}
        else:
            self.live = {done: {WHOLE}}
            if self.run.setup.arenas:
                self.arena = {done: {WHOLE}}

    # ---- training

    def _train(self) -> None:
        assert self.task is not None
        if self.done >= STEPS:
            self._publish_final_part()
            self._enter("end", None, lambda _: self._end("ended"))
            return
        fence = self.fence
        wait = self.run.random.uniform(0.5, 1.5) * STEP_S
        self.run_after(wait, lambda: self._compute() if fence == self.fence and self.working else None)

    def _compute(self) -> None:
        if not self.hangs:
            self._sum()
            return
        self.stuck = self._sum
        self.run_after(HANG_S, self._report_hang)

    def _report_hang(self) -> None:
        if self.stuck is not None and not self.ended:
            assert self.task is not None
            self.emit("hung", generation=self.task.generation)
            self.run_after(HANG_S, self._report_hang)

    def go_on(self) -> None:
        """It does not hang any more."""
        self.hangs, then, self.stuck = False, self.stuck, None
        if then is not None and self.task is not None and not self.ended:
            if not self.working:  # it was left out meanwhile: its links are closed
                self.check_assignment()
            elif tm.outdated(self.task):
                self.fail(0)
            else:
                then()

    def _publish_final_part(self) -> None:
        """One rank has the whole state, or one rank of each stage has a part."""
        size, rank = len(self.members), self.members.index(self.number)
        pipelines = self.run.setup.pipelines if size % self.run.setup.pipelines == 0 else 1
        parts = size // pipelines if self.run.setup.partitioned else 1
        if rank < parts:
            self.final_part = self.reshard_count, parts
            self.emit("part", turn=self.reshard_count, parts=parts)

    def _sum(self) -> None:
        assert self.task is not None
        self._enter(f"sum{self.done}", self.task.move, self._summed)

    def _summed(self, moves: dict[int, bool]) -> None:
        members = self.members
        if self.run.setup.partitioned:
            for pieces in self._pieces(members):
                self.live.setdefault(self.done + 1, set()).update(pieces)
            self._enter(f"meet{self.done}", None, lambda _: self._committed(members, False))
        else:
            self._committed(members, any(moves.values()))

    @property
    def members(self) -> tuple[int, ...]:
        """Members of its generation."""
        assert self.task is not None
        return self.run.generations[self.task.taken]

    def _committed(self, members: tuple[int, ...], moves: bool) -> None:
        assert self.task is not None
        self.done += 1
        self._keep_state(self.done, members)
        self.fresh_start = False
        if moves:
            self.working = False  # its links stay open until all ranks have moved
            self.fence += 1
            self.run.fail_operations_waiting_for(self)
            self.check_assignment()
            return
        self._train()


class Run:
    """A simulation of one job under one schedule of faults."""

    def __init__(self, setup: Setup, rng: random.Random) -> None:
        self.setup, self.random = setup, rng
        self.now, self.numbers = 100.0, itertools.count(1)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.start = self.now
        self.cuts: set[tuple[int, int]] = set()
        self.held_messages: dict[tuple[int, int], list[Callable[[], None]]] = {}
        """Messages by direction that is cut: TCP retransmits them once it is not."""
        self.delivered_until: dict[tuple[int, int], float] = {}
        self.operations: dict[tuple[int, str], Operation] = {}
        self.generations: dict[int, tuple[int, ...]] = {}
        self.processes: dict[tuple[int, int], str] = {}
        """Incarnation that was assigned a rank, by generation and device."""
        self.outcome = ""
        self.last_step_done = False
        """A task finished the training after its last step; its device may have died since."""
        self.journal: list[Any] = []
        self.paused = False
        self.coordinator_process = 0
        """Number of the coordinator's process; 0 while none runs."""
        self._coordinator_starts_count = 0
        self._deferred_calls: list[Callable[[], None]] = []
        self.state = State(setup.config, last_tick=self.now)
        self.job: jm.JobView | None = None
        self.devices: dict[int, Device] = {}
        self.deaths: dict[int, float] = {}
        """Seconds from the start until each device was first declared dead."""
        self._probed_until: dict[int, float] = {}
        """Time until which a probe of each device is under way."""
        self._processed: dict[str, int] = {}
        self._events: list[jm.JobMembershipEvent] = []
        self._busy = False
        for number in range(1, setup.devices + 1):
            self.devices[number] = Device(self, number, None)
            self._apply(m.Joined(self.devices[number].info, self.now))
            self.devices[number].member = True
            self.devices[number].run_after(self.random.uniform(0, CONFIG.heartbeat_s), self.devices[number].heartbeat)
        self._start_coordinator()
        self._start_job()
        for fault in setup.faults:
            self.schedule(fault.at, partial(self._inject, fault))
        self.faults_end_at = self.start + max((fault.at + max(fault.seconds, 0) for fault in setup.faults), default=0.0)

    # ---- time and messages

    def schedule(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay, next(self.numbers), action))

    def run_to_end(self) -> str:
        while not self.outcome:
            if not self._queue:
                raise Violation("nothing happens any more, and the job is not over")
            self.now, _, action = heapq.heappop(self._queue)
            if self.now > self.faults_end_at + BOUND_S:
                raise Violation(f"the job is not over {BOUND_S:g} s after the last fault: {self._describe()}")
            action()
        return self.outcome

    def _describe(self) -> str:
        tasks = {number: (device.task, device.done, device.working) for number, device in self.devices.items()}
        return f"{self.job}; {tasks}; {self.state.communicators}; {self.state.members}"

    def send(self, source: int, target: int, action: Callable[[], None]) -> None:
        """Sends a message between two processes (0 is the coordinator); each direction keeps the order."""
        direction = source, target
        if direction in self.cuts:
            self.held_messages.setdefault(direction, []).append(action)
            return
        due = max(self.delivered_until.get(direction, 0.0), self.now + self.random.uniform(0, self.setup.max_delay_s))
        self.delivered_until[direction] = due
        self.schedule(due - self.now, action)

    def cut(self, directions: Sequence[tuple[int, int]], seconds: float) -> None:
        self.cuts |= set(directions)
        if seconds >= 0:
            self.schedule(seconds, lambda: self._heal(directions))

    def _heal(self, directions: Sequence[tuple[int, int]]) -> None:
        self.cuts -= set(directions)
        for direction in directions:
            held = self.held_messages.pop(direction, [])
            self.schedule(self.random.uniform(0, 1.0), partial(self._send_held, direction, held))

    def _send_held(self, direction: tuple[int, int], held: list[Callable[[], None]]) -> None:
        for message in held:
            self.send(*direction, message)

    # ---- collective operations

    def enter(self, device: Device, name: str, payload: Any, then: Callable[[dict[int, Any] | None], None]) -> None:
        assert device.task is not None
        generation = device.task.taken
        members = self.generations[generation]
        operation = self.operations.get((generation, name))
        if operation is None:
            operation = self.operations[generation, name] = Operation(members)
        operation.entered[device.number] = payload
        if operation.failed:
            self.schedule(self.random.uniform(0, 0.05), lambda: then(None))
            return
        operation.waiting[device.number] = then
        absent = (key for key in members if key not in operation.entered and self._has_left(key, generation))
        if (gone := next(absent, None)) is not None:
            self._fail(operation, gone)
        elif operation.complete:
            self._complete(operation)

    def _has_left(self, number: int, generation: int) -> bool:
        """Whether a member has left the generation, in a way that its peers can detect."""
        device = self.devices[number]
        if device.incarnation != self.processes[generation, number]:
            return True  # it was killed; this is the process restarted after it
        if not device.alive or device.task is None or device.ended or device.task.taken > generation:
            return True
        return device.task.taken == generation and not device.working

    def _reaches(self, first: int, second: int) -> bool:
        return (first, second) not in self.cuts and (second, first) not in self.cuts

    def _complete(self, operation: Operation) -> None:
        """All members have entered. Each completes at its own time; one with a cut link stalls."""
        pairs = self.cuts and itertools.combinations(operation.members, 2)
        stuck = {key for pair in pairs if not self._reaches(*pair) for key in pair}

        def arrive(then: Callable[[dict[int, Any] | None], None]) -> None:
            then(dict(operation.entered))

        for number, then in list(operation.waiting.items()):
            if number in stuck:
                self._stall(operation, number)
                continue
            del operation.waiting[number]
            self.schedule(self.random.uniform(0, 0.1), partial(arrive, then))

    def _stall(self, operation: Operation, number: int) -> None:
        """No byte arrives: after a third of a lease the rank reports to the coordinator which peer it waits for."""
        peer = next((key for key in operation.members if key != number and not self._reaches(number, key)), 0)
        device = self.devices[number]
        fence = device.fence

        def complain() -> None:
            if fence != device.fence or number not in operation.waiting:
                return
            if peer and not self._reaches(number, peer):
                generation = device.task.taken if device.task else 0
                self.send(number, 0, lambda: self._link_reported(generation, number, peer))
                device.run_after(0.5, complain)
            elif operation.complete:
                self._complete(operation)

        device.run_after(0.5, complain)

    def _fail(self, operation: Operation, gone: int) -> None:
        operation.failed = True
        waiting, operation.waiting = operation.waiting, {}
        for number, then in waiting.items():
            if self._reaches(number, gone):
                self.schedule(self.random.uniform(0, 0.1), partial(then, None))
            else:
                operation.waiting[number] = then  # it cannot detect the failure: the coordinator must tell it

    def fail_operations_waiting_for(self, device: Device) -> None:
        """Fails the operations that wait for a device, which has left the links of its generation."""
        for (generation, _), operation in list(self.operations.items()):
            if device.number in operation.members and operation.waiting and self._has_left(device.number, generation):
                if device.number not in operation.entered or self.random.random() < 0.5:
                    operation.waiting.pop(device.number, None)
                    self._fail(operation, device.number)
                else:
                    operation.waiting.pop(device.number, None)

    # ---- the coordinator

    def _start_coordinator(self) -> None:
        self._coordinator_starts_count += 1
        self.coordinator_process = self._coordinator_starts_count
        self._tick(self.coordinator_process)

    def on_coordinator(self, delay: float, action: Callable[[], None]) -> None:
        """Runs the action on the coordinator after a delay, unless its process was restarted; a pause defers it."""
        self.schedule(delay, partial(self._on_process, self.coordinator_process, action))

    def on_coordinator_now(self, action: Callable[[], None]) -> None:
        """Runs the action on the coordinator now, unless none runs; a pause defers it."""
        if self.coordinator_process:
            self._on_process(self.coordinator_process, action)

    def _on_process(self, process: int, action: Callable[[], None]) -> None:
        if self.coordinator_process == process:
            self._deferred_calls.append(action) if self.paused else action()

    def _tick(self, process: int) -> None:
        self.on_coordinator(CONFIG.heartbeat_s, partial(self._tick, process))
        self._apply(m.Tick(self.now))

    def _apply(self, message: m.MembershipEvent) -> None:
        try:
            self.state, instructions = step(self.state, message)
        except HoopError:
            return
        arrived = []
        for instruction in instructions:
            match instruction:
                case m.Record():
                    self.journal.append(instruction.entry)
                case m.Probe(device_id, witnesses):
                    self._probe(device_id, witnesses)
                case m.Announce("device_dead"):
                    self._check_death(int(str(instruction.fields["device"])))
                case m.Stop():
                    for number in instruction.members:
                        self._abort(number, instruction.generation)
                case m.Announce("device_joined" | "eviction_ended"):
                    arrived.append(int(str(instruction.fields["device"])))
                case _:
                    pass
        if self.job is not None:
            for number in arrived:
                self._handle(jm.DeviceArrived(number))
            if instructions or isinstance(message, m.Tick):
                self._handle(jm.JobTick())

    def _abort(self, number: int, generation: int) -> None:
        device = self.devices[number]
        if self.state.members[number].usable:
            self.send(0, number, partial(device.run_now, partial(device.abort, generation)))

    def _probe(self, number: int, witnesses: tuple[int, ...]) -> None:
        device, incarnation = self.devices[number], self.state.members[number].info.incarnation
        gone = not device.alive or device.incarnation != incarnation
        if gone and self._reaches(0, number):
            self.on_coordinator(0.02, lambda: self._apply(m.Probed(number, incarnation, "refused")))
        elif self.setup.one_host:
            if device.starved or device.held or not device.paused:
                seen = self.now
                self.on_coordinator(0.02, lambda: self._apply(m.Probed(number, incarnation, "", seen)))
        elif self.now >= self._probed_until.get(number, 0.0):
            self._probed_until[number] = self.now + PROBE_S
            self._connect(0, number, incarnation)
            for witness in witnesses:
                self._ask(witness, number, incarnation)

    def _connect(self, source: int, number: int, incarnation: str, then: Callable[[], None] | None = None) -> None:
        """Opens a connection from a process to the server of a device; ``then``: if it answers in time."""
        begun, there, back = self.now, *(self.random.uniform(0, self.setup.max_delay_s) for _ in range(2))

        def seen() -> None:
            self._probed_until.pop(number, None)
            self.on_coordinator_now(lambda: self._apply(m.Probed(number, incarnation, "", begun, True)))

        def arrived() -> None:
            if self.devices[number].answers(incarnation) and self._reaches(source, number):
                self.schedule(back, then or seen)

        if there + back <= PROBE_S and self._reaches(source, number):
            self.schedule(there, arrived)

    def _ask(self, witness: int, number: int, incarnation: str) -> None:
        """Asks another device to connect to a device's server."""
        begun, device = self.now, self.devices[witness]

        def reached() -> None:
            probed = m.Probed(number, incarnation, "", begun, True, witness)
            self.send(witness, 0, partial(self.on_coordinator_now, partial(self._apply, probed)))

        def asked() -> None:
            self._connect(witness, number, incarnation, lambda: device.run_now(reached))

        self.send(0, witness, partial(device.run_now, asked))

    def _check_death(self, number: int) -> None:
        device, member = self.devices[number], self.state.members[number]
        self.deaths.setdefault(number, self.now - self.start)
        lives = device.alive and device.incarnation == member.info.incarnation
        if lives and not self.setup.can_be_silenced(number):
            raise Violation(f"device {number} lives and was declared dead: {member.reason}")

    def handle_heartbeat(self, device: Device) -> None:
        known = True
        try:
            self.state, _ = step(self.state, m.Heartbeat(device.number, device.incarnation, self.now))
        except MembershipChanged:
            known = False
        self.send(0, device.number, partial(device.run_now, partial(device.answered, known)))

    def handle_join(self, device: Device) -> None:
        self._apply(m.Joined(device.info, self.now))
        known = self.state.members[device.number].info.incarnation == device.incarnation
        self.send(0, device.number, partial(device.run_now, partial(device.answered, known)))

    def call(self, number: int, action: Callable[[Device], bool], then: Callable[[bool, bool], None]) -> None:
        """Calls a device; ``then`` gets whether it answered, and its answer. The call times out after ``CALL_S``."""
        state = [False]
        incarnation = self.state.members[number].info.incarnation

        process = self.coordinator_process

        def done(answered: bool, ok: bool) -> None:
            if not state[0] and self.coordinator_process == process:  # answers to an earlier process are dropped
                state[0] = True
                self._apply(m.CallReported(number, "" if answered else "no answer", self.now))
                then(answered, ok)

        def arrived() -> None:
            device = self.devices[number]
            if not device.alive or device.incarnation != incarnation:
                self.send(number, 0, partial(self.on_coordinator_now, partial(done, False, False)))
                return

            def work() -> None:
                ok = action(device)
                self.send(number, 0, partial(self.on_coordinator_now, partial(done, True, ok)))

            device.run_now(work)

        if not self.state.members[number].usable:
            self.on_coordinator(0.0, lambda: then(False, False))
            return
        self.send(0, number, arrived)
        self.on_coordinator(CALL_S, lambda: done(False, False))

    # ---- the job

    def _start_job(self) -> None:
        members = tuple(self.devices)
        self._apply(m.Created(members))
        self._apply(m.JobStarted(JOB, "{}", "run"))
        self._generation(1, members)
        self.job = self._view(members)
        for number in members:
            device = self.devices[number]
            device.start_task(1, members, joining=False)
            self._handle(jm.TaskFound(number, device.incarnation, 1))
            self._watch(device)
        self._handle(jm.TasksListed())

    def _view(self, participants: Sequence[int]) -> jm.JobView:
        planned = not self.setup.partitioned
        return jm.JobView(
            JOB,
            planned=planned,
            restart_grace_s=GRACE_S,
            size=len(participants),
            participants=frozenset(participants),
            holders=frozenset(() if self.state.communicator(JOB).ran else participants),
        )

    def _handle(self, event: jm.JobMembershipEvent) -> None:
        self._events.append(event)
        if self._busy or self.job is None:
            return
        self._busy = True
        while self._events:
            self.job, instructions = jm.advance(self.job, self._events.pop(0), self.state, self.now)
            for instruction in instructions:
                self._perform(instruction)
        self._busy = False

    def _perform(self, instruction: jm.JobInstruction) -> None:
        one = self.state.communicator(JOB)

        def move(device: Device) -> bool:
            device.move(one.generation)
            return True

        def release(device: Device, final: bool) -> bool:
            device.release(one.generation, final)
            return True

        match instruction:
            case jm.Assign():
                self.on_coordinator(0.0, lambda: self._assign(instruction))
            case jm.Move(members):
                for number in members:
                    self.call(number, move, lambda *_: None)
            case jm.Invite(device_id):
                self.on_coordinator(0.0, lambda: self._invite(device_id))
            case jm.Release(device_id, final):
                self.call(device_id, partial(release, final=final), lambda *_: None)
            case jm.Expel(device_id, _):
                self.call(device_id, partial(release, final=True), lambda *_: None)
            case jm.Readmit(device_id):
                self.on_coordinator(0.0, lambda: self._apply(m.Readmitted(JOB, device_id)))
            case jm.End(_, text):
                self._job_ended(text)
            case jm.Await():
                pass

    def _assign(self, assign: jm.Assign) -> None:
        before = self.state.communicator(JOB).generation
        self._apply(m.Rebuilt(JOB, assign.joining, assign.leaving, assign.planned))
        communicator = self.state.communicator(JOB)
        if communicator.generation == before:
            self._handle(jm.AssignFailed())
            return
        self._generation(communicator.generation, communicator.members)
        self._handle(jm.Assigned(communicator.generation, assign.planned))
        answers: list[bool] = []

        def answered(replied: bool, ok: bool) -> None:
            answers.append(replied and ok)
            if len(answers) == len(communicator.members):
                self._handle(jm.Delivered(communicator.generation, all(answers)))

        for number in communicator.members:
            self.call(
                number,
                lambda device: device.reassign(communicator.generation, communicator.members, assign.planned),
                answered,
            )

    def _generation(self, generation: int, members: tuple[int, ...]) -> None:
        self.generations[generation] = members
        for number in members:
            self.processes[generation, number] = self.state.members[number].info.incarnation

    def _invite(self, number: int) -> None:
        incarnation = self.state.members[number].info.incarnation
        generation = self.state.communicator(JOB).generation

        def start(device: Device) -> bool:
            device.start_task(generation, (), joining=True)
            return True

        def answered(replied: bool, ok: bool) -> None:
            if not replied:
                self._handle(jm.InviteFailed(number, incarnation, refused=False))
            else:
                self._watch(self.devices[number])

        self.call(number, start, answered)

    def _link_reported(self, generation: int, number: int, peer: int) -> None:
        self.on_coordinator_now(lambda: self._apply(m.LinkFailureReported(JOB, generation, number, peer, self.now)))

    # ---- events of tasks

    def _watch(self, device: Device) -> None:
        self._processed.setdefault(device.incarnation, 0)
        self.deliver_events(device)
        self._monitor(device)

    def deliver_events(self, device: Device) -> None:
        process = self.coordinator_process

        def process_event(index: int) -> None:
            if self.coordinator_process != process:
                return
            processed = self._processed.get(device.incarnation)
            if processed is not None and self.job is not None and processed == index:
                self._processed[device.incarnation] = index + 1
                self._process_event(device, *device.log[index])

        def arrive(index: int) -> None:
            self.on_coordinator_now(lambda: process_event(index))

        if self.coordinator_process and device.incarnation in self._processed:
            for index in range(self._processed[device.incarnation], len(device.log)):
                self.send(device.number, 0, partial(arrive, index))

    def _monitor(self, device: Device) -> None:
        """Watches a task until it has ended or its device is lost."""

        def check() -> None:
            member = self.state.members[device.number]
            if device.ended and self._processed.get(device.incarnation, 0) >= len(device.log):
                return
            if not member.usable or member.info.incarnation != device.incarnation:
                self._processed.pop(device.incarnation, None)
                self._handle(jm.TaskLost(device.number, device.incarnation))
                return
            self.deliver_events(device)
            self.on_coordinator(self.random.uniform(0.1, 1.0), check)

        self.on_coordinator(self.random.uniform(0.1, 1.0), check)

    def _process_event(self, device: Device, kind: str, fields: dict[str, Any]) -> None:
        task = device.number, device.incarnation
        assert self.job is not None
        ranked = device.number in jm.active(self.job, self.state)
        match kind:
            case "ready":
                if not ranked:
                    self._handle(jm.TaskReady(*task))
            case "waiting":
                self._handle(
                    jm.TaskWaiting(*task, fields["generation"], fields["lacks"], "PeerLost" if fields["lacks"] else "")
                )
            case "recovered":
                self._apply(m.LinkWorked(JOB, fields["generation"]))
                self._handle(jm.TaskResumed(fields["generation"]))
            case "ended":
                self._handle(jm.TaskFinished(*task, finished=True))
            case "hung":
                self._handle(jm.TaskHung(*task, fields["generation"], "it hangs"))
            case "part":
                self._handle(jm.FinalPartTaken(device.number, STEPS, fields["turn"], fields["parts"]))
            case "left":
                self._handle(jm.TaskFinished(*task))

    def _job_ended(self, text: str) -> None:
        assert self.job is not None
        finished = self.job.finished and not text
        self.outcome = "finished" if finished else "lost" if text or not self.job.all_leaving else "left"
        if self.outcome == "finished":
            if not self.last_step_done:
                raise Violation("a job finished, and no device has done its last step")
            if not any(len(devices) >= parts for (_, _, parts), devices in self.job.final_parts.items()):
                raise Violation(f"a job finished, and parts of its final state are unknown: {self._describe()}")
            return
        if self.outcome == "left":
            return
        final = Counter(device.final_part for device in self.devices.values() if device.alive and device.ended)
        if complete := [part for part, devices in final.items() if part is not None and devices == part[1]]:
            raise Violation(f"a job was declared lost ({text}), and {complete} is there: {self._describe()}")
        held: dict[int, set[SliceSpec]] = {}
        for device in self.devices.values():
            for done, pieces in device.recoverable_state().items():
                held.setdefault(done, set()).update(pieces)
        for done, pieces in held.items():
            if {piece.name for piece in pieces} >= set(self.setup.whole):
                raise Violation(f"a job was declared lost ({text}), and step {done} is whole: {self._describe()}")
        first = [self.devices[number] for number in range(1, self.setup.devices + 1)]
        # One that has left, because it was released or expelled, is gone like one that has died.
        if all(device.alive and not device.left and device.fresh_start and device.done == 0 for device in first):
            raise Violation(f"a job that had only begun was declared lost ({text}): {self._describe()}")

    # ---- faults

    def _inject(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self.kill(self.devices[fault.device], fault.seconds)
            case "pause":
                device = self.devices[fault.device]
                device.paused = True
                self.schedule(max(fault.seconds, 0.1), device.resume)
            case "hold":  # of the interpreter's lock, beyond a lease
                device = self.devices[fault.device]
                device.paused = device.held = True
                self.schedule(4 * fault.seconds, device.resume)
            case "starve":
                self.devices[fault.device].starve(self.now + fault.seconds)
            case "jitter":
                self.devices[fault.device].starve(self.now + fault.seconds, JITTER_S)
            case "hang":
                device = self.devices[fault.device]
                device.hangs = True
                self.schedule(max(fault.seconds, 0.1), lambda: device.run_now(device.go_on))
            case "cut":
                others = [0, *(key for key in self.devices if key != fault.device)]
                directions = [
                    direction for other in others for direction in ((other, fault.device), (fault.device, other))
                ]
                self.cut(directions, max(fault.seconds, 0.1))
            case "link":
                self.cut([(fault.device, fault.peer)], max(fault.seconds, 0.1))
            case "slow":
                self._accuse(fault.device, fault.peer, self.now + fault.seconds)
            case "mute":
                self.cut([(fault.device, 0)], max(fault.seconds, 0.1))
            case "deaf":
                self.cut([(0, fault.device)], max(fault.seconds, 0.1))
            case "leave":
                if self.coordinator_process:
                    self.on_coordinator(0.0, lambda: self._handle(jm.LeaveRequested(fault.device)))
            case "join":
                number = max(self.devices) + 1
                self._start_device(Device(self, number, None))
            case "coordinator_kill":
                self.coordinator_process, self.paused, self._deferred_calls = 0, False, []
                self.schedule(max(fault.seconds, 0.1), self._restart)
            case "coordinator_pause":
                if self.coordinator_process:
                    self.paused = True
                    self.schedule(max(fault.seconds, 0.1), self._unpause)
            case "coordinator_starve":
                self._starve(self.now + fault.seconds)
            case "coordinator_jitter":
                self._starve(self.now + fault.seconds, JITTER_S)
            case "coordinator_cut":
                directions = [direction for key in self.devices for direction in ((0, key), (key, 0))]
                self.cut(directions, max(fault.seconds, 0.1))

    def _accuse(self, number: int, peer: int, until: float) -> None:
        """A busy machine: bytes take so long that a device takes the link to its peer for broken, which it is not."""
        device = self.devices[number]
        if device.alive and device.working and device.task is not None and peer in device.members:
            self.send(number, 0, partial(self._link_reported, device.task.taken, number, peer))
        if self.now < until:
            self.schedule(0.5, lambda: self._accuse(number, peer, until))

    def kill(self, device: Device, seconds: float) -> None:
        if not device.alive:
            return
        device.kill()
        if self.coordinator_process and self._reaches(device.number, 0):  # its heartbeat stream is closed
            self.on_coordinator(0.02, lambda: self._apply(m.LinkClosed(device.number, device.incarnation)))
        if seconds >= 0 and self.setup.arenas:
            self.schedule(seconds, lambda: self._start_device(Device(self, device.number, device.arena)))

    def _start_device(self, device: Device) -> None:
        self.devices[device.number] = device
        device.heartbeat()

    def _starve(self, until: float, freeze_s: tuple[float, float] = STARVED_S) -> None:
        """The coordinator gets its core in bursts, up to a time."""
        if self.coordinator_process and self.now < until:
            self.paused, longest = True, freeze_s[1]
            self.schedule(self.random.uniform(*freeze_s), self._unpause)
            self.schedule(self.random.uniform(longest, longest + 1.0), lambda: self._starve(until, freeze_s))

    def _unpause(self) -> None:
        self.paused = False
        held, self._deferred_calls = self._deferred_calls, []
        for action in held:
            self.on_coordinator(0.0, action)

    def _restart(self) -> None:
        """Restarts the coordinator from its journal; it asks the devices which tasks they run."""
        if self.coordinator_process:
            return
        self.state = replay(self.journal, self.setup.config, self.now)
        self._processed, self._events, self._busy = {}, [], False
        job_record = self.state.jobs[JOB]
        if job_record.ended:
            return
        self.job = self._view(job_record.devices)
        self._start_coordinator()
        communicator = self.state.communicator(JOB)
        usable = [number for number, member in self.state.members.items() if member.usable]
        remaining = [len(usable)]

        def task_listed(number: int, replied: bool, ok: bool) -> None:
            device = self.devices[number]
            incarnation = self.state.members[number].info.incarnation
            generation: int | None = communicator.generation if number in communicator.members else None
            if replied and device.incarnation == incarnation:
                has = device.task is not None and not device.ended
                generation = device.task.generation if has and device.task is not None else None
                if device.ended and number in communicator.members:  # its events are processed first
                    self._processed[device.incarnation] = len(device.log)
                    for entry in device.log:
                        self._process_event(device, *entry)
            if generation is not None:
                if device.incarnation == incarnation:
                    self._watch(device)
                self._handle(jm.TaskFound(number, incarnation, generation))
            remaining[0] -= 1
            if not remaining[0]:
                self._handle(jm.TasksListed())

        for number in usable:
            self.call(number, lambda device: True, partial(task_listed, number))
        if not usable:
            self._handle(jm.TasksListed())


KINDS = (
    "kill",
    "kill",
    "pause",
    "starve",
    "hold",
    "cut",
    "link",
    "mute",
    "deaf",
    "leave",
    "join",
    "coordinator_kill",
    "coordinator_pause",
    "coordinator_starve",
    "coordinator_cut",
)
ONE_HOST_KINDS = tuple(kind for kind in KINDS if kind not in ("cut", "link", "mute", "deaf", "coordinator_cut"))


def generate_setup(rng: random.Random) -> Setup:
    """Draws a setup with up to three faults, or groups of them, all of which end within a grace period.

    A quarter of the setups have two replicas of each part, and the loss of two devices at once among their faults. In a
    fifth every process is slow: all devices and the coordinator are frozen again and again, each by itself.
    """
    devices, partitioned, one_host = rng.randint(2, 5), rng.random() < 0.5, rng.random() < 0.3
    kinds = ONE_HOST_KINDS if one_host else KINDS
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 3)):
        device = rng.randint(1, devices)
        peer = rng.choice([other for other in range(1, devices + 1) if other != device])
        seconds = rng.choice([0.1, 0.5, 1.0, 2.0, 4.4, 8.0])
        if rng.random() < 0.15:  # all devices are killed
            faults += [Fault(rng.uniform(0, 2.5), "kill", other, 0, seconds) for other in range(1, devices + 1)]
        else:
            faults.append(Fault(rng.uniform(0, 2.5), rng.choice(kinds), device, peer, seconds))
    arenas, max_delay_s = rng.random() < 0.8, rng.choice([0.01, 0.3, 1.0])
    replicas, pipelines = 1, 1
    if partitioned and devices > 2 and rng.random() < 0.5:  # two devices are killed at once
        replicas, pipelines = 2, rng.choice([1, 1, 2])
        at, seconds = rng.uniform(0, 2.5), rng.choice([0.5, 2.0, 8.0])
        faults += [Fault(at, "kill", device, 0, seconds) for device in rng.sample(range(1, devices + 1), 2)]
    loading_s = rng.choice([0.0, 0.0, 2.0])
    if rng.random() < 0.3:  # a busy machine
        device, peer = rng.sample(range(1, devices + 1), 2)
        faults.append(Fault(rng.uniform(0, 2.5), "slow", device, peer, rng.choice([0.5, 2.0, 8.0])))
    if rng.random() < 0.1:  # the coordinator is cut off for so long that it takes all devices for dead
        faults = [fault for fault in faults if fault.kind in ("pause", "leave", "slow")]
        faults.append(Fault(rng.uniform(0, 3.5), "coordinator_cut", 0, 0, rng.choice([62.0, 75.0, 110.0])))
    if rng.random() < 0.15:
        faults.append(Fault(rng.uniform(0, 2.5), "hang", rng.randint(1, devices), 0, rng.choice([1.0, 8.0, 40.0])))
    if rng.random() < 0.2:  # every process is slow, each by itself
        kind, seconds = "starve" if one_host else "jitter", rng.choice([2.0, 8.0])
        faults += [Fault(rng.uniform(0, 1.0), kind, other, 0, seconds) for other in range(1, devices + 1)]
        faults.append(Fault(rng.uniform(0, 1.0), f"coordinator_{kind}", 0, 0, seconds))
    ordered = tuple(sorted(faults, key=lambda fault: fault.at))
    return Setup(devices, partitioned, arenas, ordered, max_delay_s, replicas, pipelines, loading_s, one_host)


def run_schedule(seed: int) -> str:
    """Runs the schedule with this seed and returns its outcome."""
    return Run(generate_setup(random.Random(seed)), random.Random(seed)).run_to_end()


def shrink(setup: Setup, seed: int) -> Setup:
    """Removes faults from the setup as long as it still breaks an invariant with the same seed."""
    for fault in setup.faults:
        fewer = replace(setup, faults=tuple(other for other in setup.faults if other is not fault))
        if find_violation(fewer, seed):
            return shrink(fewer, seed)
    return setup


def find_violation(setup: Setup, seed: int) -> str:
    """Returns the violation of an invariant; empty if all hold."""
    try:
        Run(setup, random.Random(seed)).run_to_end()
    except Violation as violation:
        return str(violation)
    return ""
