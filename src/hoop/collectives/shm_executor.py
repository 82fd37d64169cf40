"""Executes plans between ranks that map each other's memory.

    each piece of a vector:  publish it in one's window ─▶ barrier ─▶ take, fold ─▶ (barrier ─▶ take, fold …)

A rank's *window* is the memory that it publishes: its slot (small vectors), its staging buffer (large vectors, piece by
piece), or the vector itself if it is in shared memory already (an arena); then ranks exchange only its address.

Each rank has two slots and two staging buffers, used alternately: publication p uses number p & 1, called its *parity*.
So one barrier for each publication is enough before a peer may go on to the next.

A rank reads its own data from its source where that equals its window, and publishes only the parts that others read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hoop.collectives.native_all_reduce import NativeAllReduce, NativeDirectAllReduce, supports
from hoop.collectives.native_all_reduce import flat_bytes as native_flat_bytes
from hoop.collectives.plan import WINDOW, CollectiveInstruction, Fold, Meet, Range, Take
from hoop.collectives.reduction import QUIET, Array, Reduction
from hoop.collectives.registry import Operation
from hoop.errors import DeadlineExceeded, InvalidArgument
from hoop.memory.dtypes import DType
from hoop.transport.base import SharedEndpoint
from hoop.transport.call_check import Call
from hoop.transport.shm_segment import SLOT_BYTES, STAGING_BYTES

Step = Callable[[Array, Array, int], None]
"""``step(source, destination, start)``: works on the piece that begins at element ``start`` of every block."""
WindowSteps = list[tuple[list[Step], list[list[Step]]]]
"""For each parity: the steps that publish a piece, and the steps after each barrier (the phases)."""
Span = tuple[int, int]


class WindowedOperation:
    """One operation of one rank through slots or staging buffers, planned once, run on any source and destination."""

    def __init__(
        self,
        endpoint: SharedEndpoint,
        operation: Operation,
        algorithm: str,
        windows: Sequence[Sequence[Array]],
        piece: int,
        call: Call | None,
    ) -> None:
        """``windows``: the windows of all ranks, for each parity. ``piece``: the most elements of a block that fit
        into a window at once. ``call``: compared at the first barrier; None: it was compared before."""
        self._call = call
        self._endpoint, self._operation, self._algorithm = endpoint, operation, algorithm
        self._reduction = Reduction(operation.op, operation.dtype)
        count = operation.count
        full, last = (self._window_steps(windows, size) for size in (min(piece, count), count % piece))
        self._pieces = [
            (start, full if start + piece <= count or piece >= count else last) for start in range(0, count, piece)
        ]

    def __call__(self, source: Array, destination: Array, deadline: float) -> None:
        call = self._call
        for start, steps in self._pieces:
            phases = self._publish(source, destination, start, steps)
            self._run_phases(source, destination, start, phases, deadline, call)
            call = None

    def try_run(self, source: Array, destination: Array, until: float, deadline: float) -> Callable[[], None] | None:
        """Runs an operation of a single piece, if the other ranks arrive by ``until``.

        Returns None if it is done, else the function that resumes it. Only the first barrier can take long: a rank that
        has entered it goes through the others without delay.
        """
        start, steps = self._pieces[0]
        phases = self._publish(source, destination, start, steps)
        try:
            self._endpoint.barrier(until, self._call)
        except DeadlineExceeded:
            return partial(self._run_phases, source, destination, start, phases, deadline, self._call)
        for step in phases[0]:
            step(source, destination, start)
        self._run_phases(source, destination, start, phases[1:], deadline)
        return None

    @property
    def can_suspend(self) -> bool:
        """Whether ``try_run`` can return before the end: the whole vector fits into a window."""
        return len(self._pieces) == 1

    def _publish(self, source: Array, destination: Array, start: int, steps: WindowSteps) -> list[list[Step]]:
        """Publishes the piece that begins at ``start``; returns its phases."""
        endpoint = self._endpoint
        endpoint.publish_count = publication = endpoint.publish_count + 1
        publish_steps, phases = steps[publication & 1]
        for step in publish_steps:
            step(source, destination, start)
        return phases

    def _run_phases(
        self,
        source: Array,
        destination: Array,
        start: int,
        phases: list[list[Step]],
        deadline: float,
        call: Call | None = None,
    ) -> None:
        """Runs each phase after its barrier; the first barrier compares ``call`` unless it is None."""
        barrier = self._endpoint.barrier
        for phase in phases:
            barrier(deadline, call)
            call = None
            for step in phase:
                step(source, destination, start)

    # ---- planning

    def _window_steps(self, windows: Sequence[Sequence[Array]], size: int) -> WindowSteps:
        """The steps for a piece of ``size`` elements of every block."""
        if not size:
            return []
        spans = self._published_spans(size)
        return [(self._publish_steps(one, spans, size), self._phases(one, size)) for one in windows]

    def _plan(self, rank: int, size: int) -> list[CollectiveInstruction]:
        return list(self._operation.plan(self._endpoint.size, rank, self._algorithm, size))

    def _published_spans(self, size: int) -> list[Span]:
        """The parts of this rank's window that other ranks read; of all ranks' plans, so found once for all windows."""
        rank, ranks = self._endpoint.rank, self._endpoint.size
        needed = {
            (one.remote.start, one.remote.stop)
            for peer in range(ranks)
            for one in self._plan(peer, size)
            if peer != rank and (isinstance(one, Fold) or (isinstance(one, Take) and one.peer == rank))
        }
        needed -= {  # other ranks read these ranges only after this rank has folded into them
            (one.local.start, one.local.stop)
            for one in self._plan(rank, size)
            if isinstance(one, Fold) and one.local.buffer == WINDOW
        }
        return _merge_spans(needed)

    def _publish_steps(self, windows: Sequence[Array], spans: Sequence[Span], size: int) -> list[Step]:
        """Copies these parts of this rank's source."""
        rank = self._endpoint.rank
        steps: list[Step] = []
        for start, stop in spans:
            for low, high, offset in _cut_at_blocks(start, stop, size, self._operation.count):
                steps.append(_publish_step(windows[rank][low:high], offset))
        return steps

    def _phases(self, windows: Sequence[Array], size: int) -> list[list[Step]]:
        """The steps after each barrier."""
        rank, count = self._endpoint.rank, self._operation.count
        folded: set[Range] = set()
        phases: list[list[Step]] = []
        for instruction in self._plan(rank, size):
            if isinstance(instruction, Meet):
                phases.append([])
            elif isinstance(instruction, Take) and instruction.local.length:
                peer, remote, local = instruction
                (_, _, offset), *more = _cut_at_blocks(local.start, local.stop, size, count)
                assert not more, f"{instruction} takes more than one block"
                own = _vector_offset(remote, size, count) if peer == rank and remote not in folded else None
                window = windows[peer][remote.start : remote.stop]
                phases[-1].append(_take_step(window, offset, local.length, own))
            elif isinstance(instruction, Fold) and instruction.local.length:
                remote, local = instruction.remote, instruction.local
                parts = [window[remote.start : remote.stop] for window in windows]
                offset = _vector_offset(local, size, count)
                into = windows[rank][local.start : local.stop] if local.buffer == WINDOW else None
                own_offset = _vector_offset(remote, size, count)
                phases[-1].append(_fold_step(self._reduction, parts, rank, own_offset, into, offset))
                if local.buffer == WINDOW:
                    folded.add(local)
        return phases


