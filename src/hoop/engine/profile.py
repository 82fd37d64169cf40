"""What each block costs on this machine: time, activations, and what it hands on; for cut and memory check."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hoop.data.dataset import Batch
from hoop.engine.accelerator import Accelerator
from hoop.engine.optimizer import OptimizerSettings
from hoop.engine.weights import Layout
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
    for index, original in enumerate(blocks):
        block = original if accelerator is None else copy.deepcopy(original).to(accelerator.device)
        before = [buffer.clone() for buffer in block.buffers()]
        seconds, kept, outputs = _measure(block, inputs, repeats if index else repeats + 1, accelerator)
        with torch.no_grad():
            for buffer, was in zip(block.buffers(), before, strict=True):
                buffer.copy_(was)
        layout = Layout([block], shards)
        found.append(
            Block(
                name=f"{index} ({type(block).__name__})",
                seconds=seconds,
                weight_bytes=4 * layout.state,
                optimizer_bytes=4 * optimizer.slots * layout.trained,
                activation_bytes=kept if accelerator is None else 0,  # those are not in the device's memory
                output_bytes=outputs.numel() * outputs.element_size(),
                gradient_bytes=4 * layout.total,
            )
        )
        inputs = outputs
    return found


def _measure(
    block: nn.Module, inputs: Tensor, repeats: int, accelerator: Accelerator | None
) -> tuple[float, int, Tensor]:
    own = {one.data_ptr() for one in block.parameters()}
    best, kept = float("inf"), 0
    outputs = inputs
    for _ in range(repeats):
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            if tensor.data_ptr() not in own:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        given = inputs.detach()
        if given.is_floating_point():
            given.requires_grad_()
        started = time.perf_counter()
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            outputs = block(given)
        wanted = [one for one in (*block.parameters(), given) if one.requires_grad]
        if outputs.requires_grad and wanted:
            torch.autograd.grad(outputs.sum(), wanted, allow_unused=True)
        if accelerator is not None:
            accelerator.wait()
        best = min(best, time.perf_counter() - started)
        kept = sum(saved.values()) + outputs.numel() * outputs.element_size()
    return best, kept, outputs.detach()
