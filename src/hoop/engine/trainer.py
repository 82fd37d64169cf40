"""What a rank's part in a job took: told once, at the end.

The way through the data: which steps there are, what each of them is made of, and where an epoch ends.

What a rank tells that comes where others are at work, or where all have to begin again.

A job on one rank, from the first step to the last.

    (1) prepare   the model, the data, the cut; all ranks compare what they hold
    (2) steps     each epoch's samples in their order; shards move to faster devices
    (3) epochs    evaluation, a snapshot in the arena that a client may read
    (4) the end   what it took

What is worth telling goes to ``emit``, as plain values; nothing here knows who listens.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

from hoop.data.dataset import Splits, described, fingerprint
from hoop.data.sampler import SampleOrder
from hoop.engine.data_feed import Position
from hoop.engine.evaluation import evaluate
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.checkpoint import SnapshotPublisher, unpacked
from hoop.engine.fault_tolerance.local_persistence import InPlaceState, load_from_arena, remembered
from hoop.engine.fault_tolerance.manager import ShardedStateManager
from hoop.engine.fault_tolerance.recovery import RECOVERABLE, level, rest_of_step
from hoop.engine.job import Job
from hoop.engine.load_balancer import load_balancer_for
from hoop.engine.loss_reduction import with_criterion
from hoop.engine.progress_reporter import Emit, Evaluation, ProgressReporter
from hoop.engine.rank_context import RankContext, alone, settle
from hoop.engine.roles.base import StepWork
from hoop.engine.settings import Settings
from hoop.engine.setup import TrainingSetup, prepare
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.state import LOSS, MOVE, SAMPLES, STOP, StateVectors
from hoop.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HoopError,
    InternalError,
    PeerError,
    PeerLost,
    UserError,
)
from hoop.plan.faults import check_reachable
from hoop.plan.recovery import NO_STATE, WHOLE, RankStatus, StateLost
from hoop.strategies.catalog import parse


def account(worker: PlanExecutor, seconds: float, done: int, stopped: bool) -> dict[str, Any]:
    """Time by kind of work, bytes, memory, and the first steps' instructions, each with its place in time."""
    return {
        "kind": "account",
        "rank": worker.rank,
        "seconds": seconds,
        "shares": worker.clock.seconds,
        "instructions": worker.clock.instructions,
        "bytes_sent": worker.bytes_sent,
        "memory": worker.world.arena.used,
        "spans": worker.clock.spans,
        "done": done,
        "stopped": stopped,
    }


def check_faults(settings: Settings, devices: int, samples: int, linked: bool = True) -> None:
    """Raises if a placed fault can never happen in a job that begins with this many devices and samples."""
    if faults := settings.placed:
        plan = parse(settings.strategy).plan(devices, settings.micros)
        check_reachable(faults, plan, StepSchedule(settings, samples).limit, linked)


