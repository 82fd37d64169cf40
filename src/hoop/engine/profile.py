"""What each block costs on this machine: time, activations, and what it hands on; for cut, memory check and prediction.

Time is that of the calling thread where a device computes on one: devices that profile at once on the same core do not
count each other's.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from hoop.data.dataset import Batch
from hoop.engine.stages.accelerator import Accelerator
from hoop.engine.stages.chain import ChainStage, layers_of
from hoop.engine.stages.optimizer import OptimizerSettings
from hoop.engine.stages.weights import Layout
from hoop.plan.partition import Block


def profile(
    blocks: Sequence[nn.Module],
    batch: Batch,
    optimizer: OptimizerSettings,
    shards: int = 0,
    repeats: int = 5,
    accelerator: Accelerator | None = None,
) -> list[Block]:
    """Every block's forward and backward on one micro-batch, a few times; nothing of the model changes."""
    found = []
    inputs = batch[0] if accelerator is None else accelerator.up(batch[0])
    chain = accelerator is None and layers_of(blocks) is not None
    by_hand = _by_hand(blocks, inputs, repeats) if chain else {}  # as the worker will
    for index, original in enumerate(blocks):
        block = original if accelerator is None else copy.deepcopy(original).to(accelerator.device)
        before = [buffer.clone() for buffer in block.buffers()]
        forward, backward, kept, outputs = _measure(
            block, inputs, repeats if index else repeats + 1, index > 0, timer(accelerator)
        )
        forward, backward = by_hand.get(index, (forward, backward))
        with torch.no_grad():
            for buffer, was in zip(block.buffers(), before, strict=True):
                buffer.copy_(was)
        layout = Layout([block], shards)
        found.append(
            Block(
                name=f"{index} ({type(block).__name__})",
                seconds=forward + backward,
                weight_bytes=4 * layout.state,
                optimizer_bytes=4 * optimizer.slots * layout.trained,
                activation_bytes=kept if accelerator is None else 0,  # those are not in the device's memory
                output_bytes=outputs.numel() * outputs.element_size(),
                gradient_bytes=4 * layout.total,
                forward_seconds=forward,
            )
        )
        inputs = outputs
    return found


def timer(accelerator: Accelerator | None = None) -> Callable[[], float]:
    """A clock of what this thread computes; of what passes, where PyTorch has several threads, or a GPU computes."""
    if accelerator is None:
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    gpu = accelerator

    def after_all() -> float:
        gpu.wait()
        return time.perf_counter()

    return after_all


def _measure(
    block: nn.Module, inputs: Tensor, repeats: int, wants_input: bool, now: Callable[[], float]
) -> tuple[float, float, int, Tensor]:
    own = {one.data_ptr() for one in block.parameters()}
    forward, backward, kept = float("inf"), float("inf"), 0
    outputs = inputs
    for _ in range(repeats):
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            if tensor.data_ptr() not in own:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        given = inputs.detach()
        if wants_input and given.is_floating_point():
            given.requires_grad_()
        started = now()
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            outputs = block(given)
        half = now()
        wanted = [one for one in (*block.parameters(), given) if one.requires_grad]
        if outputs.requires_grad and wanted:
            torch.autograd.grad(outputs.sum(), wanted, allow_unused=True)
        forward, backward = min(forward, half - started), min(backward, now() - half)
        kept = sum(saved.values()) + outputs.numel() * outputs.element_size()
    return forward, backward, kept, outputs.detach()


def _by_hand(blocks: Sequence[nn.Module], inputs: Tensor, repeats: int) -> dict[int, tuple[float, float]]:
    """A chain's blocks, all forward, then all backward: each finds in the caches what the others left there.

    The median of a few, without the first.
    """
    with torch.no_grad():
        functools.reduce(
            lambda outputs, block: block(outputs), blocks, inputs
        )  # a shape that does not fit is its own fault
    now = timer()
    stages = {index: ChainStage(layers) for index, one in enumerate(blocks) if (layers := layers_of([one]))}
    into = [[torch.empty_like(parameter) for parameter in block.parameters()] for block in blocks]
    forward: dict[int, list[float]] = {index: [] for index in stages}
    backward: dict[int, list[float]] = {index: [] for index in stages}
    for _ in range(repeats + 1):
        outputs, gradients = inputs, {}
        for index, block in enumerate(blocks):
            started = now()
            if index in stages:
                outputs = stages[index].forward(0, outputs, 0)
                forward[index].append(now() - started)
                gradients[index] = torch.ones_like(outputs)
            else:
                outputs = block(outputs)
        for index in reversed(stages):
            started = now()
            stages[index].backward(0, gradients[index], into[index], index > 0)
            backward[index].append(now() - started)
    return {index: (median(forward[index][1:]), median(backward[index][1:])) for index in stages}
