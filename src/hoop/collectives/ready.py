"""One operation of one rank, checked and planned once, then run on any buffers: what a call costs is what it moves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from hoop.collectives.catalog import Operation
from hoop.collectives.reduction import Array
from hoop.collectives.sharing import Move
from hoop.collectives.staged import Staged
from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument, LinkCorrupted, PeerLost
from hoop.transport.base import Endpoint
from hoop.transport.calls import Call

_IN_PLACE = {"all_gather": -1, "gather": -1, "reduce_scatter": 1, "scatter": 1}
"""Where a destination may overlap its source: so many of this rank's blocks further on; elsewhere at the same place."""


class Ready:
    """One operation, for any buffers that fit it: ``ready(source, destination, deadline)``.

    How it is done is worked out (``plan``) when it first runs: the choice depends on what memory the others share.
    """

    algorithm = ""
    """What was chosen, once it has run."""

    def __init__(
        self,
        endpoint: Endpoint,
        operation: Operation,
        call: Call,
        plan: Callable[[Operation, Call, float], tuple[str, Move]],
    ) -> None:
        """``call``: what all ranks must agree on."""
        operation.check(endpoint.size)
        self.operation, self.call = operation, call
        self._plan = plan
        self._move: Move | None = None
        self._rank, self._alone = endpoint.rank, endpoint.size == 1
        self._kind = operation.dtype.numpy
        self._given, self._taken = operation.extents(endpoint.size, endpoint.rank)
        block = endpoint.rank * operation.count * operation.dtype.itemsize
        self._shift = _IN_PLACE.get(operation.collective, 0) * block
        self._same = not self._shift and operation.collective != "all_to_all"

    def __call__(self, source: Array, destination: Array, deadline: float) -> None:
        """Runs it with the other ranks."""
        self.check(source, destination)
        try:
            if self._move is None:
                self.algorithm, self._move = self._plan(self.operation, self.call, deadline)
            self._move(source, destination, deadline)
        except (PeerLost, DeadlineExceeded, LinkCorrupted) as error:
            raise named(error, self.operation) from error

    def begin(
        self, source: Array, destination: Array, until: float, deadline: float
    ) -> Callable[[], None] | None:
        """For whoever may not wait long: does what can be done by ``until``, and says how to go on.

        None: it is done. Where it cannot be left halfway nothing is done, and going on is all of it.
        """
        if self._alone:
            self(source, destination, deadline)
            return None
        if not isinstance(self._move, Staged) or not self._move.whole:
            return partial(self, source, destination, deadline)
        self.check(source, destination)
        try:
            rest = self._move.begin(source, destination, until, deadline)
        except (PeerLost, DeadlineExceeded, LinkCorrupted) as error:
            raise named(error, self.operation) from error
        return None if rest is None else partial(self._go_on, rest)

    def _go_on(self, rest: Callable[[], None]) -> None:
        try:
            rest()
        except (PeerLost, DeadlineExceeded, LinkCorrupted) as error:
            raise named(error, self.operation) from error

    def check(self, source: Array, destination: Array) -> None:
        """Raises if these buffers do not fit the operation; nothing has moved then."""
        self._check_one("source", source, self._given)
        if source is destination and self._same and self._taken <= self._given:
            if not source.flags.writeable and self._taken:
                raise InvalidArgument(f"rank {self._rank}: destination cannot be written to")
            return
        self._check_one("destination", destination, self._taken)
        if not destination.flags.writeable and self._taken:
            raise InvalidArgument(f"rank {self._rank}: destination cannot be written to")
        if self._given and self._taken:
            self._check_overlap(source[: self._given], destination[: self._taken])

    def _check_one(self, name: str, buffer: Array, elements: int) -> None:
        contiguous = buffer.flags.c_contiguous
        if buffer.dtype != self._kind or buffer.ndim != 1 or not contiguous:
            raise InvalidArgument(
                f"rank {self._rank}: {name} must be a contiguous vector of {self.operation.dtype.name}, "
                f"got {'' if contiguous else 'non-contiguous '}{buffer.dtype} of shape {buffer.shape}"
            )
        if buffer.size < elements:
            raise InvalidArgument(
                f"rank {self._rank}: {self.operation} needs {elements} elements of {name}, got {buffer.size}"
            )

    def _check_overlap(self, source: Array, destination: Array) -> None:
        if not np.may_share_memory(source, destination):
            return
        shift = destination.__array_interface__["data"][0] - source.__array_interface__["data"][0]
        if self.operation.collective == "all_to_all" or shift != self._shift:
            raise InvalidArgument(
                f"rank {self._rank}: source and destination of {self.operation} overlap; "
                "use separate buffers, or the same one where the operation can work in place"
            )


def named(error: HoopError, operation: Operation) -> HoopError:
    """An error that says in which operation it happened."""
    return error if str(operation) in str(error) else type(error)(f"{error}, in {operation}")
