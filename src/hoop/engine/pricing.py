"""What a job and this machine cost beyond the blocks' profile, measured in a few milliseconds: for predictions.

All figures are plain values, so that they can be told to whoever predicts: ``launch/predicting.py`` makes costs of them
for the simulator. Times are those of the calling thread, as in ``profile``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hoop.data.dataset import Dataset
from hoop.engine.profile import timer
from hoop.engine.stages.chain import ChainStage, layers_of
from hoop.engine.stages.losses import Loss, Objective
from hoop.engine.stages.optimizer import OptimizerSettings, updating
from hoop.plan.partition import Block

_BYTES = 1 << 20
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
) -> dict[str, Any]:
    """The figures of micro-batches of ``rows`` samples, up to ``joint`` of them computed as one."""
    few = max(1, min(rows, len(data), _FEW))
    samples = np.arange(few, dtype=np.int64)
    batch = data.batch(samples, epoch=0, seed=0)
    out = data.allocate(few)
    elements = min(sum(one.weight_bytes for one in costs) // 4, 1 << 20) or 1
    return {
        "rows": rows,
        "blocks": [_plain(one) for one in costs],
        "load_s": quickest(lambda: data.batch(samples, epoch=0, seed=0, out=out)) * rows / few,
        "loss_s": _loss_seconds(blocks, batch[1], loss) * rows / few,
        "update_s": _update_seconds(optimizer, elements) / (4 * elements),
        "joint": joint,
        "joint_s": _joint_seconds(blocks, batch[0], rows, joint),
        **memory_seconds(),
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


def quickest(call: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of this thread."""
    now, best = timer(), float("inf")
    for _ in range(repeats):
        started = now()
        call()
        best = min(best, now() - started)
    return best


def memory_seconds() -> dict[str, float]:
    """A byte copied, and a byte of a sum, between vectors that do not stay in the first caches."""
    first, second, third = (np.ones(_BYTES // 4, np.float32) for _ in range(3))
    copied = quickest(lambda: np.copyto(third, first), 5)
    added = quickest(lambda: np.add(first, second, out=third), 5)
    return {"copy_s": copied / _BYTES, "add_s": added / _BYTES}


def cores() -> int:
    """Those that this process may use: the thread that computes is bound to one of them."""
    return len(os.sched_getaffinity(os.getpid())) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _loss_seconds(blocks: Sequence[nn.Module], targets: torch.Tensor, loss: Loss) -> float:
    objective = Objective(loss)
    if objective.by_hand is None or targets.dim() != 1:
        return 0.0  # a small part of what a block costs that is not computed by hand
    last = [one for one in blocks[-1].modules() if isinstance(one, nn.Linear)]
    outputs = torch.zeros(len(targets), last[-1].out_features) if last else None
    return 0.0 if outputs is None else quickest(lambda: objective(outputs, targets, 1.0))


def _update_seconds(optimizer: OptimizerSettings, elements: int) -> float:
    weights, gradient = torch.zeros(elements), torch.zeros(elements)
    update = updating(optimizer, weights, [torch.zeros(elements) for _ in range(optimizer.slots)])
    return quickest(lambda: update(gradient, optimizer.lr, 0))


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

    return quickest(run)
