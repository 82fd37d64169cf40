"""Micro-benchmarks before the first step: inputs of the cut, the memory check and the prediction of step times.

    profile_blocks          each block of the model: forward, backward, activations, outputs
    measure_costs           loading, loss, update, memory bandwidth of this machine; a few milliseconds
    measure_communication   messages and the agreement of a step, on the links of the job
    measure_reduction       the sum of a step's gradients
    measure_agreement       the end of a step of ranks with parts of a model
    measure_shard_overhead  what a shard's gradient costs beside its computation
    measure_step_overhead   what the training loop adds to a step
    measure_lateness        the slowest rank's extra compute time, relative to the median
    measure_gpu_step        the step of a rank whose state stays on a GPU: its graphs, and whole steps

``rehearsal.py`` measures whole steps of other ranks. Results are plain values, which can be sent in events;
``runs/prediction.py`` turns them into costs for the simulator.
Times are CPU times of the calling thread where possible: ranks that measure on the same core at the same time do not
count each other's time.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hoop.collectives.communicator import Communicator, any_rank
from hoop.collectives.registry import Operation
from hoop.data.dataset import Batch, Dataset
from hoop.data.sampler import SampleOrder, shard
from hoop.engine.data_feed import Position
from hoop.engine.executor import PlanExecutor
from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.prefetched_batch import PrefetchedBatch, SampleBuffer
from hoop.engine.progress_reporter import ProgressReporter
from hoop.engine.roles.base import RankRole
from hoop.engine.roles.resident import ResidentRole
from hoop.engine.settings import Settings
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.autograd import CrossEntropy, Loss, cross_entropy
from hoop.engine.stage.gpu_resident_state import ResidentStageState
from hoop.engine.stage.gradient_reduction import GradientReducer
from hoop.engine.stage.linear_chain import ChainStage, layers_of
from hoop.engine.stage.optimizer import make_update
from hoop.engine.stage.provenance import Provenance, sample_fingerprint
from hoop.engine.stage.state import TAIL, StageState, StateLayout
from hoop.engine.step_schedule import StepSchedule, StepWork
from hoop.engine.tensor_channel import TensorChannel
from hoop.errors import InvalidArgument
from hoop.memory.dtypes import dtype
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.partition import Block
from hoop.resources import available_cores
from hoop.transport.base import SharedEndpoint

REPEATS = 8
BLOCK_S, MIN_RUNS = 0.25, 2
"""A block that has been measured for this long, and this often, is not measured again."""
SMALL_ELEMENTS, LARGE_ELEMENTS = 16, 1 << 16
"""Elements of the tensors that are sent."""


def measure_communication(communicator: Communicator, shards: int, timeout: float) -> dict[str, float]:
    """Measure a message, a byte of it, and the agreement of a step of ``shards`` shards. Collective.

    Every rank does what it does in a step: it sends a tensor to the next rank, receives one from the previous rank, and
    takes part in the agreement. In a step the computation before it has filled the caches with other data and code; so
    has it here. All ranks begin together; each result is the median of several runs.
    """
    if communicator.size == 1:
        return {}
    endpoint, deadline = communicator.endpoint, time.monotonic() + timeout
    channel, provenance = TensorChannel(endpoint), Provenance(shards)
    following, previous = (endpoint.rank + 1) % endpoint.size, (endpoint.rank - 1) % endpoint.size
    together = ColdStart(communicator, timeout)

    def agree() -> None:
        message = np.zeros((1, 1 + provenance.width))
        message[:, 1:] = provenance.rows(0, 1)
        any_rank(communicator, False, message, timeout)
        provenance.set_rows(0, message[:, 1:])

    def exchange(tensor: Tensor) -> None:
        channel.send(Instruction(InstructionKind.SEND_OUTPUT, 0, 0, following), tensor, deadline)
        channel.receive(previous, deadline)
        endpoint.flush(deadline)

    # An exchange is one send and one receive.
    small, large = (
        together.seconds(functools.partial(exchange, torch.zeros(elements))) / 2
        for elements in (SMALL_ELEMENTS, LARGE_ELEMENTS)
    )
    costs = {
        "message_s": small,
        "byte_s": max(0.0, large - small) / (4 * (LARGE_ELEMENTS - SMALL_ELEMENTS)),
        "agree_s": together.seconds(agree),
    }
    if isinstance(endpoint, SharedEndpoint):
        costs["meeting_s"] = min(_seconds(lambda: endpoint.barrier(deadline)) for _ in range(2 * REPEATS))
    return costs


class ColdStart:
    """Times collective calls as they run in a step: all ranks begin together, with other data in their caches."""

    def __init__(self, communicator: Communicator, timeout: float) -> None:
        self._communicator, self._timeout = communicator, timeout
        self._other = np.empty(_CACHE_BYTES, np.uint8)
        self._nothing = np.zeros(0, np.float64)

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median processor time of ``call`` on this rank. Collective; the first run is dropped."""
        found = [self._once(call) for _ in range(REPEATS + 1)]
        return median(found[1:])

    def _once(self, call: Callable[[], object]) -> float:
        self._other.fill(0)
        self._communicator.run(Operation("barrier", 0, dtype("float64")), self._nothing, self._nothing, self._timeout)
        return _seconds(call)


