"""Loss functions, their reductions, and the gradient of a loss over a global batch that is cut into shards.

A loss is a function of (outputs, targets). What it returns for a shard of n of the batch's N samples decides what is
minimised, as in plain PyTorch on the whole batch:

    reduction   the function returns           minimised over the batch   a shard adds to the gradient
    mean        the mean over the samples      the mean                   n/N times its own
    sum         the sum over the samples       the sum                    its own
    none        a value (or row) a sample      the mean                   1/N times that of its sum

Hoop's own losses, which have names, return the sum and are minimised as the mean unless a job states otherwise.
``engine/loss_reduction.py`` finds out which reduction a user's function has.

A stage computes: some of the model's blocks, forward and backward, one micro-batch at a time.

What a backward needs is kept under the micro-batch's number from its forward on. Gradients go into a slot of the arena,
given as views, so nothing is allocated that lasts.
"""

from __future__ import annotations

import importlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from hoop.errors import InternalError, InvalidArgument

Loss = Callable[[Tensor, Tensor], Tensor]
MEAN, SUM, NONE = REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over samples; for sequences (batch, time, classes) the mean over time of each sample."""
    if outputs.dim() == 3:
        each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
        return each / outputs.shape[1]
    return F.cross_entropy(outputs, targets, reduction="sum")


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over samples, the mean over each sample's elements."""
    return F.mse_loss(outputs, targets, reduction="sum") / max(1, outputs[0].numel())


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mean_squared_error}


def loss_named(name: str) -> Loss:
    if name not in LOSSES:
        raise InvalidArgument(f"loss: {name!r} is unknown; known: {', '.join(LOSSES)}")
    return LOSSES[name]


def hits(outputs: Tensor, targets: Tensor) -> float:
    """How many samples are classified right; for sequences the share of each sample's positions.

    Classes are the last dimension of the outputs or, as ``nn.CrossEntropyLoss`` has it, the second. 0 for regression,
    and where the shapes are not those of a classification.
    """
    if targets.is_floating_point() or outputs.dim() < 2:
        return 0.0
    for dim in (-1, 1):
        if outputs.select(dim, 0).shape == targets.shape:
            right = (outputs.argmax(dim) == targets).float()
            return float(right.sum()) if right.dim() == 1 else float(right.flatten(1).mean(1).sum())
    return 0.0


def called(function: Loss) -> str:
    """A loss function's name, as its user would recognise it."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else str(function)


def returned(function: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """What a user's loss function returns, if it is a tensor of a form that some reduction has."""
    try:
        found: Any = function(outputs, targets)
    except Exception as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # by Python code, which the traceback names
        raise InvalidArgument(f"loss: {called(function)} of (outputs, targets) failed: {error}") from error
    if not isinstance(found, Tensor):
        raise InvalidArgument(
            f"loss: {called(function)} returned {type(found).__name__}, which is not a tensor; return the loss as a "
            "scalar tensor (the mean or the sum over the samples) or as a value a sample, without .item()"
        )
    if found.numel() != 1 and (not found.dim() or len(found) != len(targets)):
        raise InvalidArgument(
            f"loss: {called(function)} returned a tensor of shape {list(found.shape)} for {len(targets)} samples; "
            "return a scalar (the mean or the sum over the samples) or a value a sample"
        )
    return found


