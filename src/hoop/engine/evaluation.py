"""Evaluates the model's loss and accuracy on the test data, which the replicas share.

The data is cut into chunks of fixed size. The all-reduce carries the metrics of each chunk in elements of its own, and
every rank sums them in the order of the chunks. So the result does not depend on which replica evaluated which chunk.

A model on a GPU is evaluated there: the metrics of all chunks are read once, at the end.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.registry import Operation
from hoop.data.dataset import Dataset
from hoop.engine.executor import PlanExecutor
from hoop.engine.stage.autograd import Criterion, num_correct
from hoop.memory.dtypes import dtype
from hoop.plan.instructions import Instruction, InstructionKind

CHUNK = 500
"""Number of samples that are evaluated at a time, as one batch."""


def evaluate(executor: PlanExecutor, data: Dataset) -> tuple[float, float]:
    """Return the mean loss and the accuracy. Collective: every rank gets the same values."""
    criterion = executor.criterion
    assert isinstance(criterion, Criterion), "custom training is evaluated by ``custom/evaluation.py``"
    chunks = -(-len(data) // CHUNK)
    metrics = np.zeros((chunks, 2), np.float64)
    computed: dict[int, tuple[Tensor, Tensor, int]] = {}
    """Loss and correct answers (on the device) and number of samples of each chunk that this rank has evaluated."""
    deadline = time.monotonic() + executor.settings.timeout_s
    holders = executor.plan.holders
    replicas = len(holders[0])
    modes = [(module, module.training) for one in executor.stage_states.values() for module in one.blocks]
    for module, _ in modes:
        module.eval()
    executor.select_kernels()
    for stage_state in executor.stage_states.values():
        stage_state.sync_device_weights()
    out = data.allocate(CHUNK)
    try:
        for chunk in range(chunks):
            chain = [ranks[chunk % replicas] for ranks in holders]
            samples = np.arange(chunk * CHUNK, min(len(data), (chunk + 1) * CHUNK), dtype=np.int64)
            value: Tensor | None = None
            for stage, rank in enumerate(chain):
                if rank != executor.rank:
                    continue
                if stage == 0:
                    value = executor.stage_states[0].read_inputs(data, samples, out)
                elif chain[stage - 1] != rank:
                    arriving = Instruction(InstructionKind.RECV_INPUT, stage, chunk, chain[stage - 1])
                    value = executor.channel.expect(arriving, deadline)
                assert value is not None, "a stage's input is loaded, received, or the previous stage's output"
                value = executor.stage_states[stage].evaluate(value)
                if stage == executor.last_stage:
                    targets = executor.stage_states[stage].read_targets(data, samples, out)
                    with torch.no_grad():
                        loss = criterion.value(value, targets)
                    computed[chunk] = loss, num_correct(value, targets), len(samples)
                elif chain[stage + 1] != rank:
                    leaving = Instruction(InstructionKind.SEND_OUTPUT, stage, chunk, chain[stage + 1])
                    executor.channel.send(leaving, value, deadline)
        executor.channel.endpoint.flush(deadline)
    finally:
        _restore(modes)
    for chunk, (value, right, count) in computed.items():
        metrics[chunk] = criterion.weighted_value(float(value), count, len(data)), float(right)
    flat = metrics.reshape(-1)
    executor.context.communicator.run(
        Operation("all_reduce", flat.size, dtype("float64")), flat, flat, executor.settings.timeout_s
    )
    loss, accuracy = metrics.sum(axis=0) / len(data)
    return float(loss), float(accuracy)


def _restore(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.train(training)
