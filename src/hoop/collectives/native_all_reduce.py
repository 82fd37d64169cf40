"""All-reduces in the native core, each planned once: publish, barrier, fold and copy are one call of the C library.

``ShmExecutor`` and ``OrderedAllReduce`` use these classes where every rank has the native core (``endpoint.native``);
elsewhere NumPy does the same in the same order. The results have the same bits.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.collectives.shard_tree import Leaf, Sum
from hoop.errors import DeadlineExceeded
from hoop.native.library import (
    AGAIN,
    BLOCK_BYTES,
    DIRECT,
    DTYPES,
    FLAT,
    OPERATORS,
    ORDERED,
    STAGED,
    AllReduceState,
    Step,
    addresses,
)
from hoop.transport.base import SharedEndpoint, WaitingWork
from hoop.transport.call_check import Call
from hoop.transport.shm_segment import SLOT_BYTES, STAGING_BYTES

FLAT_READ_BYTES = 16 * 1024
"""Up to this many bytes read from peers, it costs less to read all vectors than to pass a second barrier."""
_LINE_BYTES = 64
_ARRIVING = 1
"""The phase in which a call waits for all ranks to publish."""


def flat_bytes(ranks: int) -> int:
    """The largest vector for which one barrier is faster than two."""
    return min(SLOT_BYTES, FLAT_READ_BYTES // max(1, ranks - 1))


class _NativeReduction:
    """One prepared call of the library."""

    def __init__(self, endpoint: SharedEndpoint, call: Call | None, state: AllReduceState, *memory: object) -> None:
        """``call``: compared at the first barrier; None: it was compared before. ``memory``: what ``state`` points
        to, kept alive."""
        native = endpoint.native
        assert native is not None, "the ranks have agreed on the native core"
        self._endpoint, self._call, self._state, self._memory = endpoint, call, state, (*memory, native)
        state.endpoint = native.address
        state.compares, state.fingerprint = call is not None, call.fingerprint if call is not None else 0
        self._pointer = ctypes.c_void_p(ctypes.addressof(state))
        self._all_reduce = native.library.all_reduce
        self._resume = partial(native.library.resume, ctypes.addressof(state))

    def run(self, deadline: float) -> None:
        """Runs it on the vectors in its state."""
        if code := self._all_reduce(self._pointer):
            self.finish(code, deadline)

    def finish(self, code: int, deadline: float) -> None:
        """Ends a run that returned ``code``: waits until the deadline, or raises its error."""
        try:
            self._endpoint.complete_native(code, self._resume, deadline, self._call)
        except BaseException:
            self._state.phase = 0
            raise


class NativeAllReduce(_NativeReduction):
    """An all_reduce through slots (``flat``) or staging buffers (``staged``), for any source and destination."""

    def __init__(self, endpoint: SharedEndpoint, operation: Operation, algorithm: str, call: Call | None) -> None:
        name, capacity = ("slots", SLOT_BYTES) if algorithm == "flat" else ("staging_buffers", STAGING_BYTES)
        windows = [
            addresses([_array_address(getattr(segment, name)[turn]) for segment in endpoint.segments])
            for turn in (0, 1)
        ]
        state, temporaries = _state(operation.dtype.name, operation.op, operation.count, 2)
        state.algorithm = FLAT if algorithm == "flat" else STAGED
        state.capacity = capacity // operation.dtype.itemsize
        for turn, one in enumerate(windows):
            state.windows[turn] = ctypes.addressof(one)
        super().__init__(endpoint, call, state, windows, temporaries)
        self._address = 0
        """The address that ``run_at`` has put into the state."""
        self._vectors: tuple[Callable[[], object], Callable[[], object]] = (_nothing, _nothing)
        """Weak references to the source and the destination whose addresses are in the state. NumPy moves the memory
        of no array that has a weak reference."""

    def __call__(self, source: Array, destination: Array, deadline: float) -> None:
        self._set_vectors(source, destination)
        if code := self._all_reduce(self._pointer):
            self.finish(code, deadline)

    def try_run(self, source: Array, destination: Array, until: float, deadline: float) -> Callable[[], None] | None:
        """Runs it if the other ranks arrive by ``until``; returns None if it is done, else the function that resumes
        it."""
        self._set_vectors(source, destination)
        code = self._all_reduce(self._pointer)
        if not code:
            return None
        try:
            self._endpoint.complete_native(code, self._resume, until, self._call)
        except DeadlineExceeded:
            return partial(self._go_on, source, destination, deadline)
        except BaseException:
            self._state.phase = 0
            raise
        return None

    can_suspend = True
    """Whether ``try_run`` can return before the end."""

    def run_at(self, address: int) -> int:
        """Runs it in place on the vector at this address, and returns the library's code; ``finish`` ends it.

        The caller has checked the vector and keeps it alive.
        """
        if address != self._address:
            self._state.source = self._state.destination = self._address = address
            self._vectors = _nothing, _nothing
        return self._all_reduce(self._pointer)

    def bind(self, source: Array, destination: Array) -> Callable[[float], None]:
        """The function that runs it on these vectors, with a deadline."""
        self._set_vectors(source, destination)
        self._memory = (*self._memory, source, destination)
        return self.run

    def _go_on(self, source: Array, destination: Array, deadline: float) -> None:
        """Resumes a suspended all-reduce. Its arguments only hold references to the vectors."""
        self.finish(AGAIN, deadline)

    def _set_vectors(self, source: Array, destination: Array) -> None:
        known_source, known_destination = self._vectors
        if known_source() is source and known_destination() is destination:
            return
        self._state.source, self._state.destination = _array_address(source), _array_address(destination)
        self._vectors = weakref.ref(source), weakref.ref(destination)
        self._address = 0


def _nothing() -> None:
    """In the place of a weak reference."""


class NativeDirectAllReduce(_NativeReduction):
    """An all_reduce of vectors in the ranks' arenas: every rank folds its slice into all destinations."""

    def __init__(
        self,
        endpoint: SharedEndpoint,
        operation: Operation,
        call: Call,
        sources: Sequence[Array],
        destinations: Sequence[Array],
    ) -> None:
        """``sources``, ``destinations``: those of all ranks, mapped here."""
        parts, targets = (addresses([_array_address(one) for one in arrays]) for arrays in (sources, destinations))
        state, temporaries = _state(operation.dtype.name, operation.op, operation.count, 2)
        state.algorithm = DIRECT
        state.parts, state.targets = ctypes.addressof(parts), ctypes.addressof(targets)
        super().__init__(endpoint, call, state, parts, targets, temporaries, sources, destinations)