def _merge_spans(spans: set[Span]) -> list[Span]:
    """Merges spans that overlap or are adjacent; drops empty ones."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def _cut_at_blocks(start: int, stop: int, size: int, count: int) -> list[tuple[int, int, int]]:
    """Cuts a range of a window at the borders of its blocks, which have ``size`` elements.

    Each entry: start, stop, and the corresponding offset in a vector whose blocks have ``count`` elements.
    """
    cuts = [start, *range((start // size + 1) * size, stop, size), stop]
    return [(low, high, low // size * count + low % size) for low, high in itertools.pairwise(cuts)]


def _vector_offset(where: Range, size: int, count: int) -> int:
    return where.start // size * count + where.start % size


def _publish_step(window: Array, offset: int) -> Step:
    length = window.size

    def publish(source: Array, destination: Array, start: int) -> None:
        begin = offset + start
        window[...] = source[begin : begin + length]

    return publish


def _take_step(window: Array, offset: int, length: int, own: int | None) -> Step:
    """``own``: the offset in this rank's source, if the data is its own; None: it is read from ``window``."""

    def take(source: Array, destination: Array, start: int) -> None:
        begin = offset + start
        destination[begin : begin + length] = window

    def copy_own(source: Array, destination: Array, start: int) -> None:
        if source is not destination or own != offset:
            begin, own_begin = offset + start, own + start  # type: ignore[operator]
            destination[begin : begin + length] = source[own_begin : own_begin + length]

    return take if own is None else copy_own


def _fold_step(reduction: Reduction, parts: list[Array], rank: int, own: int, into: Array | None, offset: int) -> Step:
    """``parts``: the windows of all ranks; this rank's part is read from offset ``own`` of its source.

    The result goes to ``into``, or to the destination at ``offset``.
    """
    length, fold = parts[0].size, reduction.fold

    def step(source: Array, destination: Array, start: int) -> None:
        begin, own_begin = offset + start, own + start
        vectors = parts.copy()
        vectors[rank] = source[own_begin : own_begin + length]
        fold(vectors, [destination[begin : begin + length] if into is None else into])

    return step


