"""One rank's handle on a communicator: runs collectives, or starts them asynchronously.

``PreparedOperation`` is one operation, checked and planned once and then run on any buffers that fit it, so a call
costs little beyond the bytes it moves. ``Communicator`` caches them. ``CompressedAllReduce`` runs an operation with a
``compression``. ``all_gather_object`` and ``any_rank`` are collectives of small Python values.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hoop.collectives.compression import Compressor, compressor
from hoop.collectives.link_executor import MultiHostExecutor, confirm_all_started, run_collective, run_over_links
from hoop.collectives.native_all_reduce import NativeAllReduce
from hoop.collectives.reduction import Array, Reduction
from hoop.collectives.registry import CATALOG, Operation
from hoop.collectives.selection import LinkCost, choose_algorithm, measure_links
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
from hoop.memory.dtypes import dtype
from hoop.transport.base import Endpoint, SharedEndpoint, SpanningEndpoint
from hoop.transport.call_check import Call

_IN_PLACE = {"all_gather": -1, "gather": -1, "reduce_scatter": 1, "scatter": 1}
"""The offset that a destination overlapping its source must have from it, as a multiple of rank * count elements; for
the other collectives 0: the same address."""
MAX_VECTORS = 256
"""Vectors of one compressed operation whose compressors are kept; the oldest is dropped first."""
_BYTES = dtype("uint8")


class PreparedOperation:
    """One operation for any buffers that fit it; call it with ``(source, destination, deadline)``.

    The algorithm is chosen on the first call, because the choice depends on the memory that the ranks share.
    """

    algorithm = ""
    """The chosen algorithm; empty before the first call."""

    def __init__(
        self,
        endpoint: Endpoint,
        operation: Operation,
        call: Call,
        plan: Callable[[Operation, Call, float], tuple[str, RunFunction]],
    ) -> None:
        """``call``: compared between ranks. ``plan``: chooses the algorithm and returns the function that runs it."""
        operation.check(endpoint.size)
        self.operation, self.call = operation, call
        self._plan = plan
        self._run: RunFunction | None = None
        self._rank, self._alone = endpoint.rank, endpoint.size == 1
        self._kind = operation.dtype.numpy
        self._source_count, self._destination_count = operation.extents(endpoint.size, endpoint.rank)
        block_offset = endpoint.rank * operation.count * operation.dtype.itemsize
        self._shift = _IN_PLACE.get(operation.collective, 0) * block_offset
        self._may_be_same = not self._shift and operation.collective != "all_to_all"
        """Whether source and destination may be the same array."""

    def __call__(self, source: Array, destination: Array, deadline: float) -> None:
        """Runs the operation with the other ranks."""
        self.check(source, destination)
        try:
            if self._run is None:
                self.algorithm, self._run = self._plan(self.operation, self.call, deadline)
            self._run(source, destination, deadline)
        except (PeerLost, DeadlineExceeded, LinkCorrupted) as error:
            raise with_operation(error, self.operation) from error

    def try_run(self, source: Array, destination: Array, until: float, deadline: float) -> Callable[[], None] | None:
        """Runs the operation if that is possible by ``until``.

        Returns None if it is done, else the function that resumes it. An operation that cannot be suspended is not
        begun: then that function runs all of it.
        """
        if self._alone:
            self(source, destination, deadline)
            return None
        if not isinstance(self._run, WindowedOperation | NativeAllReduce) or not self._run.can_suspend:
            return partial(self, source, destination, deadline)
        self.check(source, destination)
        try:
            resume = self._run.try_run(source, destination, until, deadline)
        except (PeerLost, DeadlineExceeded, LinkCorrupted) as error:
            raise with_operation(error, self.operation) from error
        return None if resume is None else partial(self._resume, resume)

    def _resume(self, resume: Callable[[], None]) -> None:
        try:
            resume()
        except (PeerLost, DeadlineExceeded, LinkCorrupted) as error:
            raise with_operation(error, self.operation) from error

    @property
    def native(self) -> NativeAllReduce | None:
        """The all_reduce of the native core that runs this operation; None: NumPy runs it, or nothing ran yet."""
        return self._run if isinstance(self._run, NativeAllReduce) else None

    def finish_native(self, code: int, timeout: float) -> None:
        """Ends a run of ``native`` that returned ``code``."""
        assert self.native is not None, "it returned a code"
        self._resume(partial(self.native.finish, code, time.monotonic() + timeout))

    def check(self, source: Array, destination: Array) -> None:
        """Raises InvalidArgument if the buffers do not fit the operation, before any byte has moved."""
        if (  # one vector in place, as ordinary as can be: decided without the checks below, which cost a microsecond
            source is destination
            and self._may_be_same
            and source.dtype is self._kind
            and source.ndim == 1
            and source.size >= self._source_count
            and source.size >= self._destination_count
            and source.flags.carray
        ):
            return
        self._check_buffer("source", source, self._source_count)
        if source is destination and self._may_be_same and self._destination_count <= self._source_count:
            if not source.flags.writeable and self._destination_count:
                raise InvalidArgument(f"rank {self._rank}: destination cannot be written to")
            return
        self._check_buffer("destination", destination, self._destination_count)
        if not destination.flags.writeable and self._destination_count:
            raise InvalidArgument(f"rank {self._rank}: destination cannot be written to")
        if self._source_count and self._destination_count:
            self._check_overlap(source[: self._source_count], destination[: self._destination_count])

    def _check_buffer(self, name: str, buffer: Array, elements: int) -> None:
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


def with_operation(error: HoopError, operation: Operation) -> HoopError:
    """The error, with the operation in its text."""
    if str(operation) in str(error):
        return error
    text = f"{error}, in {operation}"
    return type(error)(text, rank=error.rank, cause=error.cause) if isinstance(error, PeerError) else type(error)(text)


_CACHE_SIZE = 512
"""Prepared operations that a communicator keeps; the oldest is dropped first."""


class Report(NamedTuple):
    """The cost of one operation for one rank."""

    seconds: float
    messages_sent: int
    bytes_sent: int
    algorithm: str


class PersistentAllReduce:
    """An all_reduce that runs repeatedly on the same memory: call it with a deadline, or ``start`` it.

    Made by ``Communicator.prepare``.
    """

    def __init__(
        self, communicator: Communicator, operation: Operation, algorithm: str, run: Callable[[float], None]
    ) -> None:
        self.algorithm = algorithm
        self._communicator, self._operation, self._run = communicator, operation, run
        queue = self._queue = communicator.work_queue
        self._acquire, self._release = queue.running.acquire, queue.release

    def __call__(self, deadline: float) -> None:
        queue = self._queue
        if queue.jobs or queue.closed or not self._acquire(False):  # ``try_acquire``, without its call
            self.start(deadline - time.monotonic()).wait()
            return
        try:
            self._run(deadline)
        finally:
            self._release()

    def start(self, timeout: float) -> WorkHandle:
        """Queues it behind the operations started before, and returns at once."""
        return self._communicator.submit(self._operation, self._run, timeout, lambda: self.algorithm)


class Communicator:
    """One rank's handle on a communicator of one generation.

    Every rank must run the same operations in the same order. After a ``PeerError`` the links are in an undefined
    state: close this communicator and continue with one of the next generation. If the ranks' operations do not match,
    every rank raises ``CollectiveMismatch``, for this operation and for every later one.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.rank, self.size = endpoint.rank, endpoint.size
        self.cost: LinkCost | None = None
        """The measured cost of a link, used to choose algorithms. A caller may set it before the first operation."""
        self.work_queue = WorkQueue(f"hoop-{endpoint.communicator}-work-queue")
        """Orders the operations. A caller of a ``prepared`` operation must acquire it first."""
        self._prepared: dict[tuple[Operation, str], PreparedOperation] = {}
        self._recent: tuple[Operation | None, PreparedOperation | None] = (None, None)
        """The last operation prepared: to find it in the dictionary takes a microsecond."""
        self._broken: HoopError | None = None
        """The error that broke the links, which queued operations raise instead of running."""
        self._scratch: Array = np.empty(0, np.uint8)
        self._shm_executor = ShmExecutor(endpoint) if isinstance(endpoint, SharedEndpoint) else None
        self._multi_host_executor = MultiHostExecutor(endpoint) if isinstance(endpoint, SpanningEndpoint) else None

    # ---- planning

    def prepared(self, operation: Operation, text: str = "") -> PreparedOperation:
        """The operation, to be called with buffers and a deadline any number of times.

        ``text``: compared between ranks and shown in mismatch errors, if the operation is part of a larger one.
        """
        recent, prepared = self._recent
        if operation is recent and prepared is not None and not text:
            return prepared
        prepared = self._prepared.get((operation, text))
        if prepared is None:
            call = self.call(text or str(operation))
            prepared = self._prepared[operation, text] = PreparedOperation(self.endpoint, operation, call, self._plan)
            if len(self._prepared) > _CACHE_SIZE:
                del self._prepared[next(iter(self._prepared))]
        if not text:
            self._recent = operation, prepared
        return prepared

    def call(self, text: str) -> Call:
        """The call that the ranks of this communicator compare, for an operation of this description."""
        return Call(text, self.size)

    def check(self, operation: Operation, source: Array, destination: Array) -> None:
        """Raises InvalidArgument if the buffers do not fit the operation, before any byte has moved."""
        self.prepared(operation).check(source, destination)

    def _plan(self, operation: Operation, call: Call, deadline: float) -> tuple[str, RunFunction]:
        """Chooses the algorithm; returns its name and the function that runs the operation with it."""
        endpoint = self.endpoint
        if operation.compression:
            return operation.compression, CompressedAllReduce(operation, self.size, partial(self._prepared_part, call))
        if isinstance(endpoint, SharedEndpoint):
            endpoint.wait_for_peers(deadline)  # the choice depends on the memory that they share
        self._measure_links_once(operation, call, deadline)
        algorithm, entry = choose_algorithm(operation, endpoint, self.cost), CATALOG[operation.collective]
        if self._shm_executor is not None and algorithm in entry.shared:
            return algorithm, self._shm_executor.build(operation, algorithm, call)
        if self._multi_host_executor is not None and algorithm in entry.spanning:
            return algorithm, partial(self._multi_host_executor.run, operation, algorithm, call)
        plan = operation.plan(self.size, self.rank, algorithm)
        instructions, reduction = tuple(plan), Reduction(operation.op, operation.dtype)

        needs_confirmation = not operation.synchronizes and operation.collective != "send"

        def run(source: Array, destination: Array, deadline: float) -> None:
            def execute() -> None:
                buffers = source, destination, np.empty(plan.scratch, source.dtype)
                begin = partial(endpoint.begin_collective, call, deadline)
                run_over_links(endpoint, operation, begin, instructions, buffers, reduction, deadline)
                if needs_confirmation:
                    confirm_all_started(endpoint, deadline)

            run_collective(endpoint, execute)

        return algorithm, run

    def _prepared_part(self, call: Call, operation: Operation) -> PreparedOperation:
        """An operation that is part of another one; ranks compare the call of the whole."""
        return self.prepared(operation, call.text)

    def _measure_links_once(self, operation: Operation, call: Call, deadline: float) -> None:
        """Collective. Measures the links before the first choice that depends on their cost."""
        # Not with several ranks on a host: an error while measuring would not name the rank that was lost first.
        only_links = self._shm_executor is None and self._multi_host_executor is None and self.size > 2
        if self.cost is None and only_links and operation.collective == "all_reduce" and not operation.algorithm:
            sent = self.endpoint.messages_sent, self.endpoint.bytes_sent
            run_collective(self.endpoint, partial(self._measure_links, call, deadline))
            self.endpoint.messages_sent, self.endpoint.bytes_sent = sent  # not part of any operation's report

    def _measure_links(self, call: Call, deadline: float) -> None:
        self.endpoint.begin_collective(call, deadline)
        self.cost = measure_links(self.endpoint, deadline)

    # ---- running

    def run(
        self, operation: Operation, source: Array, destination: Array, timeout: float, round_index: int | None = None
    ) -> Report:
        """Runs the operation with the other ranks. ``round_index``: run only this round of its plan."""
        prepared = self.prepared(operation)
        if round_index is None and self.work_queue.try_acquire():
            try:
                endpoint = self.endpoint
                messages, sent, started = endpoint.messages_sent, endpoint.bytes_sent, time.monotonic()
                prepared(source, destination, started + timeout)
                seconds, algorithm = time.monotonic() - started, prepared.algorithm
                return Report(seconds, endpoint.messages_sent - messages, endpoint.bytes_sent - sent, algorithm)
            finally:
                self.work_queue.release()
        job = partial(prepared, source, destination)
        if round_index is not None:
            prepared.check(source, destination)
            job = partial(self._run_round, operation, source, destination, round_index)
        if not self.work_queue.try_acquire():
            report: Report = self.submit(operation, job, timeout, lambda: prepared.algorithm).wait()
            return report
        try:
            return self._run_reported(job, timeout, lambda: prepared.algorithm)
        finally:
            self.work_queue.release()

    def start(self, operation: Operation, source: Array, destination: Array, timeout: float) -> WorkHandle:
        """Queues the operation behind those started before, and returns at once. Leave the buffers alone until it ends.

        ``timeout`` counts from when the operation begins to run. After an error that involves other ranks, the
        operations queued behind it fail too: the state of the links is unknown.
        """
        prepared = self.prepared(operation)
        prepared.check(source, destination)
        return self.submit(operation, partial(prepared, source, destination), timeout, lambda: prepared.algorithm)

    def submit(
        self, operation: Operation, job: Callable[[float], None], timeout: float, algorithm: Callable[[], str]
    ) -> WorkHandle:
        """Queues ``job(deadline)``, which runs ``operation``.

        ``algorithm``: called after the job, for the report; an operation knows its algorithm once it has run.
        """
        handle = WorkHandle(str(operation))
        self.work_queue.submit(handle, partial(self._run_queued, operation, job, timeout, algorithm))
        return handle

    def _run_queued(
        self, operation: Operation, job: Callable[[float], None], timeout: float, algorithm: Callable[[], str]
    ) -> Report:
        if self._broken is not None:
            raise type(self._broken)(f"rank {self.rank}: {operation} was not run: {self._broken}")
        try:
            return self._run_reported(job, timeout, algorithm)
        except CollectiveMismatch as error:
            self._broken = error
            raise
        except (PeerError, MembershipChanged) as error:
            self._broken = with_operation(error, operation)
            raise self._broken from error

    def _run_reported(self, job: Callable[[float], None], timeout: float, algorithm: Callable[[], str]) -> Report:
        endpoint = self.endpoint
        messages, sent, started = endpoint.messages_sent, endpoint.bytes_sent, time.monotonic()
        job(started + timeout)
        return Report(
            time.monotonic() - started, endpoint.messages_sent - messages, endpoint.bytes_sent - sent, algorithm()
        )

    def _run_round(self, operation: Operation, source: Array, destination: Array, index: int, deadline: float) -> None:
        """Runs one round of the plan by messages. Plans in shared memory have no rounds to step through."""
        plan = operation.plan(self.size, self.rank, operation.default_algorithm)
        if not index or self._scratch.size < plan.scratch:
            self._scratch = np.empty(plan.scratch, source.dtype)  # kept: later rounds read it
        reduction = Reduction(operation.op, operation.dtype)
        buffers = source, destination, self._scratch
        begin = partial(self.endpoint.begin_collective, self.call(str(operation)), deadline, resumed=index > 0)
        steps = plan.rounds[index]
        run_collective(
            self.endpoint, partial(run_over_links, self.endpoint, operation, begin, steps, buffers, reduction, deadline)
        )

    # ---- repeated operations

    def prepare(
        self, operation: Operation, source: Array, destination: Array, timeout: float = 60.0
    ) -> PersistentAllReduce:
        """Collective. An all_reduce that runs repeatedly on the same memory.

        Every rank must prepare and call such operations in the same order. With vectors in arenas a call costs two
        barriers and the arithmetic; elsewhere it is ``run`` without the checks.
        """
        self.check(operation, source, destination)
        if operation.collective != "all_reduce":
            raise InvalidArgument(f"prepare: {operation.collective} cannot be prepared, only all_reduce")
        deadline, call = time.monotonic() + timeout, self.call(str(operation))
        if self._shm_executor is not None and not operation.algorithm and not operation.compression:
            algorithm, run = self._shm_executor.prepare(operation, call, source, destination, deadline)
        else:
            algorithm, run_any = self._plan(operation, call, deadline)
            run = partial(run_any, source, destination)
        return PersistentAllReduce(self, operation, algorithm, run)

    def map_peer_buffers(
        self, source: Array, destination: Array, deadline: float, call: Call
    ) -> tuple[list[Array], list[Array]] | None:
        """Collective. The sources and the destinations of all ranks, mapped here; None unless all are in arenas."""
        return self._shm_executor.map_peer_buffers(source, destination, deadline, call) if self._shm_executor else None

    # ---- closing

    def close(self) -> None:
        self.endpoint.close()
        self.work_queue.close()


