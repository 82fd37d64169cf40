"""The model's loss and accuracy on data it does not learn from, shared out among the replicas.

The data is cut into fixed chunks; each chunk's figures have a place of their own in what is added up, and are added in
the order of chunks at every rank, so that the result does not depend on who evaluated what.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.registry import Operation
from hoop.data.dataset import Dataset
from hoop.engine.executor import PlanExecutor
from hoop.engine.stage.autograd import hits
from hoop.memory.dtypes import dtype
from hoop.plan.instructions import Instruction, InstructionKind

CHUNK = 500


def evaluate(worker: PlanExecutor, data: Dataset) -> tuple[float, float]:
    """The loss of all samples and the share of them that are right; every rank must call it and gets the same."""
    chunks = -(-len(data) // CHUNK)
    figures = np.zeros((chunks, 2), np.float64)
    deadline = time.monotonic() + worker.settings.timeout_s
    holders = worker.plan.holders
    replicas = len(holders[0])
    modes = [(module, module.training) for held in worker.held.values() for module in held.blocks]
    for module, _ in modes:
        module.eval()
    for held in worker.held.values():
        held.refresh()
    out = data.allocate(CHUNK)
    try:
        for chunk in range(chunks):
            chain = [ranks[chunk % replicas] for ranks in holders]
            samples = np.arange(chunk * CHUNK, min(len(data), (chunk + 1) * CHUNK), dtype=np.int64)
            value: Tensor | None = None
            for stage, rank in enumerate(chain):
                if rank != worker.rank:
                    continue
                if stage == 0:
                    value = data.batch(samples, epoch=0, seed=0, out=out)[0]
                elif chain[stage - 1] != rank:
                    arriving = Instruction(InstructionKind.RECV_INPUT, stage, chunk, chain[stage - 1])
                    value = worker.post.expect(arriving, deadline)
                assert value is not None, "a stage's input is loaded, received, or the stage's before"
                value = worker.held[stage].evaluate(value)
                if stage == worker.last:
                    targets = data.batch(samples, epoch=0, seed=0, out=out)[1]
                    with torch.no_grad():
                        loss = float(worker.criterion.value(value, targets))
                    loss = worker.criterion.figure(loss, len(samples), len(data))
                    figures[chunk] = loss, hits(value, targets)
                elif chain[stage + 1] != rank:
                    leaving = Instruction(InstructionKind.SEND_OUTPUT, stage, chunk, chain[stage + 1])
                    worker.post.send(leaving, value, deadline)
        worker.post.endpoint.flush(deadline)
    finally:
        _restore(modes)
    flat = figures.reshape(-1)
    worker.world.communicator.run(
        Operation("all_reduce", flat.size, dtype("float64")), flat, flat, worker.settings.timeout_s
    )
    loss, right = figures.sum(axis=0) / len(data)
    return float(loss), float(right)


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.train(training)
