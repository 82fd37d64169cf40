"""A user's own training loop beside the engine's: two threads that take turns.

    training thread (Trainer)                        user's thread (hoop.elastic)
    ─ shard of step n: batch ───────────────────▶   forward and backward of the user's code
    ◀─ loss and weight; gradients are in ``grad`` ─
    ─ all shards of this rank are computed ─────▶
    ◀─ update ────────────────────────────────────   ``step.update()``
      ordered sum, optimizers, commit
    ─ the step is done ─────────────────────────▶   next step

The two never run at the same time, so the user's objects need no locks. After the loss of a device the training thread
may ask for more shards of the same step: the user's loop then sees the step again.

The waits have no deadline, because the user's code may take any time, and the other thread is in this process. The
training thread waits until the user's loop ends (``close``), or the process. The user's thread waits for a training
thread whose own waits have deadlines, and ``Run`` ends every run with ``Ended``, however its device ended.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from hoop.engine.custom.loss import COUNTED, CustomLoss, ShardLoss
from hoop.engine.custom.objects import TrainableState
from hoop.engine.data_feed import Position
from hoop.engine.job import Job
from hoop.errors import FailedPrecondition, HoopError, InternalError


@dataclass(frozen=True)
class Shard:
    """A shard of a step, to be computed by the user's code."""

    position: Position
    micro: int
    batch: Any
    samples: int
    seed: int


@dataclass(frozen=True)
class Computed:
    """This rank has computed its shards of the step; the sum and the update wait for ``step.update()``."""

    position: Position


@dataclass(frozen=True)
class Updated:
    """The step is done on this rank."""

    position: Position
    loss: float


@dataclass(frozen=True)
class Ended:
    """The run is over; ``error``: why, if it failed."""

    error: BaseException | None = None


Message = Shard | Computed | Updated | Ended


@dataclass
class LoopExchange:
    """Hands messages from the training thread to the user's, and answers back."""

    _changed: threading.Condition = field(default_factory=threading.Condition)
    _message: Message | None = None
    _answer: ShardLoss | None = None
    _answered: bool = False
    _closed: bool = False

    # ---- the training thread

    def ask(self, message: Shard | Computed) -> ShardLoss | None:
        """Hands over a message, and waits for the user's answer to it."""
        with self._changed:
            self._put(message)
            self._changed.wait_for(lambda: self._answered or self._closed)
            if self._closed and not self._answered:
                raise FailedPrecondition("the loop over run.steps() has ended before the run")
            self._answered = False
            return self._answer

    def tell(self, message: Updated | Ended) -> None:
        """Hands over a message that needs no answer."""
        with self._changed:
            self._put(message)

    def _put(self, message: Message) -> None:
        """Waits until the message before it was taken: the user's loop sees every one."""
        self._changed.wait_for(lambda: self._message is None or self._closed)
        self._message = message
        self._changed.notify_all()

    # ---- the user's thread

    def peek(self) -> Message:
        """The current message; waits for one. The last one of a run is always ``Ended``."""
        with self._changed:
            self._changed.wait_for(lambda: self._message is not None)
            if self._message is None:
                raise InternalError("a message was waited for, and there is none")
            return self._message

    def take(self) -> None:
        """Removes the current message, which needs no answer."""
        with self._changed:
            self._message = None
            self._changed.notify_all()

    def close(self) -> None:
        """The user's loop has ended: the training thread does not wait for it any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def answer(self, found: ShardLoss | None = None) -> None:
        """Answers the current message, and removes it."""
        with self._changed:
            self._message, self._answer, self._answered = None, found, True
            self._changed.notify_all()


def _never_called(model: Any, batch: Any) -> Any:
    raise InternalError("the loss of a user's own loop is computed by the loop")


OWN_LOOP_LOSS = CustomLoss(_never_called, True, COUNTED)
"""Loss of a user's own loop: a sum and a weight for each shard, which ``step.backward`` gives."""


@dataclass(frozen=True)
class OwnLoopJob(Job):
    """The job of a user's own loop: objects that exist already, and the exchange with the loop's thread."""

    objects: TrainableState | None = None
    exchange: LoopExchange | None = None


def error_of(message: Ended) -> HoopError | None:
    """The error that ended a run."""
    if message.error is None or isinstance(message.error, HoopError):
        return message.error
    return InternalError(f"the training thread failed: {message.error!r}")
