"""Loss functions, their reductions, and the gradient of a loss over a global batch that is cut into shards.

A loss is a function of (outputs, targets). What it returns for a shard of n of the batch's N samples decides what is
minimised, as in plain PyTorch on the whole batch:

    reduction   the function returns           minimised over the batch   a shard adds to the gradient
    mean        the mean over the samples      the mean                   n/N times its own
    sum         the sum over the samples       the sum                    its own
    none        a value (or row) a sample      the mean                   1/N times that of its sum

Hoop's own losses, which have names, return the sum and are minimised as the mean unless a job states otherwise.
``engine/reduction.py`` finds out which reduction a user's function has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor

from hoop.errors import InvalidArgument

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
