"""A stage computes: some of the model's blocks, forward and backward, one micro-batch at a time.

What a backward needs is kept under the micro-batch's number from its forward on. Gradients go into a slot of the arena,
given as views, so nothing is allocated that lasts.
"""

from __future__ import annotations

import importlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hoop.errors import InternalError

CPU = torch.device("cpu")
Views = Sequence[Tensor]
After = Callable[[int], None]
Segments = Sequence[tuple[Sequence[nn.Module], int]]
"""Blocks whose gradients come together, and how many parameters they have."""


class Stage(ABC):
    """Forward and backward of some blocks."""

    @abstractmethod
    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor: ...

    @abstractmethod
    def backward(
        self, micro: int, gradient: Tensor, into: Views, wants_input: bool, after: After | None = None
    ) -> Tensor | None:
        """Writes the parameters' gradients and returns that of the input, if wanted.

        ``after`` is called with a segment's number when its parameters' gradients are there, the last one's first.
        """

    @abstractmethod
    def backward_input(self, micro: int, gradient: Tensor, wants_input: bool) -> Tensor | None:
        """The first half of ``backward``: the gradient of the input alone, if wanted."""

    @abstractmethod
    def backward_weight(self, micro: int, into: Views) -> None:
        """The second half, for a micro-batch whose first half was run."""

    @abstractmethod
    def evaluate(self, inputs: Tensor) -> Tensor:
        """Forward without a backward to come."""


def seed_block(seed: int, block: int, device: torch.device = CPU) -> None:
    """What a block draws (dropout) depends on the micro-batch and the block, not on who computes it."""
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + block * 0xBF58476D1CE4E5B9) % 2**63)


