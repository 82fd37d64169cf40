"""What is minimised: the sum of a loss over samples, how many were right, and the gradient of it all.

A loss is a function of (outputs, targets) that returns the *sum* over the samples; the worker divides by the global
batch, so shards of different sizes weigh what they should.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor

from hoop.errors import InvalidArgument

Loss = Callable[[Tensor, Tensor], Tensor]


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
    """How many samples are classified right; for sequences the share of each sample's positions. 0 for regression."""
    if targets.is_floating_point():
        return 0.0
    right = (outputs.argmax(-1) == targets).float()
    return float(right.sum()) if right.dim() == 1 else float(right.flatten(1).mean(1).sum())


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

    def __init__(self, loss: Loss) -> None:
        self.by_hand = CrossEntropy() if loss is cross_entropy else None
        self._loss = loss

    def __call__(self, outputs: Tensor, targets: Tensor, scale: float) -> tuple[float | Tensor, Tensor]:
        """The summed loss (a tensor where it is still being computed), and ``scale`` times its gradient."""
        if self.by_hand is not None and outputs.dim() == 2:
            losses, gradient = self.by_hand(outputs, targets, scale)
            return figure(losses.sum()), gradient
        outputs = outputs.detach().requires_grad_()
        with torch.enable_grad():
            loss = self._loss(outputs, targets)
        (gradient,) = torch.autograd.grad(loss * scale, outputs)
        return figure(loss), gradient


def figure(loss: Tensor) -> float | Tensor:
    """As a number, unless that would mean waiting for a GPU."""
    return loss.detach() if loss.is_cuda else float(loss)
