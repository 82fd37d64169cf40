"""Evaluates loss and metrics of custom training on the test data, which the replicas share.

As in ``engine/evaluation.py``, the all-reduce carries each chunk's numbers in elements of their own, and every rank
sums them in the order of the chunks: the result does not depend on which replica evaluated which chunk.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from hoop.collectives.registry import Operation
from hoop.data.structured import StructuredDataset, to_device
from hoop.engine.custom.loss import CustomLoss
from hoop.engine.custom.state import CustomState
from hoop.engine.executor import PlanExecutor
from hoop.engine.stage.autograd import CPU
from hoop.memory.dtypes import dtype

ACCURACY = "accuracy"


def evaluate_chunks(
    model: nn.Module,
    loss: CustomLoss,
    data: StructuredDataset,
    chunk_rows: int,
    mine: Callable[[int], bool] = lambda chunk: True,
    device: torch.device = CPU,
    autocast: bool = False,
) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """A row for each chunk: sum and weight of the loss, samples, correct ones and whether known, then metrics.

    ``mine``: whether this rank evaluates a chunk; the rows of the others are 0. ``autocast``: computes in bfloat16.
    """
    chunks = -(-len(data) // chunk_rows)
    rows = np.zeros((chunks, 5 + 2 * len(loss.metric_names)))
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            for chunk in filter(mine, range(chunks)):
                samples = np.arange(chunk * chunk_rows, min(len(data), (chunk + 1) * chunk_rows), dtype=np.int64)
                batch = to_device(data.load(samples, epoch=0, seed=0), device)
                found = loss(model, batch, len(samples))
                known = found.correct is not None
                rows[chunk, :5] = (
                    float(found.objective),
                    found.weight,
                    len(samples),
                    found.correct if known else 0.0,
                    float(known),
                )
                for index, name in enumerate(loss.metric_names):
                    rows[chunk, 5 + 2 * index : 7 + 2 * index] = found.metrics[name]
    finally:
        for module, training in modes:
            module.training = training
    return rows


def summarise(
    loss: CustomLoss, rows: np.ndarray[tuple[int, int], np.dtype[np.float64]]
) -> tuple[float, float | None, dict[str, float]]:
    """Loss, accuracy (None if there is no such thing) and metrics of all chunks."""
    total, weight, samples, correct, known, *extra = np.add.reduce(rows, axis=0).tolist()
    metrics = {
        name: extra[2 * index] / extra[2 * index + 1] if extra[2 * index + 1] else 0.0
        for index, name in enumerate(loss.metric_names)
    }
    accuracy = metrics.get(ACCURACY, correct / samples if known else None)
    return loss.reported(total, weight), accuracy, metrics


def evaluate_custom(
    executor: PlanExecutor, state: CustomState, data: StructuredDataset
) -> tuple[float, float | None, dict[str, float]]:
    """Collective: every rank gets the same loss, accuracy and metrics."""
    settings, ranks = executor.settings, executor.plan.holders[0]
    chunk_rows = max(1, -(-settings.batch_size // settings.num_microbatches))
    me = ranks.index(executor.rank)
    rows = evaluate_chunks(
        state.blocks[0],
        state.loss,
        data,
        chunk_rows,
        lambda chunk: chunk % len(ranks) == me,
        state.device,
        autocast=settings.precision == "bfloat16",
    )
    flat = rows.reshape(-1)
    executor.context.communicator.run(
        Operation("all_reduce", flat.size, dtype("float64")), flat, flat, settings.timeout_s
    )
    return summarise(state.loss, rows)
