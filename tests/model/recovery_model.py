"""A job under faults, in virtual time: Hoop's own state machines, with messages, processes and training made up.

Real here: ``membership.step``, ``job_membership.advance``, ``task_membership``, ``recovery.agree``, the journal.
Made up: the network (each direction between two processes delays, holds back or loses), the processes (killed, paused,
restarted on their arenas), and training: a step is two collective operations, and a piece of the state is a number.

    Run(Setup(devices=3, partitioned=True), random.Random(7)).until_over()

It raises ``Violation`` where an invariant does not hold:

    one history     ranks of a generation do the same step; state comes from a rank that has it
    no false loss   a job ends as lost only if no memory and no arena holds every piece of any step
    progress        the job is over within ``BOUND_S`` after the last fault
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hoop.errors import HoopError, MembershipChanged
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership import task_membership as tm
from hoop.membership.failure_detector import DetectorConfig
from hoop.membership.journal import replay
from hoop.membership.recovery import NO_STATE, WHOLE, RankStatus, RecoveryPlan, SliceSpec, StateLost, agree
from hoop.membership.replication import replica_holders
from hoop.membership.state import State
from hoop.membership.state_machine import step
from hoop.plan.plan import split_evenly
from hoop.topology import Address, DeviceInfo

CONFIG = DetectorConfig(heartbeat_s=0.5, lease_s=1.5, isolation_s=60.0)
JOB = 1
STEPS = 6
STEP_S = 0.3
PIECES = 5
CALL_S = 5.0
GRACE_S = 60.0
BOUND_S = 300.0
"""How long after the last fault the job may take: several graces, and backoff."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Fault:
    """Something goes wrong at a time, and comes right after a while (never, where ``seconds`` is negative)."""

    at: float
    kind: str
    """kill, pause, cut, deaf, mute, coordinator_kill, coordinator_pause, coordinator_cut, link, leave, join"""
    device: int = 0
    peer: int = 0
    seconds: float = 1.0


@dataclass(frozen=True)
class Setup:
    """A job and what befalls it."""

    devices: int = 3
    partitioned: bool = False
    arenas: bool = True
    faults: tuple[Fault, ...] = ()
    slow: float = 0.02
    """The longest that a message takes."""


@dataclass
class Operation:
    """One collective operation of one generation."""

    members: tuple[int, ...]
    entered: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, Callable[[dict[int, Any] | None], None]] = field(default_factory=dict)
    failed: bool = False