@dataclass(frozen=True)
class Criterion:
    """A loss function and its reduction: what the value and gradient of a shard count for in the global batch."""

    function: Loss
    returns: str
    """What the function returns for some samples: ``mean``, ``sum`` or ``none``."""
    minimised: str
    """``mean`` or ``sum``, over the global batch."""
    check: Callable[[Tensor, Tensor], None] | None = None
    """Called with the outputs and targets of every shard before the function; raises where ``returns`` is not true."""

    @classmethod
    def of(
        cls, function: Loss, reduction: str, check: Callable[[Tensor, Tensor], None] | None = None
    ) -> Criterion:
        """A user's function, which is minimised as it says."""
        return cls(function, reduction, SUM if reduction == SUM else MEAN, check)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The function's scalar for these samples; of values a sample, their sum."""
        if self.check is not None:
            self.check(outputs, targets)
        found = returned(self.function, outputs, targets)
        if self.returns == NONE and found.dim() and len(found) == len(targets):
            return found.flatten(1).mean(1).sum() if found.dim() > 1 else found.sum()
        if found.numel() != 1 or (self.returns == NONE and len(targets) != 1):
            wanted = f"a value for each of {len(targets)} samples" if self.returns == NONE else "a scalar"
            raise InvalidArgument(
                f"loss: {called(self.function)} returned a tensor of shape {list(found.shape)}, and its reduction is "
                f"{self.returns!r}: {wanted}; state another reduction, or return that"
            )
        return found if not found.dim() else found.reshape(())

    def share(self, samples: int, batch: int) -> float:
        """What the gradient of a shard's value is multiplied by: the shard has ``samples`` of the global batch."""
        if self.minimised == SUM:
            return 1.0
        return samples / batch if self.returns == MEAN else 1.0 / batch

    def figure(self, value: Any, samples: int, batch: int) -> Any:
        """A shard's value as it is summed over shards: that sum divided by ``batch`` is the loss of the batch."""
        if self.minimised == SUM:
            return value * batch
        return value * samples if self.returns == MEAN else value


class CrossEntropy:
    """Cross-entropy and its gradient of class scores (batch, classes), by hand: half the time of autograd's."""

    def __init__(self) -> None:
        self._minus = torch.empty(0, 1)

    def __call__(self, outputs: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Each sample's loss, and ``scale`` times the gradient of their sum."""
        logs = torch.log_softmax(outputs, 1)
        loss = F.nll_loss(logs, targets, reduction="none")
        gradient = logs.exp_()
        if len(self._minus) != len(targets):
            self._minus = torch.full((len(targets), 1), -1.0)
        if gradient.is_cuda:  # adding by index has no fixed order there
            classes = torch.arange(gradient.shape[1], device=gradient.device)
            gradient.sub_((classes == targets.unsqueeze(1)).float())
        else:
            gradient.scatter_add_(1, targets.unsqueeze(1), self._minus)
        return loss, gradient.mul_(scale)


class Objective:
    """A loss with its gradient, in the quickest way there is for it."""

    def __init__(self, criterion: Criterion) -> None:
        quick = criterion.function is cross_entropy and criterion.minimised == MEAN
        self.by_hand = CrossEntropy() if quick else None
        self._criterion = criterion

    def __call__(self, outputs: Tensor, targets: Tensor, batch: int) -> tuple[float | Tensor, Tensor]:
        """A shard's figure (a tensor where it is still being computed), and its part of the gradient of the batch.

        ``batch``: how many samples the global batch has.
        """
        if self.by_hand is not None and outputs.dim() == 2:
            losses, gradient = self.by_hand(outputs, targets, 1.0 / batch)
            return figure(losses.sum()), gradient
        criterion, samples = self._criterion, len(targets)
        outputs = outputs.detach().requires_grad_()
        with torch.enable_grad():
            loss = criterion.value(outputs, targets)
            found: tuple[Tensor | None, ...] = (None,)
            if loss.requires_grad:
                share = criterion.share(samples, batch)
                found = torch.autograd.grad(loss * share, outputs, allow_unused=True)
        if found[0] is None:
            raise InvalidArgument(
                f"loss: no gradient goes from what {called(criterion.function)} returned to the outputs; compute it "
                "from them without .detach(), .item(), .argmax() and torch.no_grad()"
            )
        return criterion.figure(figure(loss), samples, batch), found[0]


def figure(loss: Tensor) -> float | Tensor:
    """As a number, unless that would mean waiting for a GPU."""
    return loss.detach() if loss.is_cuda else float(loss.detach())


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
