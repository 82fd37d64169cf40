"""One operation of one rank, checked and planned once, then run on any buffers: what a call costs is what it moves.

One rank's handle on a communicator: runs operations, or starts them and lets go.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from hoop.collectives.compressed_all_reduce import CompressedAllReduce
from hoop.collectives.link_executor import MultiHostExecutor, confirm, over_links, together
from hoop.collectives.reduction import Array, Reduction
from hoop.collectives.registry import CATALOG, Operation
from hoop.collectives.selection import LinkCost, choose, measure
from hoop.collectives.shm_executor import RunFunction, ShmExecutor, WindowedOperation
from hoop.collectives.work_queue import WorkHandle, WorkQueue
from hoop.errors import (
    CollectiveMismatch,
    DeadlineExceeded,
    HoopError,
    InvalidArgument,
    LinkCorrupted,
    MembershipChanged,
    PeerError,
    PeerLost,
)
from hoop.transport.base import Endpoint, SharedEndpoint, SpanningEndpoint
from hoop.transport.calls import Call

_IN_PLACE = {"all_gather": -1, "gather": -1, "reduce_scatter": 1, "scatter": 1}
"""Where a destination may overlap its source: so many of this rank's blocks further on; elsewhere at the same place."""


class PreparedOperation:
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
        plan: Callable[[Operation, Call, float], tuple[str, RunFunction]],
    ) -> None:
        """``call``: what all ranks must agree on."""
        operation.check(endpoint.size)
        self.operation, self.call = operation, call
        self._plan = plan
        self._move: RunFunction | None = None
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
        if not isinstance(self._move, WindowedOperation) or not self._move.whole:
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


_KEPT = 512
"""Operations that are kept ready; the one that was made first goes first."""


@dataclass(frozen=True)
class Report:
    """What one operation cost one rank."""

    seconds: float
    messages_sent: int
    bytes_sent: int
    algorithm: str


class PersistentAllReduce:
    """An all_reduce that is run again and again on the same memory: call it with a deadline, or ``start`` it."""

    def __init__(
        self, communicator: Communicator, operation: Operation, algorithm: str, run: Callable[[float], None]
    ) -> None:
        self.algorithm = algorithm
        self._communicator, self._operation, self._run = communicator, operation, run
        self._enter, self._leave = communicator.lane.enter, communicator.lane.leave

    def __call__(self, deadline: float) -> None:
        if not self._enter():
            self.start(deadline - time.monotonic()).wait()
            return
        try:
            self._run(deadline)
        finally:
            self._leave()

    def start(self, timeout: float) -> WorkHandle:
        """Runs it behind what was started before, and returns at once."""
        return self._communicator.queue(self._operation, self._run, timeout, lambda: self.algorithm)


