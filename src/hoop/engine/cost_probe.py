"""What ranks cost each other, measured on the links of the job before its first step: for predictions.

Every rank does what a step has it do: it sends a tensor to the next rank and takes another's, and agrees with
all. Seconds are those of the calling thread, the least of a few: whoever comes late is no cost of the others'.

What each block costs on this machine: time, activations, and what it hands on; for cut, memory check and prediction.

Time is that of the calling thread where a device computes on one: devices that profile at once on the same core do not
count each other's.

What a job and this machine cost beyond the blocks' profile, measured in a few milliseconds: for predictions.

All figures are plain values, so that they can be told to whoever predicts: ``runs/prediction.py`` makes costs of them
for the simulator. Times are those of the calling thread, as in ``profile``.
"""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hoop.collectives.communicator import Communicator
from hoop.collectives.object_collectives import any_rank
from hoop.data.dataset import Batch, Dataset
from hoop.engine.stage.autograd import CrossEntropy, Loss, cross_entropy
from hoop.engine.stage.gpu import Accelerator
from hoop.engine.stage.linear_chain import ChainStage, layers_of
from hoop.engine.stage.optimizer import OptimizerSettings, updating
from hoop.engine.stage.provenance import Provenance, sample_fingerprint
from hoop.engine.stage.state import StateLayout
from hoop.engine.tensor_channel import TensorChannel
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.partition import Block
from hoop.transport.base import SharedEndpoint

TURNS = 8
SMALL, LARGE = 16, 1 << 16
"""Elements of the tensors that travel."""


def rehearsed_step(communicator: Communicator, shards: int, timeout: float) -> dict[str, float]:
    """A message, its bytes, an agreement about a step of so many shards; all ranks must call it together."""
    if communicator.size == 1:
        return {}
    endpoint, deadline = communicator.endpoint, time.monotonic() + timeout
    post, evidence = TensorChannel(endpoint), Provenance(shards)
    following, before = (endpoint.rank + 1) % endpoint.size, (endpoint.rank - 1) % endpoint.size
    agreed: list[float] = []
    small: list[float] = []
    large: list[float] = []

    def agree() -> None:
        told = np.zeros((1, 1 + evidence.places))
        told[:, 1:] = evidence.rows(0, 1)
        any_rank(communicator, False, told, timeout)
        evidence.adopt(0, told[:, 1:])

    for turn in range(TURNS):
        for elements, found in ((SMALL, small), (LARGE, large)):
            agreed.append(_seconds(agree))
            tensor = torch.zeros(elements)

            def exchange(turn: int = turn, tensor: torch.Tensor = tensor) -> None:
                post.send(Instruction(InstructionKind.SEND_OUTPUT, 0, turn, following), tensor, deadline)
                post.receive(before, deadline)
                endpoint.flush(deadline)

            found.append(_seconds(exchange) / 2)  # half of it as who sends, half as who receives
    costs = {
        "message_s": min(small),
        "byte_s": max(0.0, min(large) - min(small)) / (4 * (LARGE - SMALL)),
        "agree_s": min(agreed),
    }
    if isinstance(endpoint, SharedEndpoint):
        costs["meeting_s"] = min(_seconds(lambda: endpoint.meet(deadline)) for _ in range(2 * TURNS))
    return costs


def _seconds(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


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
        layout = StateLayout([block], shards)
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


def measured_costs(
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
        sample_fingerprint(samples)
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
