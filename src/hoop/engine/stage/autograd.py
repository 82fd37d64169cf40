"""Losses and their reductions over a sharded global batch; forward and backward of a stage with autograd.

A loss is a function of (outputs, targets). Its reduction decides what training minimises, as in plain PyTorch on the
whole batch. For a shard with n of the batch's N samples:

    reduction   the function returns           minimised over the batch   a shard adds to the gradient
    mean        the mean over the samples      the mean                   n/N times its own
    sum         the sum over the samples       the sum                    its own
    none        a value (or row) a sample      the mean                   1/N times that of its sum

Hoop's own losses (``LOSSES``) return the sum, and training minimises the mean unless the job states otherwise.
``engine/loss_reduction.py`` finds the reduction of a user's function.

A ``Stage`` runs forward and backward of consecutive blocks of the model, one micro-batch at a time. It saves what the
backward needs by the number of the micro-batch. Gradients are written into views of a slot in the arena, so a step
allocates no lasting memory.
"""

from __future__ import annotations

import copy
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from hoop.errors import HoopError, InternalError, InvalidArgument

Loss = Callable[[Tensor, Tensor], Tensor]
MEAN, SUM, NONE = REDUCTIONS = ("mean", "sum", "none")


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy, summed over samples; for sequences (batch, time, classes) the mean over time of each sample."""
    if outputs.dim() == 3:
        each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
        return each / outputs.shape[1]
    return F.cross_entropy(outputs, targets, reduction="sum")


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, summed over samples; of each sample the mean over its elements."""
    return F.mse_loss(outputs, targets, reduction="sum") / max(1, outputs[0].numel())


LOSSES: dict[str, Loss] = {"cross_entropy": cross_entropy, "mse": mean_squared_error}


def loss_named(name: str) -> Loss:
    if name not in LOSSES:
        raise InvalidArgument(f"loss: {name!r} is unknown; known: {', '.join(LOSSES)}")
    return LOSSES[name]


def num_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the number of samples classified correctly; of a sequence, the fraction of its positions.

    The result is a scalar on the device of the outputs.
    Classes are the last dimension of the outputs or, as for ``nn.CrossEntropyLoss``, the second. Returns 0 for
    regression, and for shapes that are not those of a classification.
    """
    if targets.is_floating_point() or outputs.dim() < 2:
        return torch.zeros((), device=outputs.device)
    for dim in (-1, 1):
        if outputs.select(dim, 0).shape == targets.shape:
            correct = (outputs.argmax(dim) == targets).float()
            return correct.sum() if correct.dim() == 1 else correct.flatten(1).mean(1).sum()
    return torch.zeros((), device=outputs.device)


@contextmanager
def naming_wrong_targets(outputs: Any, targets: Any) -> Iterator[None]:
    """Replaces PyTorch's error about a target that is none of the classes by one that names it."""
    try:
        yield
    except (IndexError, RuntimeError):
        _check_targets(outputs, targets)
        raise


def _check_targets(outputs: Any, targets: Any) -> None:
    """Raises if targets are class numbers, and one of them is not one of the classes that the model returns."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.dim() < 2:
        return
    if targets.is_floating_point() or targets.is_cuda or not targets.numel():
        return
    classes = outputs.shape[-1 if outputs.dim() == targets.dim() + 1 and outputs.shape[:-1] == targets.shape else 1]
    wrong = targets[(targets < 0) | (targets >= classes)]
    if wrong.numel():
        raise InvalidArgument(
            f"data: the target {int(wrong[0])} is not one of the {classes} classes that the model returns, 0 to "
            f"{classes - 1}; number the classes from 0, or give the model more outputs"
        )


def function_name(function: Loss) -> str:
    """Return a name of a loss function for error messages."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else str(function)


_placed: dict[tuple[int, torch.device], tuple[Any, Any]] = {}
"""Losses by id and device, with their copies there."""