class Device:
    """A device's process: its task, if it has one, and what it holds of the state."""

    def __init__(self, run: Run, number: int, arena: dict[int, set[SliceSpec]] | None) -> None:
        self.run, self.number = run, number
        self.incarnation = f"{number}.{run.next_number()}"
        self.alive, self.paused, self.member = True, False, False
        self.later: list[Callable[[], None]] = []
        """What happened while it was paused."""
        self.arena = arena or {}
        """Step to pieces: what it found when it was started."""
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.task: tm.TaskRanks | None = None
        self.assignment: tuple[int, tuple[int, ...]] = (0, ())
        self.ended = False
        self.fence = 0
        """Counts what the task left: the end of an operation that it gave up is nothing to it."""
        self.working = False
        """It uses the links of a generation."""
        self.done, self.survived, self.reshard_count, self.fresh_start = NO_STATE, False, 0, False
        self.live: dict[int, set[SliceSpec]] = {}
        """Step to pieces that it can provide."""
        self.leaving = False

    # ---- its process

    def do(self, after: float, what: Callable[[], None]) -> None:
        """On this process, if it still lives then; a paused one does it when it goes on."""

        def now() -> None:
            if not self.alive:
                return
            if self.paused:
                self.later.append(what)
            else:
                what()

        self.run.at(after, now)

    def carry_on(self) -> None:
        self.paused = False
        later, self.later = self.later, []
        for what in later:
            self.do(0.0, what)

    def kill(self) -> None:
        self.alive = False
        self.run.left(self)

    def held(self) -> dict[int, set[SliceSpec]]:
        """What can be had of it: its memory while it lives, its arena after."""
        if self.log and self.log[-1][0] == "left":
            return {}  # it was released: others have what it had
        if self.alive and self.task is not None and not self.ended:
            return self.live
        return self.arena

    def describe(self) -> DeviceInfo:
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

    def beat(self) -> None:
        run = self.run
        if self.member:
            run.send(self.number, 0, lambda: run.coordinator_hears(self))
        else:
            run.send(self.number, 0, lambda: run.coordinator_joins(self))
        self.do(CONFIG.heartbeat_s, self.beat)

    def answered(self, known: bool) -> None:
        self.member = known

    # ---- calls of the coordinator

    def start_task(self, generation: int, members: tuple[int, ...], joining: bool) -> None:
        if self.task is not None and not self.ended:
            self.task = tm.rejoined(self.task)
            self._quit()
            self.tell("ready")
            return
        if self.ended and joining and self.log[-1][0] == "ended":
            return  # it came to the end, and the coordinator has not heard of it yet
        self.task, self.ended = tm.TaskRanks(), False
        if joining:
            self.live = {step: set(pieces) for step, pieces in self.arena.items()}
            self.done, self.survived, self.fresh_start = max(self.live, default=NO_STATE), False, False

            def begin() -> None:
                self.tell("ready")
                self.look()

            self.do(self.run.random.uniform(0.05, 0.5), begin)
            return
        self.task = tm.took(self.task, generation)
        self.done, self.survived, self.fresh_start = 0, True, True
        self._hold(0, members)
        self.assignment = generation, members
        self.working = True
        self._train()

    def reseat(self, generation: int, members: tuple[int, ...], planned: bool) -> bool:
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

    def release(self, final: bool) -> None:
        if self.task is not None and not self.ended:
            self.task = tm.released(self.task, final)
            self._check()

    def move(self) -> None:
        if self.task is not None:
            self.task = tm.moving(self.task)

    def abort(self, generation: int) -> None:
        if self.task is not None:
            self.task = tm.stopped(self.task, generation)
            self._check()

    def _check(self) -> None:
        assert self.task is not None
        if self.working and tm.outdated(self.task):
            self.fail(0)
        elif not self.working:
            self.look()

    # ---- its task

    def tell(self, kind: str, **about: Any) -> None:
        self.log.append((kind, about))
        self.run.told(self)

    def _quit(self) -> None:
        """Leaves the links of the generation it is in."""
        if self.working:
            self.working = False
            self.fence += 1
            self.run.left(self)

    def fail(self, failed: int, lacks: str = "") -> None:
        """Something on its links failed: it says that it waits, and for nothing else."""
        assert self.task is not None
        self._quit()
        self.tell("waiting", generation=self.task.taken, failed=failed, lacks=lacks)
        self.look()

    def look(self) -> None:
        """Takes the newest assignment, if there is one."""
        if self.task is None or self.working or self.ended:
            return
        match tm.next_step(self.task):
            case tm.NextStep.LEAVE:
                self._end("left")
            case tm.NextStep.TAKE:
                self.do(self.run.random.uniform(0, 0.3), self._take)

    def _take(self) -> None:
        if self.task is None or self.working or self.ended or tm.next_step(self.task) != tm.NextStep.TAKE:
            return
        if self.task.left_out:
            self.survived = False
        self.task = tm.took(self.task, self.assignment[0])
        self.working = True
        self.run.left(self)  # peers that still wait in an older generation
        mine = RankStatus(
            self.number,
            self.done,
            0,
            self.survived,
            [(step, sorted(pieces)) for step, pieces in self.live.items()],
            reshard_count=self.reshard_count,
            fresh_start=self.fresh_start,
        )
        self._operate("agree", mine, self._agreed)

    def _end(self, how: str) -> None:
        self.ended = True
        self.run.last_step_done |= how == "ended" and self.done == STEPS
        self.working = False
        self.fence += 1
        self.run.left(self)
        self.tell(how)

    def _operate(self, name: str, payload: Any, then: Callable[[dict[int, Any]], None]) -> None:
        """A collective operation of the generation it is in; ``then`` gets everybody's payloads."""
        fence = self.fence

        def finished(found: dict[int, Any] | None) -> None:
            if fence == self.fence and self.working:
                if found is None:
                    self.fail(0)
                else:
                    then(found)

        self.run.enter(self, name, payload, lambda found: self.do(0.0, lambda: finished(found)))

    def _agreed(self, statuses: dict[int, RankStatus]) -> None:
        assert self.task is not None
        members = self.members
        whole = {WHOLE.name: 1} if not self.run.setup.partitioned else {f"p{n}": 1 for n in range(PIECES)}
        try:
            plan = agree([statuses[key] for key in members], whole)
        except StateLost as lost:
            self.fail(0, str(lost))
            return
        for piece, rank in plan.sources.items():
            giver = self.run.devices[members[rank]]
            here = giver.alive and giver.working and giver.task and giver.task.taken == self.task.taken
            if here and piece not in giver.live.get(plan.step, ()):
                raise Violation(f"device {giver.number} was to provide {piece} of step {plan.step}")
        rank = members.index(self.number)
        if not self.run.setup.partitioned and plan.done[rank] == NO_STATE:
            self.live, self.done = {}, NO_STATE  # it is overwritten from now on
        self._operate("restore", None, lambda _: self._restored(plan))

    def _restored(self, plan: RecoveryPlan) -> None:
        if not self.run.setup.partitioned:
            self._hold(plan.step, self.members)
            self._resume(plan)
            return
        mine = self._pieces(self.members)[0]
        self.live.setdefault(plan.step, set()).update(mine)
        self._operate("keep", None, lambda _: self._kept(plan))

    def _kept(self, plan: RecoveryPlan) -> None:
        for pieces in self._pieces(self.members):
            self.live.setdefault(plan.step, set()).update(pieces)
        self._operate("meet", None, lambda _: self._met(plan))

    def _met(self, plan: RecoveryPlan) -> None:
        self._hold(plan.step, self.members)
        self._resume(plan)

    def _resume(self, plan: RecoveryPlan) -> None:
        self.done, self.survived, self.reshard_count = plan.step, True, plan.reshard_count
        assert self.task is not None
        if self.members[0] == self.number:
            self.tell("recovered", generation=self.task.taken)
        self._train()

    def _pieces(self, members: tuple[int, ...]) -> tuple[set[SliceSpec], set[SliceSpec]]:
        """Its own pieces of the state in this cut, and those that it keeps a replica of."""
        cut = [[SliceSpec(f"p{n}", 0, 1, 1) for n in part] for part in split_evenly(PIECES, len(members))]
        rank = members.index(self.number)
        kept_by = replica_holders(len(members))
        replicas = {one for owner in range(len(members)) if kept_by[owner] == rank for one in cut[owner]}
        return set(cut[rank]), replicas

    def _hold(self, done: int, members: tuple[int, ...]) -> None:
        """All that it can provide is the state after this step."""
        if self.run.setup.partitioned:
            own, replicas = self._pieces(members)
            self.live = {done: own | replicas}
            if self.run.setup.arenas:  # copies of its own part after the last two steps
                kept = sorted(self.arena)[-1:]
                self.arena = {step: self.arena[step] for step in kept if step != done} | {done: own}
        else:
            self.live = {done: {WHOLE}}
            if self.run.setup.arenas:
                self.arena = {done: {WHOLE}}

    # ---- training

    def _train(self) -> None:
        assert self.task is not None
        if self.done >= STEPS:
            self._operate("end", None, lambda _: self._end("ended"))
            return
        fence = self.fence
        wait = self.run.random.uniform(0.5, 1.5) * STEP_S
        self.do(wait, lambda: self._sum() if fence == self.fence and self.working else None)

    def _sum(self) -> None:
        assert self.task is not None
        self._operate(f"sum{self.done}", self.task.move, self._summed)

    def _summed(self, moves: dict[int, bool]) -> None:
        members = self.members
        if self.run.setup.partitioned:
            for pieces in self._pieces(members):
                self.live.setdefault(self.done + 1, set()).update(pieces)
            self._operate(f"meet{self.done}", None, lambda _: self._committed(members, False))
        else:
            self._committed(members, any(moves.values()))

    @property
    def members(self) -> tuple[int, ...]:
        """Of the generation it is in."""
        assert self.task is not None
        return self.run.generations[self.task.taken]

    def _committed(self, members: tuple[int, ...], moves: bool) -> None:
        assert self.task is not None
        self.done += 1
        self._hold(self.done, members)
        self.fresh_start = False
        if moves:
            self.working = False  # its links stay open until all have moved
            self.fence += 1
            self.run.left(self)
            self.look()
            return
        self._train()


