"""What a rank that holds a part of the model does so that the run survives the loss of a device, and goes on after it.

    steps     ── keep, commit ──▶ mirrors: the state at another rank, which is a step further when all have met
    a loss    ── cut_anew: what is whole is set aside, the model is cut for those who are left, the state travels
    all there ── let_go: what was set aside is not needed any more

Until then it is: a second loss in the middle of it finds everything as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from hoop.collectives.object_collectives import any_rank
from hoop.data.dataset import Splits
from hoop.engine.fault_tolerance.local_persistence import StepLog
from hoop.engine.fault_tolerance.recovery import agree_on_recovery, collect
from hoop.engine.fault_tolerance.replication import DoubleBufferedState, Replicator, follows
from hoop.engine.fault_tolerance.state_slices import StateShard, part_of, whole_state
from hoop.engine.job import Job
from hoop.engine.rank_context import RankContext
from hoop.engine.settings import Settings
from hoop.engine.setup import TrainingSetup, prepare
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.state import StateVectors
from hoop.memory.commit_record import NO_STEP
from hoop.plan.recovery import NO_STATE, RankStatus, RecoveryPlan


class ShardedStateManager:
    """One rank's copies, and its way to another part of the model."""

    def __init__(
        self,
        settings: Settings,
        job: Job,
        data: Splits,
        vectors: StateVectors,
        evidence: Provenance,
        left: Sequence[StateShard] = (),
    ) -> None:
        """``left``: what a device that was restarted found in its arena."""
        self._settings, self._job, self._data, self._evidence = settings, job, data, evidence
        self._ready: TrainingSetup | None = None
        self._vectors = [vectors]
        self._beside = vectors.beside("beside.")
        self._diary: StepLog | None = None
        self._mirrors: Replicator | None = None
        self._own: DoubleBufferedState | None = None
        self._live = self._next = NO_STEP
        """The step that what is held is of, and the one that it will be of once all have met."""
        self._aside = list(left)
        self._begins, self._new, self._left_out, self._turn = False, True, False, 0

    @property
    def turn(self) -> int:
        """How often the model was cut anew; the same at every rank."""
        return self._turn

    def begin(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """The run begins: with a checkpoint's tensors, after its step; or, where there are none, as models are made."""
        self._begins, self._new = not tensors, False
        if tensors:
            self._aside = [part_of(tensors, step)]

    def hold(self, ready: TrainingSetup, step: int) -> None:
        """What this rank holds, as it is after so many steps."""
        self._ready, self._live = ready, step

    def keep(self, world: RankContext) -> None:
        """Before steps: what is held is held elsewhere too; every rank must call it."""
        if not self._settings.mirror or world.reseated is None:
            return  # nobody wants it, or nobody could go on with it
        ready = self._ready
        assert ready is not None, "there is a state to be kept"
        if self._mirrors is None:
            self._mirrors = Replicator(world, self._vectors[-1], ready.role, ready.model, self._settings)
            self._mirrors.keep(self._live, 0.0)
            ready.worker.owed.puts_off = follows(ready.role)
            if world.outlives:
                self._own = DoubleBufferedState(self._vectors[-1], ready.role, ready.model)
                self._own.take(self._live)

    def begin_steps(self) -> None:
        """What is held changes from now on, unless that is put off."""
        if self._mirrors is not None and self._ready is not None and not follows(self._ready.role):
            self._mirrors.set_aside(self._live)
            self._live = NO_STEP

    def commit(
        self, world: RankContext, stop: bool, done: int, steps: int, losses: Sequence[float] | None
    ) -> tuple[bool, list[float]]:
        """After so many steps: mirrors get what these did, all ranks meet, and then it is done; returns as ``meet``."""
        ready = self._ready
        assert ready is not None, "there were steps"
        if follows(ready.role):
            self._next = done
        else:
            self._live = done
        if self._mirrors is not None:
            self._mirrors.keep(done, ready.worker.rate)
        met = self.meet(world, stop, done, steps, losses)
        ready.worker.owed.settle()
        self._live, self._next = done, NO_STEP
        if world.outlives and met[1]:
            self._diary = self._diary or StepLog(self._beside, self._evidence)
            self._diary.note(done, met[1])
        if self._own is not None:
            self._own.take(done)
        if self._mirrors is not None:
            ready.worker.post.meanwhile = self._mirrors.go_on
        self.let_go()
        return met

    def meet(
        self, world: RankContext, stop: bool, done: int, steps: int = 0, losses: Sequence[float] | None = None
    ) -> tuple[bool, list[float]]:
        """All ranks: whether anybody wants to stop, and what one knew of the last steps (``losses``) all know then."""
        evidence = self._evidence
        told = np.zeros((steps, 1 + evidence.places))
        if losses is not None:
            told[: len(losses), 0], told[:, 1:] = losses, evidence.rows(done - steps, steps)
        stops = any_rank(world.communicator, stop, told, self._settings.timeout_s)
        evidence.adopt(done - steps, told[:, 1:])
        return stops, told[:, 0].tolist()

    def cut_anew(
        self, world: RankContext, done: int, ended: int, stopped: bool
    ) -> tuple[TrainingSetup, RecoveryPlan]:
        """The part of the model that is this rank's now, with the newest state that can be had."""
        settings, timeout = self._settings, self._settings.timeout_s
        self._make_room()
        self._vectors.append(self._vectors[0].beside(f"cut{len(self._vectors)}."))
        ready = prepare(world, settings, self._job, self._data, self._vectors[-1], anew=True)
        parts = [(one.step, one.pieces) for one in self._aside]
        if self._new:
            # Later than any before, should nobody remember which: there was one a generation at most.
            self._turn = world.communicator.endpoint.generation
        self._left_out = self._left_out or world.left_out
        if self._new:  # all that an arena or a checkpoint holds was done by all ranks
            done = max((one.step for one in self._aside), default=NO_STATE)
        mine = RankStatus(
            world.device,
            done,
            ended,
            stays=not self._new and not self._left_out,
            offers=parts,
            stopped=stopped,
            turn=self._turn,
            begins=self._begins,
        )
        whole = whole_state(ready.model, settings.optimizer.slots)
        plan = agree_on_recovery(world.communicator, mine, whole, timeout)
        if plan.sources:
            wanted = ready.role.wanted(ready.model)
            found, whence = collect(world.communicator, plan, self._aside, wanted, timeout)
            ready.role.restore(ready.model, found, plan.step)
            plan = replace(plan, source="" if mine.stays else whence)
        if self._ready is not None:
            ready.worker.clock.add(self._ready.worker.clock)
            ready.worker.sent = self._ready.worker.bytes_sent
        self.hold(ready, plan.step)
        return ready, plan

    def _make_room(self) -> None:
        """What is whole goes out of the arena, as it is and as it may be: who was lost may have said that it is."""
        ready = self._ready
        if ready is not None and self._live != NO_STEP:
            self._aside.append(StateShard.of(ready.role.state(ready.model), self._live))
        if ready is not None and self._next != NO_STEP:
            ready.worker.owed.settle()
            self._aside.append(StateShard.of(ready.role.state(ready.model), self._next))
        self._live = self._next = NO_STEP
        if self._mirrors is not None:
            self._aside += self._mirrors.apart()
            self._mirrors = self._own = None
        if ready is not None:
            ready.worker.close()
        for vectors in self._vectors:
            # One who was thought dead may still write to where totals went.
            vectors.free(but="total")

    def go_on(self, plan: RecoveryPlan) -> None:
        """Every rank has kept what it has now."""
        self._new, self._left_out, self._turn = False, False, plan.turn
        self.let_go()

    def let_go(self) -> None:
        self._aside = []

    def close(self) -> None:
        for vectors in [*self._vectors, self._beside]:
            vectors.free()
