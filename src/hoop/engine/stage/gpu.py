"""A GPU as a rank uses it: which one, how it is made to compute the same bits each time, and the way up to it.

cpu      none
cuda     the GPUs of the host, dealt out to the job's devices on it; several devices may share one
auto     cuda where every device of the job has it, else none: all ranks compute alike
mirror   all that is done for a GPU, with the copy in host memory: for tests where there is none

A stage on a GPU whose forward and backward were recorded once and are played back.

A model of some hundred small kernels takes the processor longer to launch than the GPU to compute. A CUDA graph is
launched as one. It computes at fixed addresses, so every micro-batch that is under way at a time has a lane of its own:

    inputs ─copy─▶ lane.inputs ─ forward graph ─▶ lane.outputs       (kept for the backward: the lane's memory)
    gradient ─copy─▶ lane.gradient ─ backward graph ─▶ lane.row ─copy─▶ the slot's row; the input's gradient

Shards that are not whole (of an epoch's last batch) are computed without a graph, at every rank alike, and so is what
cannot be recorded: blocks that draw random numbers, and modules whose code is not known to do the same each time.

A stage that is computed on a GPU: its state stays in the arena, and a twin of its blocks has a copy up there.

    arena   weights ──(1)──▶ GPU   weights of the twin           (1) a step begins: one copy, from pinned memory
                                   forward, backward             (2) a row a gradient slot, as in the arena; rows that
                                   rows ◀─(2)                        are complete halves of a node are added up there
    arena   slots ◀──(3)──── GPU   a node's row                  (3) once the rank's shards of a node are in: one copy

So collectives, updates, recovery and checkpoints find in the arena what they find without a GPU. A step moves the
weights up once and a gradient down once for each node that the rank holds (one, where its shards lie in a row),
however many shards it computes.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.registry import Operation
from hoop.collectives.shard_tree import MergePlan, SlotMerge
from hoop.engine.rank_context import RankContext
from hoop.engine.settings import Settings
from hoop.engine.stage.autograd import After, AutogradStage, Stage, Views
from hoop.engine.stage.provenance import mark
from hoop.engine.stage.state import (
    HITS,
    LOSS,
    NOTHING,
    SAMPLES,
    TAIL,
    Figures,
    StageState,
    StateLayout,
    StateVectors,
    adopt,
    computing,
)
from hoop.errors import FailedPrecondition
from hoop.memory.dtypes import dtype
from hoop.plan.instructions import InstructionKind
from hoop.plan.plan import Plan


class Accelerator:
    """Where a rank computes, if not on its cores."""

    def __init__(self, device: torch.device, tf32: bool = False) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.set_device(device)  # of this thread
            _be_deterministic(tf32)
            self._uploads = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def up(self, tensor: Tensor) -> Tensor:
        """A copy there. The original may be written over at once, and nothing that is being computed is waited for."""
        if tensor.device == self.device:
            return tensor
        if not self.cuda:
            return tensor.to(self.device)
        with torch.cuda.stream(self._uploads):
            copy = tensor.to(self.device)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self._uploads)
        copy.record_stream(computing)
        return copy

    def staging(self, count: int) -> Tensor:
        """Host memory that a GPU copies from and to without help."""
        return torch.zeros(count, pin_memory=self.cuda)

    def wait(self) -> None:
        """Until everything is computed and copied."""
        if self.cuda:
            torch.cuda.current_stream(self.device).synchronize()


def accelerator_of(world: RankContext, settings: Settings) -> Accelerator | None:
    """What this rank computes on; every rank must ask, and all get the same kind or the same error."""
    if settings.accelerator == "cpu":
        return None
    if settings.accelerator == "mirror":
        return Accelerator(torch.device("cpu"))
    problem = _problem()
    mine, seen = np.array([bool(problem)], np.int32), np.zeros(world.size, np.int32)
    world.communicator.run(Operation("all_gather", 1, dtype("int32")), mine, seen, settings.timeout_s)
    without = [rank for rank, lacks in enumerate(seen.tolist()) if lacks]
    if without and settings.accelerator == "auto":
        return None
    if without:
        raise FailedPrecondition(
            f"accelerator: cuda was asked for, and rank {', '.join(map(str, without))} of {world.size} has none"
            f"{f': {problem}' if problem else ''}; or use --accelerator auto or cpu"
        )
    index, _ = world.neighbours
    return Accelerator(torch.device("cuda", index % torch.cuda.device_count()), settings.tf32)


def _problem() -> str:
    """Why this process cannot use CUDA, with the remedy; empty if it can."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is built without CUDA; install one that is built with it (pytorch.org)"
    if torch.cuda._is_in_bad_fork():
        return "this program used CUDA before its devices were forked; train first, or in another process"
    if not torch.cuda.device_count():
        return "no GPU is visible; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return f"CUDA does not start ({error}); look at nvidia-smi"
    return ""