class Run:
    """One job with one schedule."""

    def __init__(self, setup: Setup, chance: random.Random) -> None:
        self.setup, self.random = setup, chance
        self.now, self._count = 100.0, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self.start = self.now
        self.cuts: set[tuple[int, int]] = set()
        self.held: dict[tuple[int, int], list[Callable[[], None]]] = {}
        """Messages of a direction that is cut: TCP sends them again when it is not any more."""
        self.clear_at: dict[tuple[int, int], float] = {}
        self.operations: dict[tuple[int, str], Operation] = {}
        self.generations: dict[int, tuple[int, ...]] = {}
        self.processes: dict[tuple[int, int], str] = {}
        """By generation and device: the incarnation that was assigned a rank in it."""
        self.outcome = ""
        self.last_step_done = False
        """A task came to the end of the training, after its last step; its device may have died since."""
        self.journal: list[Any] = []
        self.paused = False
        self.life = 0
        """Of the coordinator; 0 while it is away."""
        self._lives = 0
        self._held_calls: list[Callable[[], None]] = []
        self.state = State(CONFIG, last_tick=self.now)
        self.job: jm.JobView | None = None
        self.devices: dict[int, Device] = {}
        self._heard: dict[str, int] = {}
        self._events: list[jm.JobMembershipEvent] = []
        self._busy = False
        for number in range(1, setup.devices + 1):
            self.devices[number] = Device(self, number, None)
            self._apply(m.Joined(self.devices[number].describe(), self.now))
            self.devices[number].member = True
            self.devices[number].do(self.random.uniform(0, CONFIG.heartbeat_s), self.devices[number].beat)
        self._coordinator_starts()
        self._begin()
        for fault in setup.faults:
            self.at(fault.at, partial(self._strike, fault))
        self.quiet_at = self.start + max((one.at + max(one.seconds, 0) for one in setup.faults), default=0.0)

    # ---- time and messages

    def next_number(self) -> int:
        self._count += 1
        return self._count

    def at(self, after: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + after, self.next_number(), what))

    def until_over(self) -> str:
        while not self.outcome:
            if not self._queue:
                raise Violation("nothing happens any more, and the job is not over")
            self.now, _, what = heapq.heappop(self._queue)
            if self.now > self.quiet_at + BOUND_S:
                raise Violation(f"the job is not over {BOUND_S:g} s after the last fault: {self._describe()}")
            what()
        return self.outcome

    def _describe(self) -> str:
        tasks = {key: (one.task, one.done, one.working) for key, one in self.devices.items()}
        return f"{self.job}; {tasks}; {self.state.communicators}; {self.state.members}"

    def send(self, source: int, target: int, what: Callable[[], None]) -> None:
        """A message from one process to another (0 is the coordinator): in order, each direction by itself."""
        way = source, target
        if way in self.cuts:
            self.held.setdefault(way, []).append(what)
            return
        due = max(self.clear_at.get(way, 0.0), self.now + self.random.uniform(0, self.setup.slow))
        self.clear_at[way] = due
        self.at(due - self.now, what)

    def cut(self, ways: Sequence[tuple[int, int]], seconds: float) -> None:
        self.cuts |= set(ways)
        if seconds >= 0:
            self.at(seconds, lambda: self._heal(ways))

    def _heal(self, ways: Sequence[tuple[int, int]]) -> None:
        self.cuts -= set(ways)
        for way in ways:
            held = self.held.pop(way, [])
            self.at(self.random.uniform(0, 1.0), partial(self._send_held, way, held))

    def _send_held(self, way: tuple[int, int], held: list[Callable[[], None]]) -> None:
        for one in held:
            self.send(*way, one)

    # ---- collective operations

    def enter(self, device: Device, name: str, payload: Any, then: Callable[[dict[int, Any] | None], None]) -> None:
        assert device.task is not None
        generation = device.task.taken
        members = self.generations[generation]
        one = self.operations.setdefault((generation, name), Operation(members))
        one.entered[device.number] = payload
        if one.failed:
            self.at(self.random.uniform(0, 0.05), lambda: then(None))
            return
        one.waiting[device.number] = then
        gone = [key for key in members if self._left(key, generation) and key not in one.entered]
        if gone:
            self._fail(one, gone[0])
        elif set(one.entered) == set(members):
            self._complete(one)

    def _left(self, number: int, generation: int) -> bool:
        """Whether a member is not in a generation any more, and its peers can notice it."""
        device = self.devices[number]
        if device.incarnation != self.processes[generation, number]:
            return True  # it was killed; this is the process that was started after it
        if not device.alive or device.task is None or device.ended or device.task.taken > generation:
            return True
        return device.task.taken == generation and not device.working

    def _reaches(self, first: int, second: int) -> bool:
        return (first, second) not in self.cuts and (second, first) not in self.cuts

    def _complete(self, one: Operation) -> None:
        """Everybody has entered. It comes to each by itself; over a link that is cut, not at all."""
        pairs = [(a, b) for a in one.members for b in one.members if a < b and not self._reaches(a, b)]
        stuck = {key for pair in pairs for key in pair}

        def arrive(then: Callable[[dict[int, Any] | None], None]) -> None:
            then(dict(one.entered))

        for number, then in list(one.waiting.items()):
            if number in stuck:
                self._stall(one, number)
                continue
            del one.waiting[number]
            self.at(self.random.uniform(0, 0.1), partial(arrive, then))

    def _stall(self, one: Operation, number: int) -> None:
        """No byte comes: after a third of a lease the coordinator is told for whom it waits."""
        peer = next((key for key in one.members if key != number and not self._reaches(number, key)), 0)
        device = self.devices[number]
        fence = device.fence

        def complain() -> None:
            if fence != device.fence or number not in one.waiting:
                return
            if peer and not self._reaches(number, peer):
                generation = device.task.taken if device.task else 0
                self.send(number, 0, lambda: self._complained(generation, number, peer))
                device.do(0.5, complain)
            elif set(one.entered) == set(one.members):
                self._complete(one)

        device.do(0.5, complain)

    def _fail(self, one: Operation, gone: int) -> None:
        one.failed = True
        waiting, one.waiting = one.waiting, {}
        for number, then in waiting.items():
            if self._reaches(number, gone):
                self.at(self.random.uniform(0, 0.1), partial(then, None))
            else:
                one.waiting[number] = then  # it does not notice: somebody has to tell it

    def left(self, device: Device) -> None:
        """A device left the links of its generation: operations that wait for it fail."""
        for (generation, _), one in list(self.operations.items()):
            if device.number in one.members and one.waiting and self._left(device.number, generation):
                if device.number not in one.entered or self.random.random() < 0.5:
                    one.waiting.pop(device.number, None)
                    self._fail(one, device.number)
                else:
                    one.waiting.pop(device.number, None)

    # ---- the coordinator

    def _coordinator_starts(self) -> None:
        self._lives += 1
        self.life = self._lives
        self._tick(self.life)

    def here(self, after: float, what: Callable[[], None]) -> None:
        """On the coordinator's process, in this life of it."""
        life = self.life

        def now() -> None:
            if self.life == life:
                self._held_calls.append(what) if self.paused else what()

        self.at(after, now)

    def _tick(self, life: int) -> None:
        self.here(0.25, lambda: self._tick(life))
        self._apply(m.Tick(self.now))

    def _apply(self, message: m.MembershipEvent) -> None:
        try:
            self.state, instructions = step(self.state, message)
        except HoopError:
            return
        self.journal += [one.entry for one in instructions if isinstance(one, m.Record)]
        arrived = []
        for one in instructions:
            match one:
                case m.Probe(device_id):
                    self._probe(device_id)
                case m.Stop():
                    for number in one.members:
                        self._abort(number, one.generation)
                case m.Announce("device_joined" | "device_forgiven"):
                    arrived.append(int(str(one.fields["device"])))
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
            self.send(0, number, lambda: device.do(0.0, lambda: device.abort(generation)))

    def _probe(self, number: int) -> None:
        device, info = self.devices[number], self.state.members[number].info
        if not device.alive and self._reaches(0, number):
            self.here(0.02, lambda: self._apply(m.Probed(number, info.incarnation, "refused")))

    def coordinator_hears(self, device: Device) -> None:
        def heard() -> None:
            known = True
            try:
                self.state, _ = step(self.state, m.Heartbeat(device.number, device.incarnation, self.now))
            except MembershipChanged:
                known = False
            self.send(0, device.number, lambda: device.do(0.0, lambda: device.answered(known)))

        if self.life:
            self.here(0.0, heard)

    def coordinator_joins(self, device: Device) -> None:
        def joined() -> None:
            self._apply(m.Joined(device.describe(), self.now))
            known = self.state.members[device.number].info.incarnation == device.incarnation
            self.send(0, device.number, lambda: device.do(0.0, lambda: device.answered(known)))

        if self.life:
            self.here(0.0, joined)

    def call(self, number: int, what: Callable[[Device], bool], then: Callable[[bool, bool], None]) -> None:
        """A call to a device; ``then`` gets whether it answered, and what. Unanswered it fails after ``CALL_S``."""
        state = [False]
        incarnation = self.state.members[number].info.incarnation

        life = self.life

        def done(answered: bool, ok: bool) -> None:
            if not state[0] and self.life == life:  # the answer to a call goes with the coordinator that made it
                state[0] = True
                self._apply(m.CallReported(number, "" if answered else "no answer", self.now))
                then(answered, ok)

        def arrived() -> None:
            device = self.devices[number]
            if not device.alive or device.incarnation != incarnation:
                self.send(number, 0, lambda: self.here(0.0, lambda: done(False, False)))
                return

            def work() -> None:
                ok = what(device)
                self.send(number, 0, lambda: self.here(0.0, lambda: done(True, ok)))

            device.do(0.0, work)

        if not self.state.members[number].usable:
            self.here(0.0, lambda: then(False, False))
            return
        self.send(0, number, arrived)
        self.here(CALL_S, lambda: done(False, False))

    # ---- the job

    def _begin(self) -> None:
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
        return jm.JobView(JOB, planned=planned, restart_grace_s=GRACE_S, participants=frozenset(participants))

    def _handle(self, event: jm.JobMembershipEvent) -> None:
        self._events.append(event)
        if self._busy or self.job is None:
            return
        self._busy = True
        while self._events:
            self.job, instructions = jm.advance(self.job, self._events.pop(0), self.state, self.now)
            for one in instructions:
                self._perform(one)
        self._busy = False

    def _perform(self, one: jm.JobInstruction) -> None:
        def move(device: Device) -> bool:
            device.move()
            return True

        def release(device: Device, final: bool) -> bool:
            device.release(final)
            return True

        match one:
            case jm.Assign():
                self.here(0.0, lambda: self._assign(one))
            case jm.Move(members):
                for number in members:
                    self.call(number, move, lambda *_: None)
            case jm.Invite(device_id):
                self.here(0.0, lambda: self._invite(device_id))
            case jm.Release(device_id, final):
                self.call(device_id, partial(release, final=final), lambda *_: None)
            case jm.Readmit(device_id):
                self.here(0.0, lambda: self._apply(m.Readmitted(JOB, device_id)))
            case jm.End(_, text):
                self._over(text)
            case jm.Await():
                pass

    def _assign(self, assign: jm.Assign) -> None:
        before = self.state.communicator(JOB).generation
        self._apply(m.Rebuilt(JOB, assign.joining, assign.leaving, assign.planned))
        one = self.state.communicator(JOB)
        if one.generation == before:
            self._handle(jm.AssignFailed())
            return
        self._generation(one.generation, one.members)
        self._handle(jm.Assigned(one.generation, assign.planned))
        answers: list[bool] = []

        def answered(came: bool, ok: bool) -> None:
            answers.append(came and ok)
            if len(answers) == len(one.members):
                self._handle(jm.Delivered(one.generation, all(answers)))

        for number in one.members:
            self.call(number, lambda device: device.reseat(one.generation, one.members, assign.planned), answered)

    def _generation(self, generation: int, members: tuple[int, ...]) -> None:
        self.generations[generation] = members
        for number in members:
            self.processes[generation, number] = self.state.members[number].info.incarnation

    def _invite(self, number: int) -> None:
        incarnation = self.state.members[number].info.incarnation

        def start(device: Device) -> bool:
            device.start_task(0, (), joining=True)
            return True

        def answered(came: bool, ok: bool) -> None:
            if not came:
                self._handle(jm.InviteFailed(number, incarnation, refused=False))
            else:
                self._watch(self.devices[number])

        self.call(number, start, answered)

    def _complained(self, generation: int, number: int, peer: int) -> None:
        if self.life:
            self.here(0.0, lambda: self._apply(m.Complained(JOB, generation, number, peer, self.now)))

    # ---- what tasks tell

    def _watch(self, device: Device) -> None:
        self._heard.setdefault(device.incarnation, 0)
        self.told(device)
        self._look_after(device)

    def told(self, device: Device) -> None:
        life = self.life

        def came(place: int) -> None:
            if self.life != life:
                return
            heard = self._heard.get(device.incarnation)
            if heard is not None and self.job is not None and heard == place:
                self._heard[device.incarnation] = place + 1
                self._hear(device, *device.log[place])

        def arrive(place: int) -> None:
            if self.life:
                self.here(0.0, lambda: came(place))

        if self.life and device.incarnation in self._heard:
            for place in range(self._heard[device.incarnation], len(device.log)):
                self.send(device.number, 0, partial(arrive, place))

    def _look_after(self, device: Device) -> None:
        """A watch: it ends when the device is lost, and then the task is."""

        def look() -> None:
            member = self.state.members[device.number]
            if device.ended and self._heard.get(device.incarnation, 0) >= len(device.log):
                return
            if not member.usable or member.info.incarnation != device.incarnation:
                self._heard.pop(device.incarnation, None)
                self._handle(jm.TaskLost(device.number, device.incarnation))
                return
            self.told(device)
            self.here(self.random.uniform(0.1, 1.0), look)

        self.here(self.random.uniform(0.1, 1.0), look)

    def _hear(self, device: Device, kind: str, about: dict[str, Any]) -> None:
        task = device.number, device.incarnation
        assert self.job is not None
        ranked = device.number in jm.active(self.job, self.state)
        match kind:
            case "ready":
                if not ranked:
                    self._handle(jm.TaskReady(*task))
            case "waiting":
                self._handle(
                    jm.TaskWaiting(*task, about["generation"], about["lacks"], "PeerLost" if about["lacks"] else "")
                )
            case "recovered":
                self._apply(m.LinkWorked(JOB, about["generation"]))
                self._handle(jm.TaskResumed(about["generation"]))
            case "ended":
                self._handle(jm.TaskFinished(*task, finished=True))
            case "left":
                self._handle(jm.TaskFinished(*task))

    def _over(self, text: str) -> None:
        assert self.job is not None
        self.outcome = "finished" if self.job.finished else "lost" if text or not self.job.abandoned else "left"
        if self.outcome == "finished":
            if not self.last_step_done:
                raise Violation("a job finished, and no device has done its last step")
            return
        if self.outcome == "left":
            return
        whole = {WHOLE.name: 1} if not self.setup.partitioned else {f"p{n}": 1 for n in range(PIECES)}
        held: dict[int, set[SliceSpec]] = {}
        for device in self.devices.values():
            for done, pieces in device.held().items():
                held.setdefault(done, set()).update(pieces)
        for done, pieces in held.items():
            if {one.name for one in pieces} >= set(whole):
                raise Violation(f"a job was declared lost ({text}), and step {done} is whole: {self._describe()}")
        begins = [one for one in self.devices.values() if one.alive and one.fresh_start and one.done == 0]
        if begins and len(begins) == len([one for one in self.devices.values() if one.alive]):
            raise Violation("a job that had only begun was declared lost")

    # ---- faults

    def _strike(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self._kill(self.devices[fault.device], fault.seconds)
            case "pause":
                device = self.devices[fault.device]
                device.paused = True
                self.at(max(fault.seconds, 0.1), device.carry_on)
            case "cut":
                others = [0, *(key for key in self.devices if key != fault.device)]
                ways = [way for one in others for way in ((one, fault.device), (fault.device, one))]
                self.cut(ways, max(fault.seconds, 0.1))
            case "link":
                self.cut([(fault.device, fault.peer)], max(fault.seconds, 0.1))
            case "mute":
                self.cut([(fault.device, 0)], max(fault.seconds, 0.1))
            case "deaf":
                self.cut([(0, fault.device)], max(fault.seconds, 0.1))
            case "leave":
                if self.life:
                    self.here(0.0, lambda: self._handle(jm.LeaveRequested(fault.device)))
            case "join":
                number = max(self.devices) + 1
                self._arrive(Device(self, number, None))
            case "coordinator_kill":
                self.life, self.paused, self._held_calls = 0, False, []
                self.at(max(fault.seconds, 0.1), self._restart)
            case "coordinator_pause":
                if self.life:
                    self.paused = True
                    self.at(max(fault.seconds, 0.1), self._unpause)
            case "coordinator_cut":
                ways = [way for key in self.devices for way in ((0, key), (key, 0))]
                self.cut(ways, max(fault.seconds, 0.1))

    def _kill(self, device: Device, seconds: float) -> None:
        if not device.alive:
            return
        device.kill()
        if self.life and self._reaches(device.number, 0):  # its heartbeat stream closes
            self.here(0.02, lambda: self._apply(m.LinkClosed(device.number, device.incarnation)))
        if seconds >= 0 and self.setup.arenas:
            self.at(seconds, lambda: self._arrive(Device(self, device.number, device.arena)))

    def _arrive(self, device: Device) -> None:
        self.devices[device.number] = device
        device.beat()

    def _unpause(self) -> None:
        self.paused = False
        held, self._held_calls = self._held_calls, []
        for what in held:
            self.here(0.0, what)

    def _restart(self) -> None:
        """The coordinator, on its journal: it asks the devices what they run."""
        if self.life:
            return
        self.state = replay(self.journal, CONFIG, self.now)
        self._heard, self._events, self._busy = {}, [], False
        known = self.state.jobs[JOB]
        if known.ended:
            return
        self.job = self._view(known.devices)
        self._coordinator_starts()
        one = self.state.communicator(JOB)
        usable = [key for key, member in self.state.members.items() if member.usable]
        left = [len(usable)]

        def found(number: int, came: bool, ok: bool) -> None:
            device = self.devices[number]
            incarnation = self.state.members[number].info.incarnation
            generation: int | None = one.generation if number in one.members else None
            if came and device.incarnation == incarnation:
                has = device.task is not None and not device.ended
                generation = device.task.generation if has and device.task is not None else None
                if device.ended and number in one.members:  # what it told is heard first
                    self._heard[device.incarnation] = len(device.log)
                    for entry in device.log:
                        self._hear(device, *entry)
            if generation is not None:
                if device.incarnation == incarnation:
                    self._watch(device)
                self._handle(jm.TaskFound(number, incarnation, generation))
            left[0] -= 1
            if not left[0]:
                self._handle(jm.TasksListed())

        for number in usable:
            self.call(number, lambda device: True, partial(found, number))
        if not usable:
            self._handle(jm.TasksListed())


KINDS = (
    "kill",
    "kill",
    "pause",
    "cut",
    "link",
    "mute",
    "deaf",
    "leave",
    "join",
    "coordinator_kill",
    "coordinator_pause",
    "coordinator_cut",
)


def generated(chance: random.Random) -> Setup:
    """A setup with up to three faults, or groups of them, all of which come right within a grace."""
    devices, partitioned = chance.randint(2, 5), chance.random() < 0.5
    faults: list[Fault] = []
    for _ in range(chance.randint(1, 3)):
        device = chance.randint(1, devices)
        peer = chance.choice([one for one in range(1, devices + 1) if one != device])
        seconds = chance.choice([0.1, 0.5, 1.0, 2.0, 4.4, 8.0])
        if chance.random() < 0.15:  # all devices, one after the other
            faults += [Fault(chance.uniform(0, 2.5), "kill", one, 0, seconds) for one in range(1, devices + 1)]
        else:
            faults.append(Fault(chance.uniform(0, 2.5), chance.choice(KINDS), device, peer, seconds))
    ordered = tuple(sorted(faults, key=lambda one: one.at))
    return Setup(devices, partitioned, chance.random() < 0.8, ordered, chance.choice([0.01, 0.3, 1.0]))


def explored(seed: int) -> str:
    """The outcome of the schedule with this number."""
    return Run(generated(random.Random(seed)), random.Random(seed)).until_over()


def shrunk(setup: Setup, seed: int) -> Setup:
    """The same setup with as few faults as still break an invariant, for the same run of chance."""
    for fault in setup.faults:
        fewer = replace(setup, faults=tuple(one for one in setup.faults if one is not fault))
        if breaks(fewer, seed):
            return shrunk(fewer, seed)
    return setup


def breaks(setup: Setup, seed: int) -> str:
    """The invariant that does not hold; empty: all do."""
    try:
        Run(setup, random.Random(seed)).until_over()
    except Violation as violation:
        return str(violation)
    return ""