class CompressedAllReduce:
    """A lossy all_reduce, ``Operation("all_reduce", …, compression="int8")``, for any vectors, one call at a time.

    A compressor keeps the error of each step and adds it to the same vector in the next step (error feedback). A vector
    is identified by its address: a gradient that is reduced in the same memory every step gets its error back.
    Different vectors must be in different memory. A new communicator starts without errors of earlier steps.

    It is the ``Peers`` of its compressors.
    """

    def __init__(
        self, operation: Operation, size: int, prepared: Callable[[Operation], Callable[[Array, Array, float], None]]
    ) -> None:
        """``prepared``: makes an operation callable, as part of this one."""
        self._operation, self._prepared = operation, prepared
        self.size = size
        self._compressors: dict[int, Compressor] = {}
        self._deadline = 0.0

    @np.errstate(all="ignore")
    def __call__(self, source: Array, destination: Array, deadline: float) -> None:
        count, self._deadline = self._operation.count, deadline
        result = destination[:count]
        if destination is not source:
            np.copyto(result, source[:count])
        self._compressor_of(source).all_reduce(self, result)
        if self._operation.op == "avg":
            result /= self.size

    def _compressor_of(self, source: Array) -> Compressor:
        address = source.__array_interface__["data"][0]
        found = self._compressors.get(address)
        if found is None:
            found = self._compressors[address] = compressor(self._operation.compression)
            if len(self._compressors) > MAX_VECTORS:
                del self._compressors[next(iter(self._compressors))]
        return found

    # ---- communication of the compressors

    def run_collective(self, collective: str, source: Array) -> Array:
        sent = source.reshape(-1).view(np.uint8)
        count = sent.size // (self.size if collective == "all_to_all" else 1)
        result = np.empty(self.size * count, np.uint8)
        self._prepared(Operation(collective, count, _BYTES))(sent, result, self._deadline)
        return result

    def all_reduce_sum(self, part: Array) -> Array:
        flat = np.ascontiguousarray(part, np.float32).reshape(-1)
        self._prepared(Operation("all_reduce", flat.size))(flat, flat, self._deadline)
        return flat.reshape(part.shape)


