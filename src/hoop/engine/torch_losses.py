"""PyTorch's own losses, which are known by their type and options, without a trial.

A mean over classes (``nn.CrossEntropyLoss``, ``nn.NLLLoss``, ``F.cross_entropy``, ``F.nll_loss``, or a
``functools.partial`` of one) is divided by the number of targets that are not ignored, or by the weights of their
classes: ``ClassMean`` returns it as (sum, count). The other modules state their reduction.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from hoop.engine.loss_graph import class_weight
from hoop.engine.stage.autograd import MEAN, REDUCTIONS, function_name, loss_on
from hoop.errors import InvalidArgument

_MODULES = "torch.nn.modules.loss"
_BATCH_MEAN = "batchmean"
"""``KLDivLoss``'s name of the mean over the samples."""
_OPTIONS = {"weight", "ignore_index", "label_smoothing", "reduction"}


def is_torch_module(function: Any) -> bool:
    """Whether a loss is one of PyTorch's modules, and no subclass of one: a function of (outputs, targets)."""
    return type(function).__module__ == _MODULES


def stated_reduction(function: Any) -> str | None:
    """The reduction of one of PyTorch's modules; None if the loss is another."""
    if not is_torch_module(function):
        return None
    reduction = getattr(function, "reduction", None)
    reduction = MEAN if reduction == _BATCH_MEAN else reduction
    return reduction if reduction in REDUCTIONS else None


@dataclass(frozen=True)
class ClassMean:
    """A cross-entropy of PyTorch with reduction ``mean``, as a function that returns (sum, count)."""

    function: Any
    """The loss as the user gave it."""
    total: Callable[[Tensor, Tensor], Tensor]
    """The same loss with reduction ``sum``."""
    weight: Tensor | None
    """Weights of the classes."""
    ignored: int

    @classmethod
    def of(cls, function: Any) -> ClassMean | None:
        """None if the loss is another one, or has another reduction."""
        if type(function) in (nn.CrossEntropyLoss, nn.NLLLoss):
            if function.reduction != MEAN:
                return None
            total = copy.copy(function)
            total.reduction = "sum"
            return cls(function, total, function.weight, function.ignore_index)
        bare = function.func if type(function) is functools.partial else function
        if bare is not F.cross_entropy and bare is not F.nll_loss:
            return None
        options = function.keywords if bare is not function else {}
        if (bare is not function and function.args) or not set(options) <= _OPTIONS:
            return None
        if options.get("reduction", MEAN) != MEAN:
            return None
        total = functools.partial(bare, **{**options, "reduction": "sum"})
        return cls(function, total, options.get("weight"), options.get("ignore_index", -100))

    def __str__(self) -> str:
        return function_name(self.function)

    def check(self, stated: str | None) -> None:
        """Raises if the job states another reduction than the loss has."""
        if stated not in (None, MEAN):
            raise InvalidArgument(
                f"reduction: {stated!r} is stated, {self} has 'mean'; leave it out, or give functools.partial("
                f"{self}, reduction={stated!r})"
            )

    def __call__(self, outputs: Any, targets: Any) -> tuple[Tensor, float]:
        for field, value in (("the model returned", outputs), ("the targets are", targets)):
            if not isinstance(value, Tensor):
                raise InvalidArgument(
                    f"loss: {function_name(self.function)} takes a tensor, and {field} {type(value).__name__}; give a "
                    "function of (outputs, targets), such as lambda outputs, targets: "
                    "F.cross_entropy(outputs['logits'], targets)"
                )
        total = self.total(outputs, targets)
        if targets.is_floating_point():  # probabilities of the classes
            return total, float(targets.numel() / targets.shape[min(1, targets.dim() - 1)])
        return total, class_weight(targets, self.weight, self.ignored)

    def on(self, device: torch.device) -> ClassMean:
        """The same with the weights of the classes on this device."""
        placed = ClassMean.of(loss_on(self.function, device))
        assert placed is not None, "it is the same loss"
        return placed

    def is_dense(self, targets: Tensor) -> bool:
        """Whether every one of these targets counts once."""
        if targets.is_floating_point():
            return True
        return self.weight is None and not bool((targets == self.ignored).any())
