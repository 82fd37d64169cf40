"""A stage on a GPU whose forward and backward were recorded once and are played back.

A model of some hundred small kernels takes the processor longer to launch than the GPU to compute. A CUDA graph is
launched as one. It computes at fixed addresses, so every micro-batch that is under way at a time has a lane of its own:

    inputs ─copy─▶ lane.inputs ─ forward graph ─▶ lane.outputs       (kept for the backward: the lane's memory)
    gradient ─copy─▶ lane.gradient ─ backward graph ─▶ lane.row ─copy─▶ the slot's row; the input's gradient

Shards that are not whole (of an epoch's last batch) are computed without a graph, at every rank alike, and so is what
cannot be recorded: blocks that draw random numbers, and modules whose code is not known to do the same each time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hoop.engine.stages.stage import After, AutogradStage, Stage, Views

_KNOWN = ("torch.nn.", "hoop.models.")
_TRIAL = -1
"""The number of a micro-batch that is none."""


class Row(list[Tensor]):
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
class _Lane:
    """Memory and graphs of one micro-batch at a time."""

    inputs: Tensor
    outputs: Tensor
    gradient: Tensor
    row: Row
    returned: Tensor | None
    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph


class CapturedStage(Stage):
    """Plays back what another stage computes."""

    def __init__(
        self, inner: AutogradStage, blocks: nn.Module, rows: int, wants_input: bool, row: Callable[[], Row]
    ) -> None:
        """``rows``: samples of a whole shard; ``row`` makes room for a gradient."""
        self._inner, self._blocks, self._wants_input, self._new_row = inner, blocks, wants_input, row
        self._rows = rows
        self._free: list[_Lane] = []
        self._under_way: dict[int, _Lane] = {}
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
        assert isinstance(into, Row), "gradients go to a row"
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

    def _lane(self, inputs: Tensor) -> _Lane | None:
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

    def _record(self, inputs: Tensor) -> _Lane:
        inner, inputs, row = self._inner, inputs.clone(), self._new_row()
        forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(forward, capture_error_mode="thread_local"):
            outputs = inner.forward(_TRIAL, inputs, 0)
        gradient = torch.empty_like(outputs)
        with torch.cuda.graph(backward, pool=forward.pool(), capture_error_mode="thread_local"):
            returned = inner.backward(_TRIAL, gradient, row, self._wants_input)
        return _Lane(inputs, outputs, gradient, row, returned, forward, backward)