FLAT_BYTES = 8 * 1024
"""Up to this size it costs less to read the vectors of all ranks than to pass a second barrier in Python."""


def flat_bytes(endpoint: SharedEndpoint) -> int:
    """The largest vector that is reduced with one barrier; the same on every rank."""
    return native_flat_bytes(endpoint.size) if endpoint.native is not None else FLAT_BYTES


RunFunction = Callable[[Array, Array, float], None]
"""``run(source, destination, deadline)``: runs a planned operation."""


class ShmExecutor:
    """Executes one rank's plans in shared memory."""

    def __init__(self, endpoint: SharedEndpoint) -> None:
        self._endpoint = endpoint
        self._window_cache: dict[tuple[str, DType], list[list[Array]]] = {}

    def build(self, operation: Operation, algorithm: str, call: Call) -> RunFunction:
        """The function that runs the operation on any buffers. The endpoint's peers must be mapped already."""
        if operation.collective == "barrier":
            return lambda source, destination, deadline: self._endpoint.barrier(deadline, call)
        if algorithm == "direct":
            return partial(self._run_direct, operation, call, Reduction(operation.op, operation.dtype), [])
        return self._build_windowed(operation, algorithm, call)

    # ---- through slots and staging buffers

    def _build_windowed(self, operation: Operation, algorithm: str, call: Call | None) -> RunFunction:
        """``call``: compared at the first barrier; None: it was compared before."""
        if not operation.count:  # nothing to move, but a barrier, because another rank's call may have a count
            return lambda source, destination, deadline: self._endpoint.barrier(deadline, call)
        if self._is_native(operation, algorithm):
            return NativeAllReduce(self._endpoint, operation, algorithm, call)
        kind, blocks = operation.dtype, operation.blocks(self._endpoint.size)
        small = blocks * operation.count * kind.itemsize <= SLOT_BYTES and algorithm == "flat"
        windows, capacity = ("slots", SLOT_BYTES) if small else ("staging_buffers", STAGING_BYTES)
        piece = max(1, capacity // kind.itemsize // blocks)
        return WindowedOperation(self._endpoint, operation, algorithm, self._windows(windows, kind), piece, call)

    def _is_native(self, operation: Operation, algorithm: str) -> bool:
        """Whether the native core runs this operation through slots or staging buffers."""
        if operation.collective != "all_reduce" or self._endpoint.native is None or not supports(operation.dtype.name):
            return False
        return algorithm == "staged" or operation.count * operation.dtype.itemsize <= SLOT_BYTES

    def _windows(self, name: str, kind: DType) -> list[list[Array]]:
        """The ``slots`` or ``staging_buffers`` of all ranks as arrays of this dtype, for each parity."""
        windows = self._window_cache.get((name, kind))
        if windows is None:
            segments = self._endpoint.segments
            windows = [[getattr(segment, name)[parity].view(kind.numpy) for segment in segments] for parity in (0, 1)]
            self._window_cache[name, kind] = windows
        return windows

    # ---- in arenas

    def arena_offset(self, array: Array) -> int | None:
        """The array's offset in this rank's arena, in bytes; None if it is not in it."""
        arena = self._endpoint.arenas[self._endpoint.rank]
        if arena is None:
            return None
        start = int(array.__array_interface__["data"][0] - arena.__array_interface__["data"][0])
        return start if start >= 0 and start + array.nbytes <= arena.nbytes else None

    def map_peer_buffers(
        self, source: Array, destination: Array, deadline: float, call: Call
    ) -> tuple[list[Array], list[Array]] | None:
        """Collective. The sources and the destinations of all ranks, by rank; None unless all of them are in arenas.

        It contains a barrier, which compares ``call``.
        """
        endpoint = self._endpoint
        arenas = endpoint.arenas  # another thread may close the endpoint
        endpoint.publish_count += 1
        parity = endpoint.publish_count & 1
        # Words 0 and 1: offset + 1 of source and destination, or 0 if not in the arena; words 2 and 3: their elements.
        own_words = endpoint.segments[endpoint.rank].control_words[parity]
        for index, array in enumerate((source, destination)):
            offset = self.arena_offset(array)
            own_words[index] = 0 if offset is None else offset + 1
            own_words[2 + index] = array.size
        endpoint.barrier(deadline, call)
        all_words = [segment.control_words[parity].tolist() for segment in endpoint.segments]
        if not all(words[0] and words[1] for words in all_words):
            return None
        mapped: tuple[list[Array], list[Array]] = ([], [])
        for index, arrays in enumerate(mapped):
            for arena, words in zip(arenas, all_words, strict=True):
                assert arena is not None, "a rank that publishes an arena offset has an arena"
                start, size = words[index] - 1, words[2 + index] * source.itemsize
                arrays.append(arena[start : start + size].view(source.dtype))
        return mapped

    def _run_direct(
        self,
        operation: Operation,
        call: Call,
        reduction: Reduction,
        fallback: list[RunFunction],
        source: Array,
        destination: Array,
        deadline: float,
    ) -> None:
        """Runs an operation in the arenas of all ranks; through staging buffers if some vector is not in one.

        ``fallback``: empty, or the operation through staging buffers once it was needed.
        """
        endpoint = self._endpoint
        mapped = self.map_peer_buffers(source, destination, deadline, call)
        if mapped is None:
            if operation.algorithm == "direct":
                raise InvalidArgument(f"algorithm: direct needs all buffers in arenas; {operation}")
            if not fallback:
                fallback.append(self._build_windowed(operation, "staged", None))
            fallback[0](source, destination, deadline)
            return
        sources, destinations = mapped
        # Without the first instruction: ``map_peer_buffers`` was the first barrier.
        for instruction in list(operation.plan(endpoint.size, endpoint.rank, "direct"))[1:]:
            match instruction:
                case Meet():
                    endpoint.barrier(deadline)
                case Take(peer, remote, local) if local.length:
                    np.copyto(destination[local.start : local.stop], sources[peer][remote.start : remote.stop])
                case Fold(remote, local, to_all) if local.length:
                    targets = destinations if to_all else [destination]
                    reduction.fold(
                        [source[remote.start : remote.stop] for source in sources],
                        [target[local.start : local.stop] for target in targets],
                    )

    # ---- persistent all_reduce

    def prepare(
        self, operation: Operation, call: Call, source: Array, destination: Array, deadline: float
    ) -> tuple[str, Callable[[float], None]]:
        """Collective. Prepares an all_reduce that runs repeatedly on the same memory.

        Returns the algorithm and the function to call with a deadline.
        """
        endpoint = self._endpoint
        endpoint.wait_for_peers(deadline)
        if operation.count * operation.dtype.itemsize <= flat_bytes(endpoint):
            return "flat", self._prepare_flat(operation, call, source, destination)
        preparing = Call(f"prepare {call.text}", endpoint.size)
        mapped = self.map_peer_buffers(source, destination, deadline, preparing)
        if mapped is None:
            staged = self._build_windowed(operation, "staged", call)
            if isinstance(staged, NativeAllReduce):
                return "staged", staged.bind(source, destination)
            return "staged", partial(staged, source, destination)
        if endpoint.native is not None and supports(operation.dtype.name):
            return "direct", NativeDirectAllReduce(endpoint, operation, call, *mapped).run
        fold = next(one for one in operation.plan(endpoint.size, endpoint.rank, "direct") if isinstance(one, Fold))
        span = slice(fold.remote.start, fold.remote.stop)
        sources, destinations = ([array[span] for array in arrays] for arrays in mapped)
        reduce_slice = Reduction(operation.op, operation.dtype).bind(sources, destinations)
        barrier = endpoint.barrier

        def direct(deadline: float) -> None:
            barrier(deadline, call)
            QUIET.run(reduce_slice)
            barrier(deadline)

        return "direct", direct

    def _prepare_flat(
        self, operation: Operation, call: Call, source: Array, destination: Array
    ) -> Callable[[float], None]:
        """Publish, barrier and fold without intermediate steps: at this size Python's own time dominates."""
        if operation.count and self._is_native(operation, "flat"):
            return NativeAllReduce(self._endpoint, operation, "flat", call).bind(source, destination)
        endpoint, count, rank = self._endpoint, operation.count, self._endpoint.rank
        own, into, barrier = source[:count], [destination[:count]], endpoint.barrier
        vectors = [[one[:count] for one in windows] for windows in self._windows("slots", operation.dtype)]
        # As bytes: copying between memoryviews takes half the time of copying between arrays.
        own_slots, own_bytes = [slots[rank].view(np.uint8).data for slots in vectors], own.view(np.uint8).data
        for slots in vectors:
            slots[rank] = own
        folds = [Reduction(operation.op, operation.dtype).bind(slots, into) for slots in vectors]

        def flat(deadline: float) -> None:
            endpoint.publish_count = publication = endpoint.publish_count + 1
            own_slots[publication & 1][:] = own_bytes
            barrier(deadline, call)
            QUIET.run(folds[publication & 1])

        return flat