def _be_deterministic(tf32: bool) -> None:
    """The same kernels for the same shapes, none that add in the order of arrival; what has no such kernel warns."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32


_KNOWN = ("torch.nn.", "hoop.models.")
_TRIAL = -1
"""The number of a micro-batch that is none."""


class OutputRow(list[Tensor]):
    """The gradients of a stage's parameters, and the vector they are views of."""

    def __init__(self, whole: Tensor, views: Sequence[Tensor], trained: int) -> None:
        super().__init__(views)
        self.whole, self.flat = whole, whole[:trained]


def capturable(blocks: nn.Module) -> bool:
    """Whether these are modules of PyTorch's or Hoop's own: what they launch depends on shapes alone."""
    return all(
        type(one).__module__.startswith(_KNOWN)
        and not (one._forward_hooks or one._forward_pre_hooks or one._backward_hooks)
        for one in blocks.modules()
        if type(one) is not nn.ModuleList
    )


@dataclass
class _GraphLane:
    """Memory and graphs of one micro-batch at a time."""

    inputs: Tensor
    outputs: Tensor
    gradient: Tensor
    row: OutputRow
    returned: Tensor | None
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph


class CudaGraphStage(Stage):
    """Plays back what another stage computes."""

    def __init__(
        self,
        inner: AutogradStage,
        blocks: nn.Module,
        rows: int,
        wants_input: bool,
        row: Callable[[], OutputRow],
    ) -> None:
        """``rows``: samples of a whole shard; ``row`` makes room for a gradient."""
        self._inner, self._blocks, self._wants_input, self._new_row = inner, blocks, wants_input, row
        self._rows = rows
        self._free: list[_GraphLane] = []
        self._under_way: dict[int, _GraphLane] = {}
        self._possible: bool | None = None
        """Unknown until it was tried."""

    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        lane = self._lane(inputs)
        if lane is None:
            return self._inner.forward(micro, inputs, seed)
        lane.inputs.copy_(inputs)
        lane.forward.replay()
        self._under_way[micro] = lane
        return lane.outputs

    def backward(
        self, micro: int, gradient: Tensor, into: Views, wants_input: bool, after: After | None = None
    ) -> Tensor | None:
        lane = self._under_way.pop(micro, None)
        if lane is None:
            return self._inner.backward(micro, gradient, into, wants_input, after)
        assert isinstance(into, OutputRow), "gradients go to a row"
        lane.gradient.copy_(gradient)
        lane.backward.replay()
        into.flat.copy_(lane.row.flat)
        self._free.append(lane)
        # Its memory may be the next forward's.
        return None if lane.returned is None else lane.returned.clone()

    def backward_input(self, micro: int, gradient: Tensor, wants_input: bool) -> Tensor | None:
        raise AssertionError("a backward in two halves is not recorded")

    def backward_weight(self, micro: int, into: Views) -> None:
        raise AssertionError("a backward in two halves is not recorded")

    def evaluate(self, inputs: Tensor) -> Tensor:
        return self._inner.evaluate(inputs)

    # ---- recording

    def _lane(self, inputs: Tensor) -> _GraphLane | None:
        """One that is free, or a new one."""
        if len(inputs) != self._rows:
            return None
        if self._possible is None:
            self._possible = self._try(inputs)
        if not self._possible:
            return None
        if self._free:
            return self._free.pop()
        try:
            return self._record(inputs)
        except RuntimeError as error:
            self._possible = False
            warnings.warn(f"this stage is computed without a CUDA graph: {error}", stacklevel=2)
            return None

    def _try(self, inputs: Tensor) -> bool:
        """Computes twice, as PyTorch asks for before a recording; whether nothing was drawn."""
        inner, device = self._inner, inputs.device
        was = inner.seeds
        inner.seeds = False
        before = torch.cuda.get_rng_state(device)
        kept = [one.clone() for one in self._blocks.buffers()]
        computing, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side.wait_stream(computing)
        with torch.cuda.stream(side):
            for _ in range(2):
                outputs = inner.forward(_TRIAL, inputs, 0)
                inner.backward(_TRIAL, torch.ones_like(outputs), self._new_row(), self._wants_input)
        computing.wait_stream(side)
        for one, value in zip(self._blocks.buffers(), kept, strict=True):
            one.data.copy_(value)  # in silence: graphs of other micro-batches may be under way that hold it
        drawn = not torch.equal(before, torch.cuda.get_rng_state(device))
        inner.seeds = was and drawn
        return not drawn

    def _record(self, inputs: Tensor) -> _GraphLane:
        inner, inputs, row = self._inner, inputs.clone(), self._new_row()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, capture_error_mode="thread_local"):
            outputs = inner.forward(_TRIAL, inputs, 0)
        gradient = torch.empty_like(outputs)
        with torch.cuda.graph(backward, pool=forward.pool(), capture_error_mode="thread_local"):
            returned = inner.backward(_TRIAL, gradient, row, self._wants_input)
        return _GraphLane(inputs, outputs, gradient, row, returned, forward, backward)