# ---- collectives of small Python values


def all_gather_object(communicator: Communicator, own: Any, timeout: float) -> list[Any]:
    """Collective. The values of all ranks, in rank order; each must be serializable as JSON."""
    encoded = np.frombuffer(json.dumps(own).encode(), np.uint8)
    lengths = np.zeros(communicator.size, np.int64)
    gather_lengths = Operation("all_gather", 1, dtype("int64"))
    communicator.run(gather_lengths, np.array([encoded.size], np.int64), lengths, timeout)
    width = int(lengths.max())
    padded = np.zeros(width, np.uint8)
    padded[: encoded.size] = encoded
    gathered = np.zeros(communicator.size * width, np.uint8)
    communicator.run(Operation("all_gather", width, _BYTES), padded, gathered, timeout)
    rows = gathered.reshape(communicator.size, width)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths.tolist(), strict=True)]


def any_rank(communicator: Communicator, flag: bool, values: Array, timeout: float) -> bool:
    """Collective. Returns whether ``flag`` is set on any rank.

    Also sums ``values`` in place. If only one rank fills them and the others pass zeros, this broadcasts them.
    """
    vector = np.append(np.float64(flag), values)
    communicator.run(Operation("all_reduce", vector.size, dtype("float64")), vector, vector, timeout)
    values[:] = vector[1:].reshape(values.shape)
    return bool(vector[0])