class StepSchedule:
    """All steps of a run."""

    def __init__(self, settings: Settings, samples: int) -> None:
        self._settings = settings
        self._order = SampleOrder(settings.seed, samples)
        self.samples = samples
        self.per_epoch = self._order.steps(settings.batch_size)
        self._steps = settings.epochs * self.per_epoch
        self.limit = min(self._steps, settings.max_steps or self._steps)

    @property
    def told(self) -> dict[str, int]:
        """For whoever follows the run."""
        return {"steps": self.limit, "steps_an_epoch": self.per_epoch, "samples": self.samples}

    def rate(self, done: int) -> float:
        """The learning rate of the step after so many."""
        return self._settings.optimizer.rate(done, self._steps)

    def next(self, done: int, stride: int) -> list[StepWork]:
        """The steps until ranks meet again: never across an epoch, and at the same places whenever it is resumed."""
        epoch, step = divmod(done, self.per_epoch)
        end = min((step // stride + 1) * stride, self.per_epoch, step + self.limit - done)
        found = []
        for one in range(step, end):
            number = done + one - step
            samples = self._order.indices(epoch, one, self._settings.batch_size)
            found.append(StepWork(Position(epoch, one, number), samples, self.rate(number)))
        return found

    def ends(self, done: int) -> bool:
        """Whether an epoch is over, or all of it."""
        return done % self.per_epoch == 0 or done == self.limit

    def ended(self, done: int) -> int:
        """The end of an epoch that was certainly dealt with, where it is known only that so many steps are done."""
        return max(0, (done - 1) // self.per_epoch * self.per_epoch)

    def epoch(self, done: int) -> int:
        """Which one ends here, counted from 1."""
        return -(-done // self.per_epoch)


MEET_S = 30.0


class LateJoin:
    """A rank's coming: it is ready, it has a state from somewhere, and from then on it is one that stays."""

    def __init__(self, joins: bool, emit: Emit, world: RankContext, prefix: str) -> None:
        """``prefix``: of the names of the run's buffers in the arena."""
        self._emit, self._came = emit, joins
        self._rows = remembered(world.arena, prefix, world.run) if joins else {}
        self.left = load_from_arena(world.arena, prefix, world.run) if joins else []
        """What its arena held of the run, the newest first."""
        self.comes = joins
        """It has no state yet, or one that its arena held."""
        self.begins = not joins
        """Whether it is for this rank to tell how the run began: with it, or anew because nobody has stayed."""

    def ready(self, data: Splits, seconds: float) -> None:
        """It can take a seat; which data it has is compared with the others' before it gets one."""
        about = {"data": fingerprint(data), "about": described(data)}
        self._emit({"kind": "ready", "seconds": seconds, **about})

    def there(
        self, step: int, world: RankContext, source: str, afresh: bool, progress: ProgressReporter
    ) -> None:
        """Every rank is at this step and calls this; ``source``: where this rank has its state from, if it had lost it.

        ``afresh``: no rank has stayed. The rows of the last steps are handed over, from a rank that stayed or, if all
        were restarted, from an arena.
        """
        progress.recall(step, self._rows)
        progress.take_over(world.communicator, step, MEET_S)
        if source:
            self._emit({"kind": "state", "step": step, "device": world.device, "source": source})
        self.comes, self.begins, self._rows = False, self.begins or afresh, {}

    def start(self, told: dict[str, Any], data: Splits) -> None:
        """How the run begins, if nobody has told."""
        if self._came:
            told |= {"costs": None}  # it is predicted once
        if self.begins:
            self._emit({"kind": "started", **told, "data": data.train.checksum, "same": fingerprint(data)})


PATIENCE_S = 600.0
"""How long a rank keeps its state and waits for the coordinator to assign it another rank, or to end the job."""


class Trainer:
    """One rank's part in a job."""

    def __init__(
        self,
        world: RankContext,
        settings: Settings,
        job: Job,
        emit: Emit,
        stopping: Callable[[], bool],
        resume: bytes | None = None,
        prefix: str = "",
        joins: bool = False,
    ) -> None:
        """``joins``: others are at work already; see ``join``."""
        self._world, self._settings, self._emit, self._stopping = world, settings, emit, stopping
        self._started = time.perf_counter()
        settle(world, settings.threads_per_device, settings.pin)
        self._data = job.data()
        job = with_criterion(job, self._data.train, settings.seed)
        self._course = StepSchedule(settings, len(self._data.train))
        if not joins:
            check_faults(settings, world.size, len(self._data.train), world.linked)
        self._done = self._ended = self._begun_at = 0
        self._stopped = self._moving = self._leaves = False
        self._missing: list[int] = []
        self._arrival = LateJoin(joins, emit, world, prefix)
        self._keepsakes = SnapshotPublisher(world.arena, prefix, emit, world.run, joins)
        self._evidence = Provenance(settings.micros)
        self._progress = ProgressReporter(emit, self._evidence, self._data.evaluated)
        self._vectors = StateVectors(world.arena, prefix, world.run)
        replicas = parse(settings.strategy).name == "data"
        keeping = settings, job, self._data, self._vectors, self._evidence, self._arrival.left
        self._safe = None if replicas else ShardedStateManager(*keeping)
        self._loss: PeerError | None = None
        if joins and self._safe is not None:
            return  # there is nothing to get ready before it is known what this rank is to hold
        tensors, metadata = unpacked(resume) if resume is not None else ({}, {"steps": 0})
        self._done = self._ended = self._begun_at = int(metadata["steps"])
        if self._safe is not None:
            self._safe.begin(tensors, self._done)
        try:
            ready = prepare(world, settings, job, self._data, self._vectors)
        except PeerError as error:
            self._loss = error  # for ``go``, where it goes on like after any other
            if self._safe is not None:
                return
            self._vectors.free()  # each rank has all that it needs to begin with, whoever is left
            ready = prepare(alone(world), settings, job, self._data, self._vectors)
        self._take(ready)
        if tensors:
            self._role.restore(self._ready.model, tensors, self._done)
        if self._safe is not None:
            self._safe.hold(self._ready, self._done)
            return
        self._own = InPlaceState(
            self._ready, self._vectors, self._arrival.left, bool(tensors), world.outlives
        )
        self._done = self._own.take_up() if joins else self._own.whole(self._done)
        self._ended = self._course.ended(self._done) if joins else self._done

    def _take(self, ready: TrainingSetup) -> None:
        self._ready, self.worker, self._role = ready, ready.worker, ready.role
        self._role.testify(self._evidence)
        self._balance = load_balancer_for(
            ready.strategy, ready.plan, self._settings.balance, self._world.crowding
        )

    def go(self) -> None:
        """Trains until the epochs are over or somebody asks to stop."""
        self._tell_begin() if self._loss is None else self._recover(self._loss)
        began = time.perf_counter()
        while True:
            try:
                if self._owes() and not self._stopped:
                    self._end_of_epoch()
                if self._done >= self._course.limit or self._stopped:
                    self._end()
                    break
                self._advance()
            except RECOVERABLE as error:
                if self._leaves:
                    raise
                self._recover(error if isinstance(error, PeerError) else PeerLost(str(error)))
        self._emit(account(self.worker, time.perf_counter() - began, self._done, self._stopped))

    def _tell_begin(self) -> None:
        """By whoever tells the figures; again, if it may be that nobody has."""
        if self._role.reports and self._done - self._begun_at <= self._role.stride:
            told = {"done": self._begun_at, "seconds": time.perf_counter() - self._started}
            self._arrival.start({**told, **self._course.told, **self._ready.told}, self._data)

    def _advance(self) -> None:
        """The steps until ranks meet."""
        worker = self.worker
        if self._safe is not None:
            self._safe.keep(self._world)
            self._safe.begin_steps()
        worker.clock.tracing = self._done - self._begun_at < self._settings.trace_steps
        begun = time.perf_counter()
        works = self._course.next(self._done, self._role.stride)
        losses = self._role.advance(works, self._stopping())
        worker.rate = works[-1].rate
        done = self._done + len(works)
        if self._safe is not None:
            known = losses if self._role.reports else None
            met = self._safe.commit(self._world, self._stopping(), done, len(works), known)
            self._stopped, losses = met
        self._done = done
        self._after(losses, begun)
        if self._moving and not self._stopped:
            self._move()

    def _owes(self) -> bool:
        """Whether the end of an epoch has come, and not been dealt with."""
        return self._course.ends(self._done) and self._done > self._ended

    def join(self) -> None:
        """Goes in where others are at work already: says that it is ready, and takes the first seat there is."""
        self._arrival.ready(self._data, time.perf_counter() - self._started)
        self._recover(FailedPrecondition("no seat came for a device that was ready"))
        self._begun_at = self._done
        self.go()

    def _recover(self, error: HoopError) -> None:
        """Goes on at the generation that the coordinator assigns this rank to next.

        Nothing that goes wrong meanwhile ends this rank's part in the job: its state may be the only copy. It reports
        what the ranks lacked, and waits for the next generation; the coordinator decides whether the job is over.
        """
        began, world = time.perf_counter(), self._world
        lacks: HoopError | None = None
        while True:
            if world.reseated is None:
                raise error
            if self._safe is not None and not self._settings.mirror:
                raise self._keepsakes.over(f"{error}; mirror is off, and its part") from error
            try:
                world = world.reseated(PATIENCE_S, lacks)
            except DeadlineExceeded:
                raise lacks or error from None
            try:
                self._go_on(world) if self._safe is None else self._cut_anew(world, self._safe)
                break
            except StateLost as lost:
                lacks = self._keepsakes.over(f"with the devices that are gone {lost}")
            except RECOVERABLE as another:
                error, lacks = another, None
            except HoopError as refused:
                lacks = refused
            except Exception as bug:
                lacks = InternalError("".join(traceback.format_exception(bug)))
        self._tell_begin()
        self._told_of("recovered", began, str(error))

    def _move(self) -> None:
        """Goes on in another seat, with those who stay and those who join: nothing is lost, nobody waits for long."""
        began = time.perf_counter()
        self._tell(force=True)  # it may be another's business from now on
        assert self._world.moved is not None, "somebody asked to move"
        self._leaves = True
        world, self._leaves = self._world.moved(), False
        self._go_on(world, planned=True)
        self._told_of("moved", began, "")

    def _told_of(self, kind: str, began: float, text: str) -> None:
        if self._role.reports:
            told = {"kind": kind, "step": self._done, "pause_s": time.perf_counter() - began, "text": text}
            told |= {"missing": self._missing, "ranks": self._world.size}
            self._emit({**told, "generation": self._world.communicator.endpoint.generation})

    def _cut_anew(self, world: RankContext, safe: ShardedStateManager) -> None:
        """The last step of which everything is left, on the devices that are there now; see ``plan.recovery``."""
        self._world = world
        try:
            ready, plan = safe.cut_anew(world, self._done, self._ended, self._stopped)
        except UserError as error:
            raise FailedPrecondition(f"{error}; {self._keepsakes.remedy}") from None
        self._take(ready)
        self._done, self._ended, self._stopped = plan.step, plan.ended, plan.stopped
        self._arrival.there(self._done, world, plan.source, plan.restarted, self._progress)
        safe.keep(world)
        safe.meet(world, self._stopping(), self._done)
        safe.go_on(plan)

    def _lose(self) -> None:  # what this rank has, and remembers, is of long ago
        self._done = NO_STATE
        self._progress.forget()

    def _count_late(self) -> None:
        """A step that was finished by the way."""
        tail = self.worker.held[0].tail
        self._done += 1
        self._progress.add(self._done, [float(tail[LOSS]) / float(tail[SAMPLES])], 0.0)

    def _go_on(self, world: RankContext, planned: bool = False) -> None:
        """The same step, with the shards that were lost dealt out anew; see ``recovery``."""
        worker, settings, course = self.worker, self._settings, self._course
        worker.move(world)
        self._world = world
        if worker.updated > self._done > NO_STATE:  # the news came between an update and its being counted
            self._count_late()
        self._arrival.comes = self._arrival.comes or world.left_out
        mine = RankStatus(
            world.device,
            self._done,
            self._ended,
            stays=not self._arrival.comes,
            offers=[(self._done, [WHOLE])] if self._done > NO_STATE else [],
            computed=worker.computed,
        )
        plan = level(self._own, world, mine, course.rate, settings.timeout_s, self._lose)
        if world.rank in plan.behind:
            self._count_late()
        self._done, worker.computed = plan.step, list(plan.computed[world.rank])
        source = plan.source_of(world.rank)
        self._arrival.there(self._done, world, source, plan.restarted, self._progress)
        self._ended = plan.ended
        if not planned:
            worker.held[0].another_room()
        usual = self._ready.strategy.plan(world.size, settings.micros)
        worker.follow(usual)
        if self._owes():
            self._end_of_epoch()
        self._missing = plan.missing_shards(settings.micros)
        if any(plan.computed):
            rest, holdings, kept = rest_of_step(plan, settings.micros, len(worker.held[0].slots))
            worker.follow(rest, holdings)
            (work,) = course.next(self._done, self._role.stride)
            worker.rate = work.rate
            worker.step(work.position, work.samples, self._stopping(), kept[world.rank])
            self._count_late()
            worker.follow(usual)
        self._balance = load_balancer_for(self._ready.strategy, usual, settings.balance, world.crowding)

    def _after(self, losses: list[float], begun: float) -> None:
        """Figures of some steps that began then, and whether all ranks are to stop."""
        worker, hears = self.worker, self._role.hears
        last = worker.held.get(worker.last)
        if hears and last is not None and self._safe is None:
            self._stopped, self._moving = bool(last.tail[STOP] > 0), bool(last.tail[MOVE] > 0)
        if losses:
            self._progress.add(self._done, losses, time.perf_counter() - begun)
            self._tell()
        if hears and self._balance is not None and last is not None and not self._moving:
            plan = self._balance.after(last.tail)
            if plan is not None:
                worker.follow(plan)
            for told in self._balance.news(plan, self._done) if self._role.reports else ():
                self._emit(told)

    def _tell(self, force: bool = False) -> None:
        self._progress.report(self.worker.rate, self._role.reports, force)

    def _end_of_epoch(self) -> None:
        settings, epoch = self._settings, self._course.epoch(self._done)
        final = self._done == self._course.limit
        self._tell(force=True)
        self._role.refresh()
        if final or (settings.evaluate_every and epoch % settings.evaluate_every == 0):
            loss, accuracy = evaluate(self.worker, self._data.test)
            evaluation = Evaluation(self._done, epoch, loss, accuracy)
            self._progress.evaluated(evaluation, self.worker.rate, self._role.reports)
        if not final and settings.checkpoint_every and epoch % settings.checkpoint_every == 0:
            self._snapshot(final=False)
        self._ended = self._done

    def _end(self) -> None:
        """The last snapshot; all ranks meet once they have made it, for a loss before would take a part of it."""
        self._tell(force=True)
        self._role.refresh()
        self._snapshot(final=True)
        if self._safe is not None:
            self._safe.meet(self._world, False, self._done)

    def _snapshot(self, final: bool) -> None:
        role, turn = self._role, self._safe.turn if self._safe is not None else 0
        tensors = role.tensors(self._ready.model)
        self._keepsakes.add(tensors, self._done, self._course.per_epoch, final, role.parts, turn)

    def close(self) -> None:
        """Gives the arena's memory back, but for the last snapshots, which a client may still read."""
        self._vectors.free() if self._safe is None else self._safe.close()