class NativeOrderedSum(_NativeReduction):
    """The sum of all ranks' shards along a fixed tree, in the ranks' arenas."""

    def __init__(
        self,
        endpoint: SharedEndpoint,
        call: Call,
        expression: Sum,
        slots: Sequence[Array],
        outputs: Sequence[Array],
        span: tuple[int, int],
    ) -> None:
        """``slots``: for each rank its slots, one row each. ``outputs``: of all ranks. ``span``: the elements that
        this rank sums."""
        leaves, steps, result, temporary_count = sum_steps(expression)
        parts = addresses([_array_address(slots[leaf.rank][leaf.slot]) for leaf in leaves])
        targets = addresses([_array_address(one) for one in outputs])
        additions = (Step * max(1, len(steps)))(*(Step(*one) for one in steps))
        state, temporaries = _state(outputs[0].dtype.name, "sum", outputs[0].size, temporary_count)
        state.algorithm, state.result = ORDERED, result
        state.low, state.high = span
        state.parts, state.parts_count = ctypes.addressof(parts), len(leaves)
        state.targets = ctypes.addressof(targets)
        state.steps, state.steps_count = ctypes.addressof(additions), len(steps)
        super().__init__(endpoint, call, state, parts, targets, additions, temporaries, slots, outputs)
        self._worked_s = 0.0

    def run(self, deadline: float, work: WaitingWork | None = None) -> None:
        """Runs it on the vectors in its state; ``work`` is done while it waits."""
        self._worked_s = 0.0
        code = self._all_reduce(self._pointer) if work is None else self._run_with(work)
        if code:
            self.finish(code, deadline)

    def _run_with(self, work: WaitingWork) -> int:
        """Runs it with pieces of work in place of polling; returns the library's code."""
        native, state = self._endpoint.native, self._state
        assert native is not None, "it has the native core"
        yields, native.state.yields = native.state.yields, 0
        try:
            code = self._all_reduce(self._pointer)
            while code == AGAIN:
                arriving, before = state.phase == _ARRIVING, work.seconds
                more = work()
                self._worked_s += work.seconds - before if arriving else 0.0
                if not more:
                    break
                code = self._all_reduce(self._pointer)
        except BaseException:
            state.phase = 0
            raise
        finally:
            native.state.yields = yields
        return self._all_reduce(self._pointer) if code == AGAIN else code

    @property
    def waited_s(self) -> float:
        """Seconds that the last call waited for the other ranks to arrive, without those spent in its work."""
        return max(0.0, self._state.waited_ns * 1e-9 - self._worked_s)


def sum_steps(expression: Sum) -> tuple[list[Leaf], list[tuple[int, int, int]], int, int]:
    """The leaves of an expression, its additions, the index of the result and the number of temporaries.

    An addition is (left, right, result): indexes of leaves or, behind them, of temporaries. Its result is never one of
    its operands.
    """
    leaves = _leaves(expression)
    index_of = {leaf: index for index, leaf in enumerate(leaves)}
    steps: list[tuple[int, int, int]] = []

    def build(part: Sum, depth: int) -> int:
        if isinstance(part, Leaf):
            return index_of[part]
        # Two temporaries for each depth: the left sum stays in one of this depth while the right one is made below.
        left, right = build(part[0], depth), build(part[1], depth + 1)
        first = len(leaves) + 2 * depth
        steps.append((left, right, first + (left == first)))
        return steps[-1][2]

    result = build(expression, 0)
    used = max([result, *(step[2] for step in steps)]) - len(leaves) + 1
    return leaves, steps, result, max(1, used)


def _leaves(part: Sum) -> list[Leaf]:
    return [part] if isinstance(part, Leaf) else _leaves(part[0]) + _leaves(part[1])


def supports(dtype_name: str) -> bool:
    """Whether the library folds elements of this type."""
    return dtype_name in DTYPES


def _state(dtype_name: str, op: str, count: int, temporary_count: int) -> tuple[AllReduceState, object]:
    """The state of a reduction, and the memory of its temporaries."""
    memory = ctypes.create_string_buffer(temporary_count * BLOCK_BYTES + _LINE_BYTES)
    start = ctypes.addressof(memory)
    state = AllReduceState(
        count=count,
        dtype=DTYPES.index(dtype_name),
        operator=OPERATORS.index("sum" if op == "avg" else op),
        itemsize=_ITEM_BYTES[dtype_name],
        average=op == "avg",
        temporaries=start + -start % _LINE_BYTES,
    )
    return state, memory


_ITEM_BYTES = {"float16": 2, "float32": 4, "float64": 8, "bfloat16": 2, "int8": 1, "int32": 4, "int64": 8, "uint8": 1}


def _array_address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