def measure_reduction(communicator: Communicator, reducer: GradientReducer, timeout: float) -> float:
    """Measure the sum of gradients of a step, in the job's own memory: the processor time of this rank. Collective.

    The gradients are those of no step: the sum, which every step overwrites, means nothing.
    """
    return ColdStart(communicator, timeout).seconds(lambda: reducer(time.monotonic() + timeout))


def measure_agreement(role: RankRole, communicator: Communicator, shards: int, timeout: float) -> float:
    """Measure what ranks with parts of a model do between the gradients of a step and its update. Collective.

    They find their gradients, and agree whether to stop, with the loss and the provenance of the step. The messages of
    replicas are not among it.
    """
    provenance = Provenance(shards)

    def agree() -> None:
        communicator.endpoint.verify_reads()
        role.totals()
        role.counters()
        rows = np.zeros((1, 1 + provenance.width))
        rows[:, 1:] = provenance.rows(0, 1)
        any_rank(communicator, False, rows, timeout)
        provenance.set_rows(0, rows[:, 1:])

    return ColdStart(communicator, timeout).seconds(agree)


def measure_shard_overhead(executor: PlanExecutor, communicator: Communicator, timeout: float) -> float:
    """Measure what a shard's gradient costs beside its computation: its slot, its metrics, its provenance. Collective.

    The most of all ranks; ranks without a part of the model have none. The values mean nothing: every step overwrites
    them.
    """
    mine, found = np.zeros(1, np.float64), np.zeros(communicator.size, np.float64)
    for stage, state in executor.stage_states.items():
        if share := executor.plan.computed_by(executor.rank, stage):
            run = functools.partial(_fill_slot, state, share[0])
            mine[0] = max(float(mine[0]), median_seconds(run))
    communicator.run(Operation("all_gather", 1, dtype("float64")), mine, found, timeout)
    return float(found.max())


def _fill_slot(state: StageState, micro: int) -> None:
    state.gradient_views(micro)
    state.on_gradient(micro, (0.0, 0.0, 1.0), 1, fingerprint=1, merged=True)


def measure_step_overhead(executor: PlanExecutor, data: Dataset, settings: Settings) -> float:
    """Measure what the training loop does in a step beside its instructions: the next samples, rows of progress.

    Nothing of it changes the state; ``executor`` begins the first step afterwards. 0 for a job without steps.
    """
    schedule = StepSchedule(settings, len(data))
    if not schedule.total_steps:
        return 0.0
    last, provenance = schedule.total_steps - 1, Provenance(settings.num_microbatches)
    progress = ProgressReporter(lambda _: None, provenance)
    whole = executor.stage_states.get(executor.last_stage)
    schedule.next_steps(last, 1)  # orders the samples of an epoch, once

    def run() -> None:
        executor.profiler.record_overhead()
        (work,) = schedule.next_steps(last, 1)
        executor.begin(work.position, work.samples)
        executor.channel.endpoint.flush(time.monotonic() + settings.timeout_s)
        if whole is not None and not executor.plan.servers:
            provenance.record(last, whole.tail[TAIL:])
        provenance.set_rows(last, provenance.rows(last, 1))
        progress.add(1, [0.0], 0.0)
        progress.report(work.rate, False)

    return median_seconds(run)


