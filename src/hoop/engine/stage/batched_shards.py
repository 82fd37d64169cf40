"""Several shards of a device computed as one, where that makes no difference to a bit.

A small matrix product costs more a row than a large one, and every call costs something. So what a shard does not share
with others (its weights' gradient, its place in the sum) is done shard by shard, and the rest at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from hoop.collectives.registry import Operation
from hoop.engine.data_feed import DataFeed
from hoop.engine.profiler import InstructionProfiler, now
from hoop.engine.rank_context import RankContext
from hoop.engine.stage.autograd import CrossEntropy, figure
from hoop.engine.stage.linear_chain import ChainStage
from hoop.engine.stage.state import StageState
from hoop.memory.dtypes import dtype
from hoop.plan.instructions import Instruction, InstructionKind

MOST = 8
"""Shards that are computed at once at most."""
_WHOLE = [InstructionKind.LOAD, InstructionKind.FORWARD, InstructionKind.BACKWARD]


def batchable(world: RankContext, held: StageState | None, rows: int, timeout: float) -> int:
    """How many shards of so many samples all ranks may compute at once; every rank must ask."""
    stage = held.stage if held is not None else None
    found = MOST if held is None else stage.jointly(rows, MOST) if isinstance(stage, ChainStage) else 1
    agreed = np.array([found], np.int32)
    world.communicator.run(Operation("all_reduce", 1, dtype("int32"), "min"), agreed, agreed, timeout)
    return int(agreed[0])


def grouped(instructions: Sequence[Instruction], most: int) -> Iterator[list[Instruction]]:
    """Runs of whole shards (load, forward, backward of one, then of the next), and everything else by itself."""
    run: list[Instruction] = []
    index = 0
    while index < len(instructions):
        three = list(instructions[index : index + 3])
        whole = [one.kind for one in three] == _WHOLE and len({one.micro for one in three}) == 1
        follows = whole and (not run or three[0].micro == run[-1].micro + 1)
        if run and (not follows or len(run) >= 3 * most):
            yield run
            run = []
        if whole:
            run += three
            index += 3
        else:
            yield three[:1]
            index += 1
    if run:
        yield run


class BatchedShards:
    """Computes runs of shards on a stage that is the whole model."""

    def __init__(self, feed: DataFeed, held: StageState, clock: InstructionProfiler, rows: int) -> None:
        assert isinstance(held.stage, ChainStage), "only chains are computed jointly"
        self._feed, self._held, self._stage, self._clock, self._rows = feed, held, held.stage, clock, rows
        self._loss = CrossEntropy()

    def possible(self, run: Sequence[Instruction]) -> bool:
        """Whether the shards of this step are as large as was tried."""
        return len(run) > 3 and all(self._feed.rows(one.micro) == self._rows for one in run[::3])

    def __call__(
        self, run: Sequence[Instruction], spent: Callable[[float], None], after: Callable[[Instruction], None]
    ) -> None:
        """Load, forward, backward; ``spent`` is told since when it computed, ``after`` is called after each shard."""
        feed = self._feed
        micros = [one.micro for one in run[::3]]
        started = now()
        inputs, targets = map(self._held.near, feed.joint(micros))
        loaded = now()
        outputs = self._stage.forward(micros[0], inputs, 0)
        losses, gradient = self._loss(outputs, targets, 1.0 / feed.batch_size)
        spent(loaded)
        forward = now()
        self._backward(micros, gradient, losses, run[2::3], spent, after)
        feed.release(micros[0])
        ended = now()
        for kind, low, high in zip(
            range(3), (started, loaded, forward), (loaded, forward, ended), strict=True
        ):
            self._clock.note(run[kind], low, high)

    def _backward(
        self,
        micros: Sequence[int],
        gradient: Tensor,
        losses: Tensor,
        backwards: Sequence[Instruction],
        spent: Callable[[float], None],
        after: Callable[[Instruction], None],
    ) -> None:
        held, rows = self._held, self._rows
        # Each shard's slot is known only when the one before has landed.
        shards = self._stage.backward_jointly(micros[0], gradient, rows, map(held.into, micros))
        started = now()
        for index, _ in enumerate(shards):
            spent(started)
            loss = figure(losses[index * rows : (index + 1) * rows].sum())
            fed = self._feed.prints.get(micros[index], 0)
            held.landed(micros[index], (loss, 0.0, float(rows)), self._feed.full, fed)
            after(backwards[index])
            started = now()
