"""What a rank that holds a part of the model does so that the run survives the loss of a device, and goes on after it.

    steps     ── keep ──▶ mirrors: copies of the state, here and at a neighbour
    a loss    ── cut_anew: what is whole is set aside, the model is cut for those who are left, the state travels
    all there ── let_go: what was set aside is not needed any more

Until then it is: a second loss in the middle of it finds everything as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from hoop.data.dataset import Splits
from hoop.engine.job import Job
from hoop.engine.preparation import Ready, prepare
from hoop.engine.settings import Settings
from hoop.engine.stages.evidence import Evidence
from hoop.engine.stages.weights import Vectors
from hoop.engine.survival.diary import Diary
from hoop.engine.survival.mirrors import Mirrors
from hoop.engine.survival.parts import Part, part_of, whole_state
from hoop.engine.survival.recut import Agreed, Told, agree, collect
from hoop.engine.survival.word import vote
from hoop.engine.world import World


class Safekeeping:
    """One rank's copies, and its way to another part of the model."""

    def __init__(
        self, settings: Settings, job: Job, data: Splits, vectors: Vectors, left: Sequence[Part] = ()
    ) -> None:
        """``left``: what a device that was restarted found in its arena."""
        self._settings, self._job, self._data = settings, job, data
        self._ready: Ready | None = None
        self._vectors = [vectors]
        self._beside = vectors.beside("beside.")
        self._diary: Diary | None = None
        self._mirrors: Mirrors | None = None
        self._aside = list(left)
        self._begins, self._new, self._turn = False, True, 0

    @property
    def turn(self) -> int:
        """How often the model was cut anew; the same at every rank."""
        return self._turn

    def begin(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """The run begins: with a checkpoint's tensors, after its step; or, where there are none, as models are made."""
        self._begins, self._new = not tensors, False
        if tensors:
            self._aside = [part_of(tensors, step)]

    def hold(self, ready: Ready) -> None:
        """What this rank starts with, where nothing was lost before."""
        self._ready = ready

    def keep(self, world: World, step: int, losses: Sequence[float] = ()) -> None:
        """Copies of the state after so many steps, unless they are there; every rank must call it.

        ``losses``: of the last of these steps, where this rank knows them.
        """
        if not self._settings.mirror or world.reseated is None:
            return  # nobody wants it, or nobody could go on with it
        if self._mirrors is not None and self._mirrors.step == step:
            return
        ready = self._ready
        assert ready is not None, "there is a state to be kept"
        if losses:
            self._diary = self._diary or Diary(self._beside, ready.role.evidence)
            self._diary.note(step, losses)
        state = ready.role.state(ready.model)
        if self._mirrors is None:
            timeout = self._settings.timeout_s
            self._mirrors = Mirrors(world, self._vectors[-1], state, ready.role.travels, timeout)
        self._mirrors.keep(state, step)

    def meet(
        self,
        world: World,
        stop: bool,
        done: int,
        steps: int,
        losses: Sequence[float] | None,
        evidence: Evidence,
    ) -> tuple[bool, list[float]]:
        """All ranks: whether anybody wants to stop, and what one knew of the last steps (``losses``) all know then."""
        told = np.zeros((steps, 1 + evidence.places))
        if losses is not None:
            told[: len(losses), 0], told[:, 1:] = losses, evidence.rows(done - steps, steps)
        stops = vote(world.communicator, stop, told, self._settings.timeout_s)
        evidence.adopt(done - steps, told[:, 1:])
        return stops, told[:, 0].tolist()

    def cut_anew(self, world: World, ended: int, stopped: bool) -> tuple[Ready, Agreed]:
        """The part of the model that is this rank's now, with the newest state that can be had."""
        settings, timeout = self._settings, self._settings.timeout_s
        self._make_room()
        self._vectors.append(self._vectors[0].beside(f"cut{len(self._vectors)}."))
        ready = prepare(world, settings, self._job, self._data, self._vectors[-1], anew=True)
        parts = [(one.step, one.pieces) for one in self._aside]
        if self._new:
            # Later than any before, should nobody remember which: there was one a generation at most.
            self._turn = world.communicator.endpoint.generation
        mine = Told(ended, stopped, self._turn, self._begins, parts, self._new, world.device)
        whole = whole_state(ready.model, settings.optimizer.slots)
        agreed = agree(world.communicator, mine, whole, timeout)
        if agreed.sources:
            wanted = ready.role.wanted(ready.model)
            found, whence = collect(world.communicator, agreed, self._aside, wanted, timeout)
            ready.role.restore(ready.model, found, agreed.step)
            agreed = replace(agreed, source=whence if self._new else "")
        if self._ready is not None:
            ready.worker.clock.add(self._ready.worker.clock)
            ready.worker.sent = self._ready.worker.bytes_sent
        self._ready = ready
        return ready, agreed

    def _make_room(self) -> None:
        """Copies go out of the arena, and what was trained goes: it is of no step."""
        if self._mirrors is not None:
            self._aside += [one.apart() for one in self._mirrors.parts]
            self._mirrors = None
        if self._ready is not None:
            self._ready.worker.close()
        for vectors in self._vectors:
            # One who was thought dead may still write to where totals went.
            vectors.free(but="total")

    def go_on(self, agreed: Agreed) -> None:
        """Every rank has kept what it has now."""
        self._new, self._turn = False, agreed.turn
        self.let_go()

    def let_go(self) -> None:
        self._aside = []

    def close(self) -> None:
        for vectors in [*self._vectors, self._beside]:
            vectors.free()
