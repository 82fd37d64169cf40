"""One rank's handle on a communicator: checks an operation's buffers, runs its plan, reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hoop.collectives.catalog import CATALOG, Operation
from hoop.collectives.choose import LinkCost, choose
from hoop.collectives.execute import Execution
from hoop.collectives.measure import measure
from hoop.collectives.reduction import Array, Reduction
from hoop.collectives.sharing import Sharing
from hoop.collectives.spanning import Spanning
from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument, LinkCorrupted, PeerError, PeerLost
from hoop.transport.base import Endpoint, SharedEndpoint, SpanningEndpoint


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
        self.cost: LinkCost | None = None
        """What a link costs, where it was measured; decides between algorithms."""
        self._scratch: Array = np.empty(0, np.uint8)
        self._sharing = Sharing(endpoint) if isinstance(endpoint, SharedEndpoint) else None
        self._spanning = Spanning(endpoint) if isinstance(endpoint, SpanningEndpoint) else None

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
            contiguous = buffer.flags.c_contiguous
            if buffer.dtype != operation.dtype.numpy or buffer.ndim != 1 or not contiguous:
                raise InvalidArgument(
                    f"rank {self.rank}: {name} must be a contiguous vector of {operation.dtype.name}, "
                    f"got {'' if contiguous else 'non-contiguous '}{buffer.dtype} of shape {buffer.shape}"
                )
            if name == "destination" and elements and not buffer.flags.writeable:
                raise InvalidArgument(f"rank {self.rank}: destination cannot be written to")
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
        # A round alone only makes sense for messages: where memory is shared there is nothing to step.
        if round_index is None:
            self._weigh(operation, timeout)
        algorithm = choose(operation, self.endpoint, self.cost) if round_index is None else operation.default
        messages, sent = self.endpoint.messages_sent, self.endpoint.bytes_sent
        started = time.monotonic()
        entry = CATALOG[operation.collective]
        by: Sharing | Spanning | None = self._sharing if algorithm in entry.shared else None
        if algorithm in entry.spanning and round_index is None:
            by = self._spanning
        if by is not None:
            try:
                by.run(operation, algorithm, source, destination, started + timeout)
            except (PeerLost, DeadlineExceeded, LinkCorrupted) as error:
                raise type(error)(f"{error}, in {operation}") from error
            messages, sent = self.endpoint.messages_sent - messages, self.endpoint.bytes_sent - sent
            return Report(time.monotonic() - started, messages, sent, algorithm)
        plan = operation.plan(self.size, self.rank, algorithm)
        if not round_index or self._scratch.size < plan.scratch:
            self._scratch = np.empty(plan.scratch, source.dtype)  # later rounds go on with what it holds
        execution = Execution(
            self.endpoint,
            source,
            destination,
            self._scratch,
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
            algorithm,
        )

    def prepare(
        self, operation: Operation, source: Array, destination: Array, timeout: float = 60.0
    ) -> Callable[[float], None]:
        """An all_reduce that is run again and again on the same memory: call it with a deadline.

        Every rank must prepare it, and call it, in the same order. In shared memory a call costs two meetings and the
        arithmetic; over links it is ``run`` without its checks.
        """
        self.check(operation, source, destination)
        if operation.collective != "all_reduce":
            raise InvalidArgument(f"prepare: {operation.collective} cannot be prepared, only all_reduce")
        if self._sharing is not None and not operation.algorithm:
            return self._sharing.prepare(operation, source, destination, time.monotonic() + timeout)
        self._weigh(operation, timeout)
        algorithm = choose(operation, self.endpoint, self.cost)
        spanning = self._spanning
        if spanning is not None and algorithm in CATALOG[operation.collective].spanning:
            return lambda deadline: spanning.run(operation, algorithm, source, destination, deadline)
        plan = operation.plan(self.size, self.rank, algorithm)
        reduction = Reduction(operation.op, operation.dtype)

        scratch = np.empty(plan.scratch, source.dtype)

        def again(deadline: float) -> None:
            Execution(self.endpoint, source, destination, scratch, reduction, deadline).run(plan)

        return again

    def _weigh(self, operation: Operation, timeout: float) -> None:
        """Measures the links before the first choice that depends on them; every rank comes here with the same."""
        if self.cost is None and self._sharing is None and self.size > 2:
            if operation.collective == "all_reduce" and not operation.algorithm:
                self.cost = measure(self.endpoint, time.monotonic() + timeout)

    def exchange(
        self, source: Array, destination: Array, deadline: float
    ) -> tuple[list[Array], list[Array]] | None:
        """Everybody's source and destination, mapped here; None where not all of them are in shared arenas."""
        return self._sharing.exchange(source, destination, deadline) if self._sharing else None

    def close(self) -> None:
        self.endpoint.close()


def _located(error: PeerError, operation: Operation, done: int, of: int) -> HoopError:
    return type(error)(f"{error}, at instruction {done + 1} of {of} of {operation}")
