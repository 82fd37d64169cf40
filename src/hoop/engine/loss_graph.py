"""Reads from PyTorch's autograd graph what a scalar loss is the mean or the sum of.

The last operation of a loss is in its ``grad_fn``: for ``F.cross_entropy(model(x), y)``, wherever it stands, that is
the mean over the targets that are not ignored, each with the weight of its class. So a scalar is known by the operation
that made it, at every call, and never by its value:

    the last operation                        the scalar is                    its weight in a batch
    ``nll_loss`` (of ``cross_entropy`` too)   a mean over targets of classes   the targets that count, or their weights
    ``mse_loss`` …, ``mean``                  a mean over elements             its samples
    ``nll_loss`` … with "sum", ``sum``        a sum over elements              none: sums of shards are added
    any other                                 not known: the user states it, or returns (sum, count)

That the elements are those of the samples is read from calls with different numbers of samples (``Basis.of``): their
number grows in proportion, and the number of classes stays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hoop.engine.stage.autograd import MEAN, SUM

_PASSED = {
    "AliasBackward0",
    "CloneBackward0",
    "ReshapeAliasBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "ToCopyBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewBackward0",
}
"""Operations that keep the value of a scalar."""
_CLASSES = {"NllLossBackward0", "NllLoss2DBackward0"}
_ELEMENTWISE = {
    "BinaryCrossEntropyBackward0",
    "BinaryCrossEntropyWithLogitsBackward0",
    "HuberLossBackward0",
    "MseLossBackward0",
    "SmoothL1LossBackward0",
    "SoftMarginLossBackward0",
}
_ROWWISE = {"MultiMarginLossBackward0", "MultilabelMarginLossBackward0"}
_REDUCTIONS = {1: MEAN, 2: SUM}
"""PyTorch's numbers of reductions."""
_2_TO_64 = 2**64


@dataclass(frozen=True)
class Reading:
    """What the graph of one scalar says."""

    kind: str
    """``mean`` or ``sum``."""
    elements: int
    """Number of values that are reduced; of a mean over classes the number of targets."""
    classes: int = 0
    """Number of classes; 0 if the targets are not classes."""
    node: Any = None
    """The operation of a mean over classes."""

    @property
    def is_dense(self) -> bool:
        """Whether every element counts once: no target is ignored, and no class has a weight."""
        if self.node is None:
            return True
        return self.node._saved_weight is None and not bool((self.node._saved_target == self.ignored).any())

    @property
    def ignored(self) -> int:
        """The target that is ignored, of a mean over classes."""
        index = int(self.node._saved_ignore_index)  # PyTorch returns it as an unsigned number
        return index - _2_TO_64 if index >= _2_TO_64 // 2 else index

    @property
    def weight(self) -> float:
        """The weight by which a mean over classes is divided, not rounded."""
        return class_weight(self.node._saved_target, self.node._saved_weight, self.ignored)

    @property
    def divisor(self) -> float:
        """The number by which PyTorch has divided, in the type of the loss."""
        return float(self.node._saved_total_weight)


def class_weight(targets: Tensor, weights: Tensor | None, ignored: int) -> float:
    """The number of targets that are not ignored, or the sum of the weights of their classes."""
    counted = targets != ignored
    if weights is None:
        return float(counted.sum())
    return float(weights.double()[targets[counted]].sum())


def read(loss: Tensor) -> Reading | None:
    """What a scalar is the mean or the sum of; None if its last operation does not say so."""
    try:
        node = _last_node(loss)
        return None if node is None else _reading(node.name(), node)
    except (AttributeError, RuntimeError):  # another version of PyTorch, or a graph that was freed
        return None


def last_operation(loss: Tensor) -> str:
    """The name of a scalar's last operation, for errors."""
    node = _last_node(loss)
    return "no operation" if node is None else re.sub(r"(Backward)?\d*$", "", str(node.name()))


def _last_node(loss: Tensor) -> Any:
    """The last operation that changed the value of a scalar; None if there is no gradient."""
    node: Any = loss.grad_fn
    while node is not None:
        name = node.name()
        of_scalar = name.startswith(("MeanBackward", "SumBackward")) and not _sizes(node)
        if name not in _PASSED and not of_scalar:
            return node
        node = node.next_functions[0][0]
    return None


def _sizes(node: Any) -> tuple[int, ...]:
    return tuple(node._saved_self_sym_sizes)


def _reading(name: str, node: Any) -> Reading | None:
    if name.startswith(("MeanBackward", "SumBackward")):
        return Reading(MEAN if name.startswith("Mean") else SUM, math.prod(_sizes(node)))
    if name not in _CLASSES | _ELEMENTWISE | _ROWWISE:
        return None
    kind, values = _REDUCTIONS.get(node._saved_reduction), node._saved_self
    if kind is None:
        return None
    if name in _CLASSES:
        classes = values.shape[1] if values.dim() > 1 else values.shape[0]
        return Reading(kind, node._saved_target.numel(), classes, node if kind == MEAN else None)
    if name in _ROWWISE:
        return Reading(kind, values.shape[0] if values.dim() > 1 else 1)
    return Reading(kind, values.numel())


@dataclass(frozen=True)
class Basis:
    """What a loss is known to be the mean or the sum of, for any number of samples."""

    kind: str
    elements_per_sample: int
    """Number of elements of each sample; 0: of classes, whose number of targets may vary."""
    classes: int

    @classmethod
    def of(cls, calls: Sequence[tuple[Reading | None, int]]) -> Basis | None:
        """The basis of a loss from calls with different numbers of samples; None if it is not one over samples.

        The first call is with all samples, the others are with parts of them.
        """
        bases = {None if reading is None else cls._of_call(reading, samples) for reading, samples in calls}
        (basis, *others) = bases
        if others or basis is None:
            return None
        whole, *parts = [reading.elements for reading, _ in calls if reading is not None]
        if basis.classes and not all(whole > part for part in parts):
            return None  # targets that do not grow with the samples are not theirs
        return basis

    @classmethod
    def _of_call(cls, reading: Reading, samples: int) -> Basis | None:
        if reading.classes:
            return cls(reading.kind, 0, reading.classes)
        each, rest = divmod(reading.elements, samples)
        return None if rest or not each else cls(reading.kind, each, reading.classes)

    def fits(self, reading: Reading | None, samples: int) -> bool:
        """Whether the graph of another call says the same."""
        return reading is not None and self._of_call(reading, samples) == self

    def sum_and_weight(self, loss: Tensor, reading: Reading, samples: int) -> tuple[Tensor, float]:
        """The sum that this call adds to the batch, and its weight there."""
        if self.kind == SUM:
            return loss, float(samples)
        if reading.node is None:
            return loss * samples, float(samples)
        weight = reading.weight
        if not weight:  # all targets are ignored: the mean is 0 / 0, and the shard adds nothing
            return torch.zeros((), device=loss.device, requires_grad=True), 0.0
        return loss * reading.divisor, weight

    def numbers(self, loss: Tensor, reading: Reading, samples: int) -> tuple[float, float]:
        """``sum_and_weight`` as numbers."""
        total, weight = self.sum_and_weight(loss, reading, samples)
        return float(total.detach()), weight
