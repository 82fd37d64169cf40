"""Computes several shards of a rank as one batch, where the bits are the same as shard by shard.

A small matrix product costs more per row than a large one, and every call has a fixed cost. The forward and the
gradients of the activations are computed at once. The gradients of the weights are computed shard by shard, because
each shard has its own slot in the reduction tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from torch import Tensor

from hoop.collectives.rank_context import RankContext
from hoop.collectives.registry import Operation
from hoop.engine.data_feed import DataFeed
from hoop.engine.profiler import InstructionProfiler, now
from hoop.engine.stage.autograd import CrossEntropy, loss_value
from hoop.engine.stage.linear_chain import ChainStage
from hoop.engine.stage.state import StageState
from hoop.memory.dtypes import dtype
from hoop.plan.instructions import Instruction, InstructionKind

MAX_SHARDS = 8
"""Maximum number of shards in one batch."""
_SHARD_KINDS = [InstructionKind.LOAD, InstructionKind.FORWARD, InstructionKind.BACKWARD]


def agree_max_batched_shards(context: RankContext, stage_state: StageState | None, rows: int, timeout: float) -> int:
    """Return how many shards of ``rows`` samples every rank may compute as one batch. Collective.

    ``stage_state``: the whole model on this rank; None if this rank has none, and accepts any number.
    """
    stage = stage_state.stage if stage_state is not None else None
    found = (
        MAX_SHARDS
        if stage_state is None
        else stage.max_identical_batch(rows, MAX_SHARDS)
        if isinstance(stage, ChainStage)
        else 1
    )
    agreed = np.array([found], np.int32)
    context.communicator.run(Operation("all_reduce", 1, dtype("int32"), "min"), agreed, agreed, timeout)
    return int(agreed[0])


def group_shards(instructions: Sequence[Instruction], most: int) -> Iterator[list[Instruction]]:
    """Group a program into runs of up to ``most`` consecutive shards; any other instruction is a run of its own.

    A shard is the sequence load, forward, backward of one micro-batch.
    """
    run: list[Instruction] = []
    index = 0
    while index < len(instructions):
        three = list(instructions[index : index + 3])
        is_shard = [one.kind for one in three] == _SHARD_KINDS and len({one.micro for one in three}) == 1
        follows = is_shard and (not run or three[0].micro == run[-1].micro + 1)
        if run and (not follows or len(run) >= 3 * most):
            yield run
            run = []
        if is_shard:
            run += three
            index += 3
        else:
            yield three[:1]
            index += 1
    if run:
        yield run


class BatchedShards:
    """Executes runs of shards as one batch, on a rank whose only stage is the whole model."""

    def __init__(self, feed: DataFeed, stage_state: StageState, profiler: InstructionProfiler, rows: int) -> None:
        """``rows``: samples of a full shard."""
        assert isinstance(stage_state.stage, ChainStage), "only chains are computed as one batch"
        self._feed, self._stage_state, self._stage = feed, stage_state, stage_state.stage
        self._profiler, self._rows = profiler, rows
        self._loss = CrossEntropy()

    def can_batch(self, run: Sequence[Instruction]) -> bool:
        """True if all shards of the run are full: the comparison of bits was made for ``rows`` samples."""
        return len(run) > 3 and all(self._feed.rows(one.micro) == self._rows for one in run[::3])

    def __call__(
        self,
        run: Sequence[Instruction],
        add_compute_time: Callable[[float], None],
        on_shard: Callable[[Instruction], None],
    ) -> None:
        """Execute load, forward and backward of a run.

        ``add_compute_time(started)``: called after each part of the computation, with its start time.
        ``on_shard(instruction)``: called when the gradient of a shard is in its slot, with its backward instruction.
        """
        feed = self._feed
        microbatches = [one.micro for one in run[::3]]
        started = now()
        inputs, targets = map(self._stage_state.to_device, feed.read_batched(microbatches))
        loaded = now()
        outputs = self._stage.forward(microbatches[0], inputs, 0)
        losses, gradient = self._loss(outputs, targets, 1.0 / feed.batch_size)
        add_compute_time(loaded)
        forward_done = now()
        self._backward(microbatches, gradient, losses, run[2::3], add_compute_time, on_shard)
        feed.release(microbatches[0])
        ended = now()
        for kind, low, high in zip(
            range(3), (started, loaded, forward_done), (loaded, forward_done, ended), strict=True
        ):
            self._profiler.record(run[kind], low, high)

    def _backward(
        self,
        microbatches: Sequence[int],
        gradient: Tensor,
        losses: Tensor,
        backwards: Sequence[Instruction],
        add_compute_time: Callable[[float], None],
        on_shard: Callable[[Instruction], None],
    ) -> None:
        stage_state, rows = self._stage_state, self._rows
        started = now()

        def on_gradient(index: int) -> None:
            nonlocal started
            add_compute_time(started)
            loss = loss_value(losses[index * rows : (index + 1) * rows].sum())
            fingerprint = self._feed.fingerprints.get(microbatches[index], 0)
            stage_state.on_gradient(microbatches[index], (loss, 0.0, float(rows)), self._feed.num_nonempty, fingerprint)
            on_shard(backwards[index])
            started = now()

        # Shard by shard: the slot of a shard may be free only after the previous shard was merged.
        intos = map(stage_state.gradient_views, microbatches)
        self._stage.backward_batched(microbatches[0], gradient, rows, intos, on_gradient)