class GpuStageState(StageState):
    """A stage's state on one rank, with a copy on its GPU."""

    def __init__(
        self,
        accelerator: Accelerator,
        captures: bool,
        vectors: StateVectors,
        blocks: Sequence[nn.Module],
        first_block: int,
        settings: Settings,
        name: str,
        updates: bool,
        chain: bool,
    ) -> None:
        """``captures``: forward and backward may be recorded once and played back."""
        twins = copy.deepcopy(nn.ModuleList(blocks)).to(accelerator.device)
        settings = dataclasses.replace(settings, bucket_bytes=0)  # what comes down comes in one piece
        super().__init__(vectors, blocks, first_block, settings, name, updates, chain)
        self._accelerator, device = accelerator, accelerator.device
        self._channels_last = settings.channels_last
        self._modules = list(zip(nn.ModuleList(blocks).modules(), twins.modules(), strict=True))
        twin = StateLayout(twins)
        self._copy = torch.zeros(twin.state, device=device)
        adopt(twin, self._copy)
        self._shifting = self._copy[twin.trained :]
        """The buffers' part."""
        self._start = self._shifting.clone()
        self._shifts: dict[int, Tensor] = {}
        self._counts, self._counts_start, self._counts_added = _counted(twin, device)
        self.stage, _ = computing(list(twins), first_block, twin, settings, chain, device)
        if captures and isinstance(self.stage, AutogradStage) and accelerator.cuda and capturable(twins):
            rows = -(-settings.batch_size // settings.micros)
            self.stage = CudaGraphStage(self.stage, twins, rows, first_block > 0, self._new_row)
        self._frozen = list(zip(self.layout.frozen, twin.frozen, strict=True))
        """What changes when a checkpoint is read, before the first step, and never again."""
        self._up, self._down = accelerator.staging(twin.state), accelerator.staging(twin.state)
        self._rows: list[Tensor] = []
        self._into: list[OutputRow] = []
        self._pending: list[tuple[int, int, Figures]] = []
        """Shards that came up, the prints of their samples, and what they measured."""
        self._above: set[int] = set()
        """Slots whose rows have not come down."""
        self._complete: set[int] = set()
        """Shards after which a node is as complete as this rank makes it."""

    def _new_row(self) -> OutputRow:
        """Room for a gradient, and for what happens to the buffers."""
        whole = torch.zeros(self.layout.state, device=self._accelerator.device)
        return OutputRow(whole, self.layout.views(whole)[: len(self.layout.parameters)], self.layout.trained)

    # ---- up

    def near(self, tensor: Tensor) -> Tensor:
        return self._accelerator.up(tensor)

    def refresh(self) -> None:
        """(1)"""
        self._accelerator.wait()  # the last copy may be under way
        np.copyto(self._up.numpy(), self.state_array)
        self._copy.copy_(self._up, non_blocking=True)
        if len(self._counts):
            counts = torch.cat([one.reshape(-1) for one in _counters(self.layout)])
            self._counts.copy_(counts, non_blocking=True)
        while self._frozen:
            own, twin = self._frozen.pop()
            twin.data.copy_(own.data)
        for module, other in self._modules:
            other.training = module.training

    def begin(self) -> None:
        super().begin()
        self.refresh()
        self._start.copy_(self._shifting)
        self._counts_start.copy_(self._counts)

    def evaluate(self, inputs: Tensor) -> Tensor:
        return self.stage.evaluate(self._laid_out(inputs)).cpu()

    # ---- gradients

    def arrange(self, holding: MergePlan, room: int = 0) -> None:
        for slot in sorted(self._above):
            self._bring_down(slot)
        super().arrange(holding, room)
        if len(self.slots) > len(self._rows):
            self._into = [self._new_row() for _ in self.slots]
            self._rows = [row.whole for row in self._into]
        self._complete = _complete(holding)

    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        return super().forward(micro, self._laid_out(inputs), seed)

    def _laid_out(self, inputs: Tensor) -> Tensor:
        inputs = self.near(inputs)
        turned = self._channels_last and inputs.dim() == 4
        return inputs.contiguous(memory_format=torch.channels_last) if turned else inputs

    def _set_aside(self, micro: int) -> None:
        self._shifts[micro] = self._shifting - self._start
        self._shifting.copy_(self._start)
        torch.sub(self._counts, self._counts_start, out=self._counts_added)
        self._counts.copy_(self._counts_start)

    def into(self, micro: int) -> OutputRow:
        return self._into[self._landings[micro].slot]

    def landed(self, micro: int, figures: Figures, shards: int, fed: int = 0, merged: bool = False) -> None:
        shift = self._shifts.pop(micro, None)
        if shift is not None:
            row = self._rows[self._landings[micro].slot]
            torch.div(shift, shards, out=row[self.layout.trained :])
        self._land(micro, figures, fed)

    def skipped(self, micro: int) -> None:
        self._rows[self._landings[micro].slot].zero_()
        self._land(micro, NOTHING)

    def _land(self, micro: int, figures: Figures, fed: int = 0) -> None:
        """(2)"""
        landing = self._landings[micro]
        for into, other in landing.merges:
            self._rows[into].add_(self._rows[other])
            self._above.discard(other)
        self._pending.append((micro, fed, figures))
        slot = _outcome(landing)
        self._above = (self._above - {landing.slot}) | {slot}
        if micro in self._complete:
            self._bring_down(slot)

    def _bring_down(self, slot: int) -> None:
        """(3); with it, what the shards have measured, which lies in the arena alone."""
        self._down.copy_(self._rows[slot], non_blocking=True)
        measured = _numbers([figures[0] for _, _, figures in self._pending])
        self._accelerator.wait()
        np.copyto(self.slots[slot, : self.layout.state], self._down.numpy())
        self._above.discard(slot)
        tails = self.slots[:, self.layout.state :]
        for (micro, fed, (_, hits, samples)), loss in zip(self._pending, measured, strict=True):
            landing = self._landings[micro]
            tail = tails[landing.slot]
            tail[:] = 0
            tail[LOSS], tail[HITS], tail[SAMPLES] = loss, hits, samples
            if fed:
                mark(tail[TAIL:], micro % self._shards, self.device, fed)
            for into, other in landing.merges:
                tails[into] += tails[other]
        self._pending.clear()

    def counted(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(_counters(self.layout), self._counts_added.cpu(), strict=True))


def _counters(layout: StateLayout) -> list[Tensor]:
    """Batch norm's counters of batches; other buffers of whole numbers (masks) do not change."""
    return [one for one in layout.counters if one.dtype == torch.int64 and one.numel() == 1]


def _counted(twin: StateLayout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The twin's counters as one vector, what they were when the step began, and what a shard added."""
    places = _counters(twin)
    counts, start, added = torch.zeros(3, len(places), dtype=torch.int64, device=device)
    for index, one in enumerate(places):
        one.data = counts[index : index + 1].view(one.shape)
    return counts, start, added


def _numbers(losses: Sequence[float | Tensor]) -> list[float]:
    """All of them by one copy."""
    there = [one.reshape(()) for one in losses if isinstance(one, Tensor)]
    here = iter(torch.stack(there).tolist() if there else [])
    return [next(here) if isinstance(one, Tensor) else one for one in losses]


def _outcome(landing: SlotMerge) -> int:
    """The slot that a landing leaves its node in."""
    return landing.merges[-1][0] if landing.merges else landing.slot


def _complete(holding: MergePlan) -> set[int]:
    """Shards whose node nothing that lands later is added to, or adds itself to."""
    found = set()
    for index, (micro, landing) in enumerate(zip(holding.order, holding.landings, strict=True)):
        slot = _outcome(landing)
        for later in holding.landings[index + 1 :]:
            if any(slot in pair for pair in later.merges):
                break
            if later.slot == slot:
                found.add(micro)
                break
        else:
            found.add(micro)
    return found


def holder(accelerator: Accelerator | None, plan: Plan, settings: Settings) -> Callable[..., StageState]:
    """What makes a stage, where it is computed: called as ``StageState`` is."""
    if accelerator is None:
        return StageState
    halves = any(one.kind is InstructionKind.BACKWARD_INPUT for rank in plan.ranks for one in rank)
    return partial(GpuStageState, accelerator, settings.graphs and not halves)