class Communicator:
    """One rank's place among others, at one generation.

    Every rank must run the same operations in the same order. When one fails with a ``PeerError``, the
    links are in no defined state: close this communicator and go on with the next generation. Operations that do not
    match are a ``CollectiveMismatch`` at every rank, and so is every later one on this communicator.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.rank, self.size = endpoint.rank, endpoint.size
        self.cost: LinkCost | None = None
        """What a link costs, where it was measured; decides between algorithms. Set before the first operation."""
        self.lane = WorkQueue(f"hoop-{endpoint.communicator}-lane")
        """Where operations queue; whoever runs a ``ready`` one by itself enters it first."""
        self._ready: dict[tuple[Operation, str], PreparedOperation] = {}
        self._broken: HoopError | None = None
        self._scratch: Array = np.empty(0, np.uint8)
        self._sharing = ShmExecutor(endpoint) if isinstance(endpoint, SharedEndpoint) else None
        self._spanning = MultiHostExecutor(endpoint) if isinstance(endpoint, SpanningEndpoint) else None

    def ready(self, operation: Operation, text: str = "") -> PreparedOperation:
        """The operation, to be called with buffers and a deadline as often as one likes.

        ``text``: how mismatches name it and what all ranks must agree on, where it is part of something larger.
        """
        found = self._ready.get((operation, text))
        if found is None:
            call = self.call(text or str(operation))
            found = self._ready[operation, text] = PreparedOperation(
                self.endpoint, operation, call, self._plan
            )
            if len(self._ready) > _KEPT:
                del self._ready[next(iter(self._ready))]
        return found

    def call(self, text: str) -> Call:
        """What the ranks of this communicator compare when they run something of this description."""
        return Call(text, self.size)

    def check(self, operation: Operation, source: Array, destination: Array) -> None:
        """Raises if these buffers do not fit the operation; nothing has moved then."""
        self.ready(operation).check(source, destination)

    def _plan(self, operation: Operation, call: Call, deadline: float) -> tuple[str, RunFunction]:
        """Which algorithm, and the operation by it."""
        endpoint = self.endpoint
        if operation.compression:
            return operation.compression, CompressedAllReduce(operation, self.size, partial(self._part, call))
        if isinstance(endpoint, SharedEndpoint):
            endpoint.gather(deadline)  # what they share decides
        self._weigh(operation, call, deadline)
        algorithm, entry = choose(operation, endpoint, self.cost), CATALOG[operation.collective]
        if self._sharing is not None and algorithm in entry.shared:
            return algorithm, self._sharing.move(operation, algorithm, call)
        if self._spanning is not None and algorithm in entry.spanning:
            return algorithm, partial(self._spanning.run, operation, algorithm, call)
        plan = operation.plan(self.size, self.rank, algorithm)
        instructions, reduction = tuple(plan), Reduction(operation.op, operation.dtype)

        confirmed = not operation.synchronizes and operation.collective != "send"

        def move(source: Array, destination: Array, deadline: float) -> None:
            def run() -> None:
                buffers = source, destination, np.empty(plan.scratch, source.dtype)
                begin = partial(endpoint.begin, call, deadline)
                over_links(endpoint, operation, begin, instructions, buffers, reduction, deadline)
                if confirmed:
                    confirm(endpoint, deadline)

            together(endpoint, run)

        return algorithm, move

    def _part(self, call: Call, operation: Operation) -> PreparedOperation:
        """An operation that is part of another one, and is named as that."""
        return self.ready(operation, call.text)

    def _weigh(self, operation: Operation, call: Call, deadline: float) -> None:
        """Measures the links before the first choice that depends on them; every rank comes here with the same."""
        # Between hosts that are several ranks each, an error while measuring would not name who was lost first.
        alike = self._sharing is None and self._spanning is None and self.size > 2
        if self.cost is None and alike and operation.collective == "all_reduce" and not operation.algorithm:
            sent = self.endpoint.messages_sent, self.endpoint.bytes_sent
            together(self.endpoint, partial(self._measure, call, deadline))
            self.endpoint.messages_sent, self.endpoint.bytes_sent = sent  # no operation's

    def _measure(self, call: Call, deadline: float) -> None:
        self.endpoint.begin(call, deadline)
        self.cost = measure(self.endpoint, deadline)

    # ---- running

    def run(
        self,
        operation: Operation,
        source: Array,
        destination: Array,
        timeout: float,
        round_index: int | None = None,
    ) -> Report:
        """Runs the operation with the other ranks; ``round_index`` runs that round of its plan alone."""
        ready = self.ready(operation)
        job = partial(ready, source, destination)
        if round_index is not None:
            ready.check(source, destination)
            job = partial(self._run_round, operation, source, destination, round_index)
        if not self.lane.enter():
            report: Report = self.queue(operation, job, timeout, lambda: ready.algorithm).wait()
            return report
        try:
            return self._report(job, timeout, lambda: ready.algorithm)
        finally:
            self.lane.leave()

    def start(self, operation: Operation, source: Array, destination: Array, timeout: float) -> WorkHandle:
        """Runs the operation behind those started before, and returns at once; the buffers are its own until it ends.

        ``timeout`` counts from when its turn comes. When one fails that others were to take part in, those behind it
        fail too: nobody knows how far each link had come.
        """
        ready = self.ready(operation)
        ready.check(source, destination)
        return self.queue(operation, partial(ready, source, destination), timeout, lambda: ready.algorithm)

    def queue(
        self, operation: Operation, job: Callable[[float], None], timeout: float, algorithm: Callable[[], str]
    ) -> WorkHandle:
        """Runs a job (until its deadline) in its turn, as that operation."""
        handle = WorkHandle(str(operation))
        self.lane.start(handle, partial(self._in_turn, operation, job, timeout, algorithm))
        return handle

    def _in_turn(
        self, operation: Operation, job: Callable[[float], None], timeout: float, algorithm: Callable[[], str]
    ) -> Report:
        if self._broken is not None:
            raise type(self._broken)(f"rank {self.rank}: {operation} was not run: {self._broken}")
        try:
            return self._report(job, timeout, algorithm)
        except CollectiveMismatch as error:
            self._broken = error
            raise
        except (PeerError, MembershipChanged) as error:
            self._broken = named(error, operation)
            raise self._broken from error

    def _report(self, job: Callable[[float], None], timeout: float, algorithm: Callable[[], str]) -> Report:
        endpoint = self.endpoint
        messages, sent, started = endpoint.messages_sent, endpoint.bytes_sent, time.monotonic()
        job(started + timeout)
        return Report(
            time.monotonic() - started,
            endpoint.messages_sent - messages,
            endpoint.bytes_sent - sent,
            algorithm(),
        )

    def _run_round(
        self, operation: Operation, source: Array, destination: Array, index: int, deadline: float
    ) -> None:
        """A round alone makes sense for messages only: where memory is shared there is nothing to step."""
        plan = operation.plan(self.size, self.rank, operation.default)
        if not index or self._scratch.size < plan.scratch:
            self._scratch = np.empty(plan.scratch, source.dtype)  # later rounds go on with what it holds
        reduction = Reduction(operation.op, operation.dtype)
        buffers = source, destination, self._scratch
        begin = partial(self.endpoint.begin, self.call(str(operation)), deadline, resumed=index > 0)
        steps = plan.rounds[index]
        together(
            self.endpoint,
            partial(over_links, self.endpoint, operation, begin, steps, buffers, reduction, deadline),
        )

    # ---- again and again

    def prepare(
        self, operation: Operation, source: Array, destination: Array, timeout: float = 60.0
    ) -> PersistentAllReduce:
        """An all_reduce that is run again and again on the same memory: call it with a deadline, or start it.

        Every rank must prepare it, and call it, in the same order. In arenas a call costs two meetings and the
        arithmetic; elsewhere it is ``run`` without its checks.
        """
        self.check(operation, source, destination)
        if operation.collective != "all_reduce":
            raise InvalidArgument(f"prepare: {operation.collective} cannot be prepared, only all_reduce")
        deadline, call = time.monotonic() + timeout, self.call(str(operation))
        if self._sharing is not None and not operation.algorithm and not operation.compression:
            algorithm, run = self._sharing.prepare(operation, call, source, destination, deadline)
        else:
            algorithm, move = self._plan(operation, call, deadline)
            run = partial(move, source, destination)
        return PersistentAllReduce(self, operation, algorithm, run)

    def exchange(
        self, source: Array, destination: Array, deadline: float, call: Call
    ) -> tuple[list[Array], list[Array]] | None:
        """Everybody's source and destination, mapped here; None where not all of them are in shared arenas."""
        return self._sharing.exchange(source, destination, deadline, call) if self._sharing else None

    def close(self) -> None:
        self.endpoint.close()
        self.lane.close()