LATENESS_ROUNDS = 32
_WORK_SHAPE = (256, 512, 256)
"""Rows, inner size and columns of a product of matrices that takes about a millisecond."""


def measure_lateness(communicator: Communicator, timeout: float) -> float:
    """Measure how much longer than the median the slowest rank computes, relative to the median. Collective.

    All ranks compute the same, round by round. A step ends when the slowest rank has computed, and no rank is the
    slowest in all rounds: cores differ in clock, other processes interrupt them, hosts of virtual machines too. Ranks
    that share cores measure their own processor time, and the slowest core counts: the step ends when the last of its
    ranks has computed.
    """
    if communicator.size == 1:
        return 0.0
    rows, inner, columns = _WORK_SHAPE
    left, right, product = torch.ones(rows, inner), torch.ones(inner, columns), torch.empty(rows, columns)
    now = time.perf_counter if communicator.size <= available_cores() else time.thread_time
    mine, nothing = np.zeros(LATENESS_ROUNDS, np.float64), np.zeros(0, np.float64)
    for number in range(LATENESS_ROUNDS):
        communicator.run(Operation("barrier", 0, dtype("float64")), nothing, nothing, timeout)
        started = now()
        torch.mm(left, right, out=product)
        mine[number] = now() - started
    gathered = np.zeros(communicator.size * LATENESS_ROUNDS, np.float64)
    communicator.run(Operation("all_gather", LATENESS_ROUNDS, dtype("float64")), mine, gathered, timeout)
    seconds = gathered.reshape(communicator.size, LATENESS_ROUNDS)[:, LATENESS_ROUNDS // 4 :]  # the first ones warm up
    cores = min(available_cores(), communicator.size)
    by_core = np.stack([seconds[core::cores].mean(axis=0) for core in range(cores)])
    usual = float(np.median(by_core))
    return float(np.median(by_core.max(axis=0))) / usual - 1 if usual else 0.0


GPU_PROBE_S = 0.2
"""Seconds for each of the measurements of a step on a GPU, about."""
_MIN_STEPS, _GPU_REPEATS = 4, 3
_COPIED_BYTES = 32 << 20


def measure_gpu_step(role: ResidentRole, order: SampleOrder, settings: Settings, estimate_s: float) -> dict[str, Any]:
    """Measure the step of a rank whose state is on a GPU. Collective; the state, and what follows, do not change.

    ``estimate_s``: of a step, equal at all ranks, for the number of measured steps. All ranks measure at the same time,
    so ranks that share a GPU slow each other down as in training.

    compute_s, finish_s   seconds of the launches of a step: the gradients of this rank's shards; their sum and the
                          update. With one rank a step is one launch: ``compute_s``
    step_s, stride_s      seconds of a whole step, and what the end of each stride costs
    """
    state, batch = role.executor.stage_states[0], min(settings.batch_size, order.length)
    assert isinstance(state, ResidentStageState), "setup.py makes both or none"
    accelerator = state.accelerator
    few = min(role.stride, max(_MIN_STEPS, int(GPU_PROBE_S / max(estimate_s, 1e-6) / _GPU_REPEATS)))
    lengths = sorted({max(1, few // 2), few})
    works = [
        StepWork(Position(PROBE_EPOCH, step, step), order.indices(0, step % (order.length // batch), batch), 0.0)
        for step in range(few)
    ]
    ordering = _wall_seconds(lambda: [order.indices(0, 0, batch) for _ in range(few)]) / few
    whole: dict[int, float] = {}
    launched: dict[str, float] = {}
    with role.rehearsal():
        role.advance(works[:1], False)  # records the graphs
        for length in lengths:
            run_steps = functools.partial(role.advance, works[:length], False)
            whole[length] = min(_wall_seconds(run_steps) for _ in range(_GPU_REPEATS))
        for name, launch in role.launches(batch).items():

            def run(launch: Callable[[], None] = launch) -> None:
                role.begin_stride()
                for _ in range(few):
                    launch()
                accelerator.synchronize()

            launched[name] = min(_wall_seconds(run) for _ in range(_GPU_REPEATS)) / few
    low, high = lengths[0], lengths[-1]
    step = (whole[high] - whole[low]) / (high - low) if high > low else whole[high]
    step = min(max(step, 0.0), whole[high] / high)
    free, total = accelerator.memory()
    return {
        "rows": sum(len(shard(works[0].samples, micro, settings.num_microbatches)) for micro in _shards_of(role)),
        "compute_s": launched.get("whole", launched.get("compute", 0.0)),
        "finish_s": launched.get("finish", 0.0),
        "step_s": step + ordering,
        "stride_s": whole[high] - high * step,
        "stride": role.stride,
        "bytes_read": role.bytes_read,
        "copy_s": _gpu_copy_seconds(accelerator),
        "gpus": accelerator.count,
        "sharing": -(-role.executor.context.local_rank_and_size[1] // accelerator.count),
        "free": free,
        "total": total,
        "name": accelerator.name,
    }


def _shards_of(role: ResidentRole) -> Sequence[int]:
    return role.executor.plan.computed_by(role.executor.rank, 0)


def _gpu_copy_seconds(accelerator: Accelerator) -> float:
    """Seconds per byte of a copy in the GPU's memory. Devices that share the GPU read each other's memory as fast."""
    source = torch.zeros(_COPIED_BYTES // 4, device=accelerator.device)
    target = torch.zeros_like(source)
    accelerator.synchronize()

    def run() -> None:
        target.copy_(source)
        accelerator.synchronize()

    return min(_wall_seconds(run) for _ in range(_GPU_REPEATS)) / _COPIED_BYTES


def _wall_seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _seconds(call: Callable[[], object]) -> float:
    started = time.thread_time()
    call()
    return time.thread_time() - started


def profile_blocks(
    blocks: Sequence[nn.Module],
    batch: Batch,
    optimizer: OptimizerSettings,
    shards: int = 0,
    repeats: int = 5,
    accelerator: Accelerator | None = None,
) -> list[Block]:
    """Measure forward and backward of each block on one micro-batch. Does not change the model.

    ``shards``: micro-batches of a global batch, for the size of a gradient.
    """
    found = []
    inputs = batch[0] if accelerator is None else accelerator.upload(batch[0])
    chain = accelerator is None and layers_of(blocks) is not None
    chain_times = _measure_chain(blocks, inputs, repeats) if chain else {}  # computed as in training
    for index, original in enumerate(blocks):
        block = original if accelerator is None else copy.deepcopy(original).to(accelerator.device)
        buffers = [buffer.clone() for buffer in block.buffers()]
        forward, backward, activation_bytes, outputs = _measure_block(
            block, inputs, repeats if index else repeats + 1, index > 0, timer(accelerator)
        )
        forward, backward = chain_times.get(index, (forward, backward))
        with torch.no_grad():
            for buffer, saved in zip(block.buffers(), buffers, strict=True):
                buffer.copy_(saved)
        layout = StateLayout([block], shards)
        found.append(
            Block(
                name=f"{index} ({type(block).__name__})",
                seconds=forward + backward,
                weight_bytes=4 * layout.state,
                optimizer_bytes=4 * optimizer.num_moments * layout.trained,
                # The activations of a GPU are not in host memory.
                activation_bytes=activation_bytes if accelerator is None else 0,
                output_bytes=outputs.numel() * outputs.element_size(),
                gradient_bytes=4 * layout.total,
                forward_seconds=forward,
            )
        )
        inputs = outputs
    return found


def timer(accelerator: Accelerator | None = None) -> Callable[[], float]:
    """Return a clock: CPU time of this thread; wall time if PyTorch uses several threads, or a GPU computes."""
    if accelerator is None:
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    gpu = accelerator

    def synchronized_time() -> float:
        gpu.synchronize()
        return time.perf_counter()

    return synchronized_time


def _measure_block(
    block: nn.Module, inputs: Tensor, repeats: int, wants_input: bool, now: Callable[[], float]
) -> tuple[float, float, int, Tensor]:
    """Return the seconds of forward and backward, the bytes of saved activations, and the outputs."""
    parameters = {one.data_ptr() for one in block.parameters()}
    forward, backward, activation_bytes = float("inf"), float("inf"), 0
    outputs, began = inputs, now()
    for run in range(repeats):
        if run >= MIN_RUNS and now() - began > BLOCK_S:  # all devices measure: a large model would start late
            break
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            if tensor.data_ptr() not in parameters:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        leaf = inputs.detach()
        if wants_input and leaf.is_floating_point():
            leaf.requires_grad_()
        started = now()
        with (
            torch.random.fork_rng(devices=[]),
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            outputs = block(leaf)
        if not isinstance(outputs, Tensor):  # nn.Module.__call__ has no type
            raise InvalidArgument(
                f"model: {type(block).__name__} returned {type(outputs).__name__}, not a tensor; return one tensor, "
                "with a row for each sample"
            )
        forward_done = now()
        wanted = [one for one in (*block.parameters(), leaf) if one.requires_grad]
        if outputs.requires_grad and wanted:
            torch.autograd.grad(outputs.sum(), wanted, allow_unused=True)
        forward, backward = min(forward, forward_done - started), min(backward, now() - forward_done)
        activation_bytes = sum(saved.values()) + outputs.numel() * outputs.element_size()
    return forward, backward, activation_bytes, outputs.detach()


def _measure_chain(blocks: Sequence[nn.Module], inputs: Tensor, repeats: int) -> dict[int, tuple[float, float]]:
    """Return the seconds of forward and backward of each block of a chain: the median of several runs.

    All blocks run forward, then all backward, so that each finds the caches as in training; gradients are written into
    other memory in each run, as those of the shards of a step are. The first run is dropped.
    """
    with torch.no_grad():
        functools.reduce(
            lambda outputs, block: block(outputs), blocks, inputs
        )  # with a shape that does not fit, PyTorch's own error is raised here
    now = timer()
    stages = {index: ChainStage(layers) for index, one in enumerate(blocks) if (layers := layers_of([one]))}
    slots = [
        [[torch.zeros_like(parameter) for parameter in block.parameters()] for block in blocks]
        for _ in range(_slots_for(blocks, _GRADIENT_SLOTS))
    ]
    forward: dict[int, list[float]] = {index: [] for index in stages}
    backward: dict[int, list[float]] = {index: [] for index in stages}
    began = now()
    for run in range(repeats + 1):
        if run >= MIN_RUNS and now() - began > BLOCK_S * len(blocks):
            break
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
            stages[index].backward(0, gradients[index], slots[run % len(slots)][index], index > 0)
            backward[index].append(now() - started)
    return {index: (median(forward[index][1:]), median(backward[index][1:])) for index in stages}


def _slots_for(blocks: Sequence[nn.Module], most: int) -> int:
    """Return how many gradients take turns, at most ``most``."""
    size = sum(4 * parameter.numel() for block in blocks for parameter in block.parameters())
    return max(1, min(most, _SLOT_BYTES // max(1, size)))


Vector = npt.NDArray[np.float32]
VECTOR_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""Sizes of the vectors that are copied and summed, in bytes."""
PROBE_EPOCH = 1 << 31
"""Epoch number of the samples that are loaded for a measurement; no step has it."""
_REFERENCE_BYTES = 1 << 20
_CACHE_BYTES = 4 << 20
"""More than the private caches of a core hold."""
_GRADIENT_SLOTS, _SLOT_BYTES = 4, 64 << 20
"""Gradients that take turns in the measurement of a backward, and their bytes at most: large ones fit in no cache."""
_LONG_S = 0.02
"""If a micro-batch takes longer than this, the caches that its blocks find do not matter."""
_LOAD_SAMPLES = 256
"""Maximum number of samples that are loaded for a measurement."""
_MAX_BATCHED_ROWS = 2048
"""Maximum number of samples in the measurement of batched shards."""


@dataclass(frozen=True)
class ShardComputation:
    """How a device computes its shards."""

    batched: int = 1
    """Shards in one batch, at most."""
    in_pieces: bool = False
    """Samples are loaded while the rank waits, piece by piece (``PrefetchedBatch``)."""
    on_cores: bool = True
    """The blocks are computed by cores, not by a GPU."""


def measure_costs(
    costs: Sequence[Block],
    blocks: Sequence[nn.Module],
    data: Dataset,
    loss: Loss,
    optimizer: OptimizerSettings,
    rows: int,
    how: ShardComputation,
    sizes: Sequence[int] = VECTOR_BYTES,
) -> dict[str, Any]:
    """Measure this machine for micro-batches of ``rows`` samples.

    ``costs``: the profile of ``blocks``. ``sizes``: bytes of the vectors for the memory bandwidth.
    """
    batched_shards = how.batched
    few = max(1, min(rows, len(data), _LOAD_SAMPLES))
    many = min(few * batched_shards, len(data), _LOAD_SAMPLES)
    counts = [few, many] if many > few else sorted({max(1, few // 4), few})
    batch = data.batch(np.arange(counts[-1], dtype=np.int64), epoch=0, seed=0)
    starts = _start_seconds(costs, blocks, batch[0][:few]) if how.on_cores else [0.0] * len(blocks)
    fixed, each = measure_update(optimizer, sum(one.weight_bytes for one in costs))
    return {
        "rows": rows,
        "blocks": [{**_block_values(one), "start_s": start} for one, start in zip(costs, starts, strict=True)],
        "load": [(count, _load_seconds(data, count, how.in_pieces)) for count in counts],
        "loss": [(count, _loss_seconds(blocks, batch[1][:count], loss)) for count in counts],
        "update_fixed_s": fixed,
        "update_s": each,
        "joint": batched_shards,
        "joint_s": _batched_seconds(blocks, batch[0], rows, batched_shards),
        **measure_memory(sizes),
        "cores": available_cores(),
    }


def _block_values(block: Block) -> dict[str, Any]:
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


def median_seconds(call: Callable[[], object], repeats: int = 7, cold: bool = True) -> float:
    """Return the median time of ``call`` in seconds. ``cold``: flush the caches before each run, as a step does.

    A run before the first one, which may load code, does not count.
    """
    now, found = timer(), []
    call()
    other = np.empty(_CACHE_BYTES if cold else 0, np.uint8)
    for _ in range(repeats):
        other.fill(0)
        started = now()
        call()
        found.append(now() - started)
    return median(found)


def measure_memory(sizes: Sequence[int] = VECTOR_BYTES) -> dict[str, Any]:
    """Measure seconds per byte of a copy and of a sum, by vector size; also those of the size nearest to 1 MiB."""
    copied, added = [], []
    for size in sizes:
        first, second, third = (np.ones(size // 4, np.float32) for _ in range(3))
        turns = max(1, _REFERENCE_BYTES // size)

        def copy(one: Vector = first, into: Vector = third, turns: int = turns) -> None:
            for _ in range(turns):
                np.copyto(into, one)

        def add(one: Vector = first, other: Vector = second, into: Vector = third, turns: int = turns) -> None:
            for _ in range(turns):
                np.add(one, other, out=into)

        copied.append((size, median_seconds(copy, cold=False) / (turns * size)))
        added.append((size, median_seconds(add, cold=False) / (turns * size)))
    middle = min(range(len(sizes)), key=lambda index: abs(sizes[index] - _REFERENCE_BYTES))
    return {"copy_s": copied[middle][1], "add_s": added[middle][1], "copy_at": copied, "add_at": added}


def _start_seconds(costs: Sequence[Block], blocks: Sequence[nn.Module], inputs: Tensor) -> list[float]:
    """Measure by how much each block takes longer if other work has run before it, such as messages in a pipeline.

    Its code, weights and inputs then come from far caches. In its cost it follows the block before it.
    """
    if sum(one.seconds for one in costs) > _LONG_S or any(True for block in blocks for _ in block.buffers()):
        return [0.0] * len(blocks)  # a forward would change the buffers
    found = []
    for block in blocks:
        layers = layers_of([block])
        stage = ChainStage(layers) if layers is not None else None
        compute = functools.partial(stage.forward, 0, seed=0) if stage is not None else block
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            run = functools.partial(compute, inputs)
            found.append(max(0.0, median_seconds(run) - median_seconds(run, cold=False)))
            inputs = run()
    return found


def _loss_seconds(blocks: Sequence[nn.Module], targets: torch.Tensor, loss: Loss) -> float:
    if loss is not cross_entropy or targets.dim() != 1:
        return 0.0  # small compared with blocks that autograd computes
    by_hand = CrossEntropy()
    last = [one for one in blocks[-1].modules() if isinstance(one, nn.Linear)]
    outputs = torch.zeros(len(targets), last[-1].out_features) if last else None
    return 0.0 if outputs is None else median_seconds(lambda: float(by_hand(outputs, targets, 1.0)[0].sum()))


def _load_seconds(data: Dataset, rows: int, in_pieces: bool) -> float:
    """Measure the loading of ``rows`` random samples, as in an epoch, into a reused buffer."""
    buffer, generator = SampleBuffer(data.allocate(rows)), np.random.default_rng(0)

    def load() -> None:
        samples = generator.integers(len(data), size=rows)
        sample_fingerprint(samples)
        if not in_pieces:
            data.batch(samples, epoch=PROBE_EPOCH, seed=0, out=buffer.batch)
            return
        batch = PrefetchedBatch(data, samples, PROBE_EPOCH, 0, buffer)
        while not batch.complete:
            batch.load_piece()
        batch.finish()

    return median_seconds(load)


def measure_update(optimizer: OptimizerSettings, weight_bytes: int) -> tuple[float, float]:
    """Measure an update of this many bytes of weights, up to 4 MiB: its fixed seconds, and its seconds per byte."""
    elements = min(weight_bytes // 4, 1 << 20) or 1
    fixed = _update_seconds(optimizer, 1)
    return fixed, max(0.0, _update_seconds(optimizer, elements) - fixed) / (4 * elements)


def _update_seconds(optimizer: OptimizerSettings, elements: int) -> float:
    weights, gradient = torch.zeros(elements), torch.zeros(elements)
    update = make_update(optimizer, weights, [torch.zeros(elements) for _ in range(optimizer.num_moments)])
    return median_seconds(lambda: update(gradient, optimizer.lr, 0))


def _batched_seconds(blocks: Sequence[nn.Module], inputs: torch.Tensor, rows: int, batched_shards: int) -> float:
    """Measure forward and backward of several micro-batches as one batch; 0 if the model does not allow it."""
    layers = layers_of(blocks)
    if batched_shards < 2 or layers is None or batched_shards * rows > _MAX_BATCHED_ROWS:
        return 0.0
    stage = ChainStage(layers)
    many = torch.cat([inputs] * -(-batched_shards * rows // len(inputs)))[: batched_shards * rows]
    intos = [[torch.zeros_like(one) for block in blocks for one in block.parameters()] for _ in range(batched_shards)]
    gradient = torch.ones(len(many), intos[0][-1].shape[0])

    def run() -> None:
        stage.forward(0, many, 0)
        stage.backward_batched(0, gradient, rows, intos, lambda _: None)

    return median_seconds(run)
