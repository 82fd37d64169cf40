"""One step of a user's own loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hoop.data.structured import seed_generators
from hoop.engine.custom.loss import ShardLoss
from hoop.engine.custom.own_loop import Computed, LoopExchange, Shard, Updated
from hoop.engine.data_feed import Position
from hoop.engine.stage.autograd import seed_block
from hoop.errors import FailedPrecondition, InvalidArgument


class Step:
    """A step, or after the loss of a device the rest of one: ``shards``, ``backward`` for each of them, ``update``."""

    def __init__(self, exchange: LoopExchange, position: Position, device: torch.device) -> None:
        """``device``: of the models."""
        self._exchange, self._position, self._device = exchange, position, device
        self._objective: Tensor | None = None
        self._weight: float | None = None
        self.number = position.done
        """Number of the step, from 0."""
        self.epoch = position.epoch
        self.loss: float | None = None
        """Loss of the whole batch after ``update``, the same on every device; None if the step comes again."""

    def shards(self) -> Iterator[Any]:
        """The batches of this device's shards, one at a time; call ``backward`` for each before the next.

        A device that has no shard of this step gets none. Batches are on the device of the models. Random numbers
        (Python, NumPy, torch) are seeded for each shard.
        """
        while isinstance(message := self._exchange.peek(), Shard) and message.position == self._position:
            self._objective, self._weight = None, None
            seed_generators(message.seed % 2**64)
            if self._device.type == "cuda":
                seed_block(message.seed, 0, self._device)
            yield message.batch
            if self._objective is None or self._weight is None:
                raise FailedPrecondition(
                    f"step {self.number}: no backward for a shard; call step.backward(loss, weight=…) in the loop over "
                    "step.shards()"
                )
            self._exchange.answer(ShardLoss(self._objective, self._weight, {}))

    def backward(self, loss: Tensor, weight: float = 1.0) -> None:
        """Adds the gradient of ``weight * loss`` of the current shard.

        ``loss``: a mean over the shard, of ``weight`` samples (or tokens): the mean over the whole batch is minimised.
        May be called several times for a shard, for example for two losses of a GAN, with the same weight.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            given = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidArgument(f"loss: {given}; give a scalar tensor, the mean over the shard's samples")
        if not isinstance(self._exchange.peek(), Shard):
            raise FailedPrecondition("step.backward: there is no shard; call it in the loop over step.shards()")
        if not 0 <= weight < float("inf"):
            raise InvalidArgument(f"weight: {weight} is not 0 or more")
        if self._weight is not None and self._weight != weight:
            raise InvalidArgument(
                f"weight: {weight} for a shard that had {self._weight} before; all losses of a shard have one weight"
            )
        objective = loss.reshape(()) * weight
        objective.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self._objective = objective.detach() + (0.0 if self._objective is None else self._objective)
        self._weight = float(weight)

    def update(self) -> None:
        """Sums the gradients of all devices in a fixed order, and steps the optimizers and schedulers. Collective.

        If a device is lost meanwhile, ``Run.steps`` gives the same step again, with the shards that are missing.
        """
        message = self._exchange.peek()
        if isinstance(message, Shard) and message.position == self._position:
            raise FailedPrecondition(
                f"step {self.number}: update before all shards; finish the loop over step.shards()"
            )
        if isinstance(message, Computed):
            self._exchange.answer()
            message = self._exchange.peek()
        if isinstance(message, Updated):
            self.loss = message.loss
            self._exchange.take()