def loss_on(function: Any, device: torch.device) -> Any:
    """A loss whose tensors, such as the weights of classes, are on this device, where the model is.

    The user has made it in host memory, as the data. A module without parameters and a ``functools.partial`` are
    copied, once; any other function moves its tensors itself.
    """
    if device.type in ("cpu", "meta"):
        return function
    key = id(function), device
    if key not in _placed:
        _placed[key] = function, copy_on(function, device)
    return _placed[key][1]


def copy_on(function: Any, device: torch.device) -> Any:
    """A copy of a loss on a device; the loss itself if nothing of it can be moved."""
    if isinstance(function, nn.Module) and not list(function.parameters()):
        return copy.deepcopy(function).to(device)
    if type(function) is functools.partial:
        place = functools.partial(_tensor_on, device)
        keywords = {name: place(value) for name, value in function.keywords.items()}
        return functools.partial(copy_on(function.func, device), *map(place, function.args), **keywords)
    return function


def _tensor_on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def call_loss(function: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Call a user's loss function; raises if it returns neither a scalar tensor nor one value (or row) a sample."""
    try:
        with naming_wrong_targets(outputs, targets):
            found: Any = loss_on(function, outputs.device)(outputs, targets)
    except HoopError:
        raise
    except Exception as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # raised by Python code, which the traceback names
        raise InvalidArgument(f"loss: {function_name(function)} of (outputs, targets) failed: {error}") from error
    if not isinstance(found, Tensor):
        raise InvalidArgument(
            f"loss: {function_name(function)} returned {type(found).__name__}, which is not a tensor; return the loss "
            "as a scalar tensor (the mean or the sum over the samples) or as a value a sample, without .item()"
        )
    if found.numel() != 1 and (not found.dim() or len(found) != len(targets)):
        raise InvalidArgument(
            f"loss: {function_name(function)} returned a tensor of shape {list(found.shape)} for {len(targets)} "
            "samples; return a scalar (the mean or the sum over the samples) or a value a sample"
        )
    return found


@dataclass(frozen=True)
class Criterion:
    """A loss function with its reduction: the weight of a shard's value and gradient in the global batch."""

    function: Loss
    returns: str
    """Reduction that the function applies: ``mean``, ``sum`` or ``none``."""
    minimised: str
    """The reduction over the global batch that training minimises: ``mean`` or ``sum``."""
    check: Callable[[Tensor, Tensor], None] | None = None
    """Function that is called with the loss and the targets of each shard; raises if ``returns`` is wrong for it."""

    @classmethod
    def of(cls, function: Loss, reduction: str, check: Callable[[Tensor, Tensor], None] | None = None) -> Criterion:
        """Return the criterion of a user's function: its own reduction decides what training minimises."""
        return cls(function, reduction, SUM if reduction == SUM else MEAN, check)

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the function's scalar for these samples; if it returns one value a sample, their sum."""
        found = call_loss(self.function, outputs, targets)
        if self.check is not None:
            self.check(found, targets)
        if self.returns == NONE and found.dim() and len(found) == len(targets):
            return found.flatten(1).mean(1).sum() if found.dim() > 1 else found.sum()
        if found.numel() != 1 or (self.returns == NONE and len(targets) != 1):
            expected = f"a value for each of {len(targets)} samples" if self.returns == NONE else "a scalar"
            raise InvalidArgument(
                f"loss: {function_name(self.function)} returned a tensor of shape {list(found.shape)}, and its "
                f"reduction is {self.returns!r}: {expected}; state another reduction, or return that"
            )
        return found if not found.dim() else found.reshape(())

    def gradient_scale(self, samples: int, batch: int) -> float:
        """Return the factor for the gradient of a shard with ``samples`` of the ``batch`` samples of the batch."""
        if self.minimised == SUM:
            return 1.0
        return samples / batch if self.returns == MEAN else 1.0 / batch

    def weighted_value(self, value: Any, samples: int, batch: int) -> Any:
        """Return a shard's value, scaled so that the sum over all shards, divided by ``batch``, is the batch's loss."""
        if self.minimised == SUM:
            return value * batch
        return value * samples if self.returns == MEAN else value


class CrossEntropy:
    """Cross-entropy of class scores (batch, classes) with a hand-written gradient: half the time of autograd."""

    def __init__(self) -> None:
        self._minus_ones, self._one_hot = torch.empty(0, 1), torch.empty(0, 0)

    def __call__(self, outputs: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the loss of each sample, and ``scale`` times the gradient of their sum."""
        logs = torch.log_softmax(outputs, 1)
        loss = F.nll_loss(logs, targets, reduction="none")
        gradient = logs.exp_()
        if gradient.is_cuda:  # scatter_add_ is not deterministic on CUDA
            if len(self._one_hot) != gradient.shape[1]:
                self._one_hot = torch.eye(gradient.shape[1], device=gradient.device)
            gradient.sub_(self._one_hot.index_select(0, targets))
        else:
            if len(self._minus_ones) != len(targets):
                self._minus_ones = torch.full((len(targets), 1), -1.0)
            gradient.scatter_add_(1, targets.unsqueeze(1), self._minus_ones)
        return loss, gradient.mul_(scale)


class Objective:
    """A loss with its gradient; uses the hand-written ``CrossEntropy`` where it applies, otherwise autograd."""

    def __init__(self, criterion: Criterion) -> None:
        is_cross_entropy = criterion.function is cross_entropy and criterion.minimised == MEAN
        self.by_hand = CrossEntropy() if is_cross_entropy else None
        self._criterion = criterion

    def __call__(self, outputs: Tensor, targets: Tensor, batch: int) -> tuple[float | Tensor, Tensor]:
        """Return a shard's weighted loss, and the gradient of the batch's loss with respect to the shard's outputs.

        ``batch``: number of samples of the global batch. The loss is a tensor while a GPU still computes it.
        """
        if self.by_hand is not None and outputs.dim() == 2:
            with naming_wrong_targets(outputs, targets):
                losses, gradient = self.by_hand(outputs, targets, 1.0 / batch)
            return loss_value(losses.sum()), gradient
        criterion, samples = self._criterion, len(targets)
        outputs = outputs.detach().requires_grad_()
        with torch.enable_grad():
            loss = criterion.value(outputs, targets)
            found: tuple[Tensor | None, ...] = (None,)
            if loss.requires_grad:
                scale = criterion.gradient_scale(samples, batch)
                found = torch.autograd.grad(loss * scale, outputs, allow_unused=True)
        if found[0] is None:
            raise InvalidArgument(
                f"loss: no gradient goes from what {function_name(criterion.function)} returned to the outputs; "
                "compute it from them without .detach(), .item(), .argmax() and torch.no_grad()"
            )
        return criterion.weighted_value(loss_value(loss), samples, batch), found[0]


def loss_value(loss: Tensor) -> float | Tensor:
    """Return a loss as a number; on a GPU as a tensor, because a number would have to wait for the GPU."""
    return loss.detach() if loss.is_cuda else float(loss.detach())


CPU = torch.device("cpu")
Views = Sequence[Tensor]
"""Views into which the gradients of a stage's parameters are written, one for each parameter, in order."""
OnSegment = Callable[[int], None]
"""Callback with the number of a segment, when the gradients of its parameters are written."""
Segments = Sequence[tuple[Sequence[nn.Module], int]]
"""Consecutive blocks whose gradients are produced together, with the number of their parameters."""


class Stage(ABC):
    """Forward and backward of consecutive blocks, one micro-batch (``micro``) at a time."""

    @abstractmethod
    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor: ...

    @abstractmethod
    def backward(
        self, micro: int, gradient: Tensor, into: Views, wants_input: bool, on_segment: OnSegment | None = None
    ) -> Tensor | None:
        """Write the gradients of the parameters to ``into``; return that of the input if ``wants_input``.

        ``on_segment`` is called after each segment, from the last to the first.
        """

    @abstractmethod
    def backward_input(self, micro: int, gradient: Tensor, wants_input: bool) -> Tensor | None:
        """Run the first half of ``backward``: return the gradient of the input if ``wants_input``."""

    @abstractmethod
    def backward_weight(self, micro: int, into: Views) -> None:
        """Run the second half of ``backward``, after ``backward_input``: write the gradients of the parameters."""

    @abstractmethod
    def evaluate(self, inputs: Tensor) -> Tensor:
        """Run a forward without a backward."""


def seed_block(seed: int, block: int, device: torch.device = CPU) -> None:
    """Seed PyTorch's generator for a block: dropout depends on micro-batch and block, whatever rank computes them."""
    generator = torch.default_generator
    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index]
    generator.manual_seed((seed * 0x9E3779B97F4A7C15 + block * 0xBF58476D1CE4E5B9) % 2**63)


class AutogradStage(Stage):
    """Forward and backward of any blocks with autograd.

    The blocks are split into segments. Each segment has a graph of its own, so that the gradients of a segment are
    available, and can be reduced, before the backward of the previous segment begins.
    """

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
        self._segments = [list(blocks) for blocks, _ in segments]
        self._blocks = [block for blocks in self._segments for block in blocks]
        ends = list(itertools.accumulate((count for _, count in segments), initial=0))
        self._segment_parameters = [parameters[low:high] for low, high in itertools.pairwise(ends)]
        self._ends = ends
        self._first_block = first_block
        self._parameters = list(parameters)
        self._recompute = recompute
        self._precision = precision
        self._device = device
        self.seed_blocks = True
        """True if the generator is seeded before each block that may draw random numbers."""
        self._random_blocks = {id(block): _is_random(block) for block in self._blocks}
        self._saved: dict[int, tuple[list[Tensor], list[Tensor], int]] = {}
        self._pending_weights: dict[int, list[tuple[Tensor, Tensor]]] = {}

    @property
    def in_flight(self) -> bool:
        """Whether a micro-batch has gone forward and not all of its way backward."""
        return bool(self._saved or self._pending_weights)

    def _run(self, segment: int, inputs: Tensor, seed: int) -> Tensor:
        first = self._first_block + sum(map(len, self._segments[:segment]))
        autocast, on_cpu = self._precision is not None, self._device.type == "cpu"
        precision = self._precision or torch.bfloat16
        # No autocast cache on a GPU: a CUDA graph must not use a tensor that another graph computed.
        with torch.autocast(self._device.type, precision, enabled=autocast, cache_enabled=on_cpu):
            for index, block in enumerate(self._segments[segment]):
                if self.seed_blocks and self._random_blocks[id(block)]:
                    seed_block(seed, first + index, self._device)
                inputs = block(inputs)
        return inputs.float() if self._precision is not None and inputs.is_floating_point() else inputs

    def _graphs(self, inputs: Tensor, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """Run all segments; return the input and the output of each. No graph connects two segments."""
        ins, outs = [], []
        for segment in range(len(self._segments)):
            inputs = inputs.detach()
            if inputs.is_floating_point() and (segment or self._first_block):
                inputs.requires_grad_()
            ins.append(inputs)
            inputs = self._run(segment, inputs, seed)
            outs.append(inputs)
        return ins, outs

    def forward(self, micro: int, inputs: Tensor, seed: int) -> Tensor:
        if self._recompute:
            outputs = self.evaluate(inputs.detach(), seed)
            self._saved[micro] = ([inputs.detach()], [], seed)
            return outputs
        with torch.enable_grad():
            ins, outs = self._graphs(inputs, seed)
        self._saved[micro] = (ins, outs, seed)
        return outs[-1].detach()

    def _graphs_of(self, micro: int) -> tuple[list[Tensor], list[Tensor]]:
        if micro not in self._saved:
            raise InternalError(f"backward of micro-batch {micro} without its forward")
        ins, outs, seed = self._saved.pop(micro)
        if not outs:
            # Recomputation must not update the buffers (batch norm's running statistics) a second time.
            with torch.enable_grad(), buffers_restored(self._blocks):
                ins, outs = self._graphs(ins[0], seed)
        return ins, outs

    def backward(
        self, micro: int, gradient: Tensor, into: Views, wants_input: bool, on_segment: OnSegment | None = None
    ) -> Tensor | None:
        ins, outs = self._graphs_of(micro)
        passed: Tensor | None = gradient
        for segment in range(len(outs) - 1, -1, -1):
            parameters = self._segment_parameters[segment]
            needs_input = segment > 0 or wants_input
            wanted = [*parameters, ins[segment]] if needs_input else [*parameters]
            found = _gradients(outs[segment], wanted, passed) if wanted else ()
            _copy_gradients(found[: len(parameters)], into[self._ends[segment] : self._ends[segment + 1]])
            passed = found[-1] if needs_input else None
            outs.pop()
            if on_segment is not None:
                on_segment(segment)
        return passed

    def backward_input(self, micro: int, gradient: Tensor, wants_input: bool) -> Tensor | None:
        """Run the first half through all segments; ``backward_weight`` goes through each of them once more."""
        ins, outs = self._graphs_of(micro)
        saved = []
        for segment in range(len(outs) - 1, -1, -1):
            saved.append((outs[segment], gradient))
            if segment or wants_input:
                (gradient,) = _gradients(outs[segment], [ins[segment]], gradient, retain_graph=True, allow_unused=False)
        self._pending_weights[micro] = saved[::-1]
        return gradient if wants_input else None

    def backward_weight(self, micro: int, into: Views) -> None:
        for segment, (outputs, gradient) in enumerate(self._pending_weights.pop(micro)):
            parameters = self._segment_parameters[segment]
            if parameters:
                found = _gradients(outputs, parameters, gradient)
                _copy_gradients(found, into[self._ends[segment] : self._ends[segment + 1]])

    def evaluate(self, inputs: Tensor, seed: int = 0) -> Tensor:
        with torch.no_grad():
            for segment in range(len(self._segments)):
                inputs = self._run(segment, inputs, seed)
        return inputs


def _gradients(
    outputs: Tensor,
    inputs: Sequence[Tensor],
    gradient: Tensor | None,
    retain_graph: bool = False,
    allow_unused: bool = True,
) -> tuple[Any, ...]:
    """``torch.autograd.grad(outputs, inputs, gradient)``: a tensor for each input, None for an unused one.

    That function compares the shapes of ``outputs`` and ``gradient`` first, for which it imports a module that takes a
    second (three on machines with a GPU) at the beginning of every run. The engine it calls compares them too.
    """
    engine = torch.autograd.Variable._execution_engine
    found: tuple[Any, ...] = engine.run_backward(
        (outputs,), (gradient,), retain_graph, False, tuple(inputs), allow_unused, accumulate_grad=False
    )
    return found


def _copy_gradients(gradients: Sequence[Tensor | None], into: Views) -> None:
    """Copy gradients into the views; the gradient of an unused parameter is 0."""
    pairs = [(view, one) for view, one in zip(into, gradients, strict=False) if one is not None]
    for dtype in {one.dtype for _, one in pairs}:  # one kernel copies tensors of one type
        same = [(view, one) for view, one in pairs if one.dtype == dtype]
        torch._foreach_copy_([view for view, _ in same], [one for _, one in same])
    for view, one in zip(into, gradients, strict=False):
        if one is None:
            view.zero_()


class buffers_restored:  # noqa: N801 - reads like a statement
    """Context manager that replaces the buffers of blocks by copies, and restores them afterwards.

    Changes to the copies are dropped. A graph that was built meanwhile may keep references to them.
    """

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


_DETERMINISTIC = (
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


def _is_random(block: nn.Module) -> bool:
    """True if a block may draw random numbers: it contains a module that is not known to be deterministic."""
    return not all(type(one) in _DETERMINISTIC for one in block.modules())
