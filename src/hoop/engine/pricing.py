"""What a job and this machine cost beyond the blocks' profile, measured in a few milliseconds: for predictions.

All figures are plain values, so that they can be told to whoever predicts: ``launch/predicting.py`` makes costs of them
for the simulator. Times are those of the calling thread, as in ``profile``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from hoop.data.dataset import Dataset
from hoop.engine.profile import timer
from hoop.engine.stages.chain import ChainStage, layers_of
from hoop.engine.stages.evidence import print_of
from hoop.engine.stages.losses import CrossEntropy, Loss, cross_entropy
from hoop.engine.stages.optimizer import OptimizerSettings, updating
from hoop.plan.partition import Block

Vector = npt.NDArray[np.float32]
SIZES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Bytes of the vectors that are copied and added up."""
MEASURED = 1 << 31
"""The epoch of samples that are loaded to see what loading costs: no step's."""
_MIDDLE = 1 << 20
_ELSE = 4 << 20
"""Bytes: more than a core's own caches hold."""
_FEW = 256
"""Samples that are loaded to see what loading costs."""
_MOST_ROWS = 2048
"""Samples that are computed to see what several shards at once cost."""


def priced(
    costs: Sequence[Block],
    blocks: Sequence[nn.Module],
    data: Dataset,
    loss: Loss,
    optimizer: OptimizerSettings,
    rows: int,
    joint: int,
    sizes: Sequence[int] = SIZES,
) -> dict[str, Any]:
    """The figures of micro-batches of ``rows`` samples, up to ``joint`` of them computed as one."""
    few = max(1, min(rows, len(data), _FEW))
    batch = data.batch(np.arange(few, dtype=np.int64), epoch=0, seed=0)
    elements = min(sum(one.weight_bytes for one in costs) // 4, 1 << 20) or 1
    fixed = _update_seconds(optimizer, 1)
    return {
        "rows": rows,
        "blocks": [_plain(one) for one in costs],
        "load": [(count, _load_seconds(data, count)) for count in sorted({max(1, few // 4), few})],
        "loss": [
            (count, _loss_seconds(blocks, batch[1][:count], loss))
            for count in sorted({max(1, few // 4), few})
        ],
        "update_fixed_s": fixed,
        "update_s": max(0.0, _update_seconds(optimizer, elements) - fixed) / (4 * elements),
        "joint": joint,
        "joint_s": _joint_seconds(blocks, batch[0], rows, joint),
        **memory_seconds(sizes),
        "cores": cores(),
    }


def _plain(block: Block) -> dict[str, Any]:
    forward = block.seconds / 3 if block.forward_seconds is None else block.forward_seconds
    return {
        "name": block.name.partition("(")[2].rstrip(")") or block.name,
        "forward_s": forward,
        "backward_s": block.seconds - forward,
        "weight_bytes": block.weight_bytes,
        "optimizer_bytes": block.optimizer_bytes,
        "gradient_bytes": block.weight_bytes if block.gradient_bytes is None else block.gradient_bytes,
        "activation_bytes": block.activation_bytes,
        "output_bytes": block.output_bytes,
    }


def usually(call: Callable[[], object], repeats: int = 5, cold: bool = True) -> float:
    """Seconds of this thread, the median of a few.

    ``cold``: with caches as a step leaves them, full of something else.
    """
    now, found = timer(), []
    other = np.empty(_ELSE if cold else 0, np.uint8)
    for _ in range(repeats):
        other.fill(0)
        started = now()
        call()
        found.append(now() - started)
    return median(found)


def memory_seconds(sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """A byte copied, and a byte of a sum, by the bytes of a vector: (size, seconds), and the figures in the middle."""
    copied, added = [], []
    for size in sizes:
        first, second, third = (np.ones(size // 4, np.float32) for _ in range(3))
        turns = max(1, _MIDDLE // size)

        def copy(one: Vector = first, into: Vector = third, turns: int = turns) -> None:
            for _ in range(turns):
                np.copyto(into, one)

        def add(
            one: Vector = first, other: Vector = second, into: Vector = third, turns: int = turns
        ) -> None:
            for _ in range(turns):
                np.add(one, other, out=into)

        copied.append((size, usually(copy, cold=False) / (turns * size)))
        added.append((size, usually(add, cold=False) / (turns * size)))
    middle = min(range(len(sizes)), key=lambda index: abs(sizes[index] - _MIDDLE))
    return {"copy_s": copied[middle][1], "add_s": added[middle][1], "copy_at": copied, "add_at": added}


def cores() -> int:
    """Those that this process may use: the thread that computes is bound to one of them."""
    return len(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _loss_seconds(blocks: Sequence[nn.Module], targets: torch.Tensor, loss: Loss) -> float:
    if loss is not cross_entropy or targets.dim() != 1:
        return 0.0  # a small part of what a block costs that is not computed by hand
    by_hand = CrossEntropy()
    last = [one for one in blocks[-1].modules() if isinstance(one, nn.Linear)]
    outputs = torch.zeros(len(targets), last[-1].out_features) if last else None
    return 0.0 if outputs is None else usually(lambda: float(by_hand(outputs, targets, 1.0)[0].sum()))


def _load_seconds(data: Dataset, rows: int) -> float:
    """So many samples from anywhere, as an epoch's order has them, into memory that is used again."""
    out, chance = data.allocate(rows), np.random.default_rng(0)

    def load() -> None:
        samples = chance.integers(len(data), size=rows)
        print_of(samples)
        data.batch(samples, epoch=MEASURED, seed=0, out=out)

    return usually(load)


def _update_seconds(optimizer: OptimizerSettings, elements: int) -> float:
    weights, gradient = torch.zeros(elements), torch.zeros(elements)
    update = updating(optimizer, weights, [torch.zeros(elements) for _ in range(optimizer.slots)])
    return usually(lambda: update(gradient, optimizer.lr, 0), cold=elements > 1)


def _joint_seconds(blocks: Sequence[nn.Module], inputs: torch.Tensor, rows: int, joint: int) -> float:
    """Forward and backward of ``joint`` micro-batches as one; 0 where they are not computed so."""
    layers = layers_of(blocks)
    if joint < 2 or layers is None or joint * rows > _MOST_ROWS:
        return 0.0
    stage = ChainStage(layers)
    many = torch.cat([inputs] * -(-joint * rows // len(inputs)))[: joint * rows]
    into = [torch.empty_like(one) for block in blocks for one in block.parameters()]
    gradient = torch.ones(len(many), into[-1].shape[0])

    def run() -> None:
        stage.forward(0, many, 0)
        for _ in stage.backward_jointly(0, gradient, rows, [into] * joint):
            pass

    return usually(run)
