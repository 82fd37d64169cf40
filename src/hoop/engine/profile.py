"""What each block costs on this machine: time, activations, and what it hands on; for cut, memory check and prediction.

Time is that of the calling thread where a device computes on one: devices that profile at once on the same core do not
count each other's.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

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
    repeats: int = 3,
    accelerator: Accelerator | None = None,
) -> list[Block]:
    """Every block's forward and backward on one micro-batch, the quickest of a few; nothing of the model changes."""
    found = []
    inputs = batch[0] if accelerator is None else accelerator.up(batch[0])
    chain = accelerator is None and layers_of(blocks) is not None
    for index, original in enumerate(blocks):
        block = original if accelerator is None else copy.deepcopy(original).to(accelerator.device)
        before = [buffer.clone() for buffer in block.buffers()]
        forward, backward, kept, outputs = _measure(
            block, inputs, repeats if index else repeats + 1, index > 0, timer(accelerator)
        )
        layers = layers_of([block]) if chain else None
        if layers is not None:  # computed by hand, as the worker will
            forward, backward = _by_hand(ChainStage(layers), block, inputs, repeats, index > 0)
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


def _by_hand(
    stage: ChainStage, block: nn.Module, inputs: Tensor, repeats: int, wants_input: bool
) -> tuple[float, float]:
    now, forward, backward = timer(), float("inf"), float("inf")
    into = [torch.empty_like(one) for one in block.parameters()]
    for _ in range(repeats):
        started = now()
        outputs = stage.forward(0, inputs, 0)
        half = now()
        gradient = torch.ones_like(outputs)
        begun = now()
        stage.backward(0, gradient, into, wants_input)
        forward, backward = min(forward, half - started), min(backward, now() - begun)
    return forward, backward