class AutogradStage(Stage):
    """Any blocks, by autograd."""

    def __init__(
        self,
        segments: Segments,
        first_block: int,
        parameters: Sequence[Tensor],
        *,
        recompute: bool = False,
        precision: torch.dtype | None = None,
        device: torch.device = CPU,
    ) -> None:
        # autograd.grad imports this when it is first given a gradient; imported here, the first step does not wait.
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
        self._segments = [list(blocks) for blocks, _ in segments]
        self._blocks = [block for blocks in self._segments for block in blocks]
        ends = list(itertools.accumulate((count for _, count in segments), initial=0))
        self._owned = [parameters[low:high] for low, high in itertools.pairwise(ends)]
        self._ends = ends
        self._first = first_block
        self._parameters = list(parameters)
        self._recompute = recompute
        self._precision = precision
        self._device = device
        self.seeds = True
        """Whether blocks that may draw are given a seed."""
        self._draws = {id(block): _draws(block) for block in self._blocks}
        self._kept: dict[int, tuple[list[Tensor], list[Tensor], int]] = {}
        self._halves: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def _run(self, segment: int, inputs: Tensor, seed: int) -> Tensor:
        first = self._first + sum(map(len, self._segments[:segment]))
        half, on_cpu = self._precision is not None, self._device.type == "cpu"
        kind = self._precision or torch.bfloat16
        # No cache on a GPU: a recording must not find in it what another one computed.
        with torch.autocast(self._device.type, kind, enabled=half, cache_enabled=on_cpu):
            for index, block in enumerate(self._segments[segment]):
                if self.seeds and self._draws[id(block)]:
                    seed_block(seed, first + index, self._device)
                inputs = block(inputs)
        return inputs.float() if self._precision is not None and inputs.is_floating_point() else inputs

    def _graphs(self, inputs: Tensor, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Each segment's input and output, with a graph between them and none from one segment to the next."""
        ins, outs = [], []
        for segment in range(len(self._segments)):
            inputs = inputs.detach()
            if inputs.is_floating_point() and (segment or self._first):
                inputs.requires_grad_()
            ins.append(inputs)
            inputs = self._run(segment, inputs, seed)
            outs.append(inputs)
        return ins, outs

    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        if self._recompute:
            outputs = self.evaluate(inputs.detach(), seed)
            self._kept[micro] = ([inputs.detach()], [], seed)
            return outputs
        with torch.enable_grad():
            ins, outs = self._graphs(inputs, seed)
        self._kept[micro] = (ins, outs, seed)
        return outs[-1].detach()

    def _graphs_of(self, micro: int) -> tuple[list[Tensor], list[Tensor]]:
        if micro not in self._kept:
            raise InternalError(f"backward of micro-batch {micro} without its forward")
        ins, outs, seed = self._kept.pop(micro)
        if not outs:
            # What forward did to the buffers (batch norm's running statistics) must not happen twice.
            with torch.enable_grad(), buffers_restored(self._blocks):
                ins, outs = self._graphs(ins[0], seed)
        return ins, outs

    def backward(
        self, micro: int, gradient: Tensor, into: Views, wants_input: bool, after: After | None = None
    ) -> Tensor | None:
        ins, outs = self._graphs_of(micro)
        given: Tensor | None = gradient
        for segment in range(len(outs) - 1, -1, -1):
            own = self._owned[segment]
            further = segment > 0 or wants_input
            wanted = [*own, ins[segment]] if further else [*own]
            found = torch.autograd.grad(outs[segment], wanted, given, allow_unused=True) if wanted else ()
            _put(found[: len(own)], into[self._ends[segment] : self._ends[segment + 1]])
            given = found[-1] if further else None
            outs.pop()
            if after is not None:
                after(segment)
        return given

    def backward_input(self, micro: int, gradient: Tensor, wants_input: bool) -> Tensor | None:
        """Through all segments; the weights' half goes through each of them once more."""
        ins, outs = self._graphs_of(micro)
        kept = []
        for segment in range(len(outs) - 1, -1, -1):
            kept.append((outs[segment], gradient))
            if segment or wants_input:
                (gradient,) = torch.autograd.grad(outs[segment], [ins[segment]], gradient, retain_graph=True)
        self._halves[micro] = kept[::-1]
        return gradient if wants_input else None

    def backward_weight(self, micro: int, into: Views) -> None:
        for segment, (outputs, gradient) in enumerate(self._halves.pop(micro)):
            own = self._owned[segment]
            if own:
                found = torch.autograd.grad(outputs, own, gradient, allow_unused=True)
                _put(found, into[self._ends[segment] : self._ends[segment + 1]])

    def evaluate(self, inputs: Tensor, seed: int = 0) -> Tensor:
        with torch.no_grad():
            for segment in range(len(self._segments)):
                inputs = self._run(segment, inputs, seed)
        return inputs


def _put(gradients: Sequence[Tensor | None], into: Views) -> None:
    """Into the views; what was not used has no gradient, which is zero."""
    pairs = [(view, one) for view, one in zip(into, gradients, strict=False) if one is not None]
    if pairs:
        torch._foreach_copy_([view for view, _ in pairs], [one for _, one in pairs])
    for view, one in zip(into, gradients, strict=False):
        if one is None:
            view.zero_()


class buffers_restored:  # noqa: N801 - reads like a statement
    """Copies take the buffers' places meanwhile: what is done to them is forgotten, and a graph may keep them."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        modules = [module for block in blocks for module in block.modules()]
        self._places = [(one._buffers, name) for one in modules for name in one._buffers]

    def __enter__(self) -> None:
        self._before = [buffers[name] for buffers, name in self._places]
        for (buffers, name), before in zip(self._places, self._before, strict=True):
            buffers[name] = None if before is None else before.clone()

    def __exit__(self, *_: object) -> None:
        for (buffers, name), before in zip(self._places, self._before, strict=True):
            buffers[name] = before


_DETERMINED = (
    nn.Linear,
    nn.ReLU,
    nn.Flatten,
    nn.Conv2d,
    nn.BatchNorm2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.ReLU6,
    nn.AdaptiveAvgPool2d,
    nn.Sequential,
)


def _draws(block: nn.Module) -> bool:
    """Whether a block may draw random numbers: all but those that are made of what is known not to."""
    return not all(type(one) in _DETERMINED for one in block.modules())
