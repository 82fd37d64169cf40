"""One rank's handle on a communicator: checks an operation's buffers, runs its plan, reports."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from hoop.collectives.catalog import Operation
from hoop.collectives.execute import Execution
from hoop.collectives.reduction import Array, Reduction
from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument, LinkCorrupted, PeerError, PeerLost
from hoop.transport.base import Endpoint


@dataclass(frozen=True)
class Report:
    """What one operation cost one rank."""

    seconds: float
    messages_sent: int
    bytes_sent: int
    algorithm: str


class Communicator:
    """One rank's place among others, at one generation.

    Every rank must run the same operations in the same order. When one fails with a ``PeerError``, the
    links are in no defined state: close this communicator and go on with the next generation.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    @property
    def rank(self) -> int:
        return self.endpoint.rank

    @property
    def size(self) -> int:
        return self.endpoint.size

    def check(self, operation: Operation, source: Array, destination: Array) -> None:
        """Raises if these buffers do not fit the operation; nothing has moved then."""
        operation.check(self.size)
        wanted = operation.extents(self.size, self.rank)
        for name, buffer, elements in zip(
            ("source", "destination"), (source, destination), wanted, strict=True
        ):
            if buffer.dtype != operation.dtype.numpy or buffer.ndim != 1 or not buffer.flags.c_contiguous:
                raise InvalidArgument(
                    f"rank {self.rank}: {name} must be a contiguous vector of {operation.dtype.name}"
                )
            if buffer.size < elements:
                raise InvalidArgument(
                    f"rank {self.rank}: {operation} needs {elements} elements of {name}, got {buffer.size}"
                )
        self._check_overlap(operation, source[: wanted[0]], destination[: wanted[1]])

    def _check_overlap(self, operation: Operation, source: Array, destination: Array) -> None:
        if not source.size or not destination.size or not np.may_share_memory(source, destination):
            return
        shift = destination.__array_interface__["data"][0] - source.__array_interface__["data"][0]
        block = self.rank * operation.count * operation.dtype.itemsize
        in_place = {"all_gather": -block, "gather": -block, "reduce_scatter": block, "scatter": block}
        if operation.collective == "all_to_all" or shift != in_place.get(operation.collective, 0):
            raise InvalidArgument(
                f"rank {self.rank}: source and destination of {operation} overlap; "
                "use separate buffers, or the same one where the operation can work in place"
            )

    def run(
        self,
        operation: Operation,
        source: Array,
        destination: Array,
        timeout: float,
        round_index: int | None = None,
    ) -> Report:
        """Runs the operation with the other ranks; ``round_index`` runs that round of its plan alone."""
        self.check(operation, source, destination)
        plan = operation.plan(self.size, self.rank)
        messages, sent = self.endpoint.messages_sent, self.endpoint.bytes_sent
        started = time.monotonic()
        execution = Execution(
            self.endpoint,
            source,
            destination,
            plan.scratch,
            Reduction(operation.op, operation.dtype),
            started + timeout,
        )
        instructions = list(plan) if round_index is None else list(plan.rounds[round_index])
        try:
            execution.run(instructions)
        except (PeerLost, DeadlineExceeded, LinkCorrupted) as error:
            raise _located(error, operation, execution.done, len(instructions)) from error
        return Report(
            time.monotonic() - started,
            self.endpoint.messages_sent - messages,
            self.endpoint.bytes_sent - sent,
            operation.chosen,
        )

    def close(self) -> None:
        self.endpoint.close()


def _located(error: PeerError, operation: Operation, done: int, of: int) -> HoopError:
    return type(error)(f"{error}, at instruction {done + 1} of {of} of {operation}")
