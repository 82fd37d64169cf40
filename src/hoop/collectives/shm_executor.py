"""One operation through slots or stages, worked out once and run on any buffers.

    each piece:  put what others will read into one's window ─▶ meet ─▶ take, fold ─▶ (meet ─▶ take, fold …)

What a rank reads of its own it reads from its source, where that is the same as its window: only what others read is
put there. A vector that does not fit goes through piece by piece; the two windows are used in turn.

Runs plans between ranks that see each other's memory.

A vector is laid open in this rank's slot (small) or stage (large, piece by piece), or it is in shared memory
already (an arena), where only its place is told. Two of each are used in turn, so one meeting an operation is enough
before a peer may go on to the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from hoop.collectives.plan import WINDOW, CollectiveInstruction, Fold, Meet, Range, Take
from hoop.collectives.reduction import QUIET, Array, Reduction
from hoop.collectives.registry import Operation
from hoop.errors import DeadlineExceeded, InvalidArgument
from hoop.memory.dtypes import DType
from hoop.transport.base import SharedEndpoint
from hoop.transport.calls import Call
from hoop.transport.shm_segment import SLOT_BYTES, STAGE_BYTES

Step = Callable[[Array, Array, int], None]
"""From the source, to the destination, for the piece that begins at this element of every block."""
Turns = list[tuple[list[Step], list[list[Step]]]]
"""For each turn: how a piece is put into one's window, and what is done after each meeting."""
Span = tuple[int, int]


class WindowedOperation:
    """One operation of one rank, for any source and destination."""

    def __init__(
        self,
        endpoint: SharedEndpoint,
        operation: Operation,
        algorithm: str,
        windows: Sequence[Sequence[Array]],
        piece: int,
        call: Call | None,
    ) -> None:
        """``windows``: everybody's, for each turn; ``piece``: the most elements of a block that go through at once;
        ``call``: compared at the first meeting, unless it was before."""
        self._call = call
        self._endpoint, self._operation, self._algorithm = endpoint, operation, algorithm
        self._reduction = Reduction(operation.op, operation.dtype)
        count = operation.count
        full, rest = (self._turns(windows, size) for size in (min(piece, count), count % piece))
        self._pieces = [
            (start, full if start + piece <= count or piece >= count else rest)
            for start in range(0, count, piece)
        ]

    def __call__(self, source: Array, destination: Array, deadline: float) -> None:
        call = self._call
        for start, turns in self._pieces:
            phases = self._put(source, destination, start, turns)
            self._go_on(source, destination, start, phases, deadline, call)
            call = None

    def begin(
        self, source: Array, destination: Array, until: float, deadline: float
    ) -> Callable[[], None] | None:
        """Runs it if the others come by ``until``; else says how to go on from where it is.

        Only the first meeting can take long: who has come to it goes through the others.
        """
        start, turns = self._pieces[0]
        phases = self._put(source, destination, start, turns)
        try:
            self._endpoint.meet(until, self._call)
        except DeadlineExceeded:
            return partial(self._go_on, source, destination, start, phases, deadline, self._call)
        for step in phases[0]:
            step(source, destination, start)
        self._go_on(source, destination, start, phases[1:], deadline)
        return None

    @property
    def whole(self) -> bool:
        """Whether it goes through in one piece."""
        return len(self._pieces) == 1

    def _put(self, source: Array, destination: Array, start: int, turns: Turns) -> list[list[Step]]:
        """Lays a piece open; what is then to do after each meeting."""
        endpoint = self._endpoint
        endpoint.publications = publication = endpoint.publications + 1
        puts, phases = turns[publication & 1]
        for put in puts:
            put(source, destination, start)
        return phases

    def _go_on(
        self,
        source: Array,
        destination: Array,
        start: int,
        phases: list[list[Step]],
        deadline: float,
        call: Call | None = None,
    ) -> None:
        """From a meeting on, at which the call is compared, if it was not before."""
        meet = self._endpoint.meet
        for phase in phases:
            meet(deadline, call)
            call = None
            for step in phase:
                step(source, destination, start)

    # ---- working it out

    def _turns(self, windows: Sequence[Sequence[Array]], size: int) -> Turns:
        return [(self._puts(one, size), self._phases(one, size)) for one in windows] if size else []

    def _plan(self, rank: int, size: int) -> list[CollectiveInstruction]:
        return list(self._operation.plan(self._endpoint.size, rank, self._algorithm, size))

    def _puts(self, windows: Sequence[Array], size: int) -> list[Step]:
        """What of this rank's source the others read."""
        rank, ranks = self._endpoint.rank, self._endpoint.size
        needed = {
            (one.there.start, one.there.stop)
            for peer in range(ranks)
            for one in self._plan(peer, size)
            if peer != rank and (isinstance(one, Fold) or (isinstance(one, Take) and one.peer == rank))
        }
        needed -= {  # what this rank folds there itself is not its source any more when they read it
            (one.here.start, one.here.stop)
            for one in self._plan(rank, size)
            if isinstance(one, Fold) and one.here.place == WINDOW
        }
        puts: list[Step] = []
        for start, stop in _joined(needed):
            for low, high, at in _blocks(start, stop, size, self._operation.count):
                puts.append(_put(windows[rank][low:high], at))
        return puts

    def _phases(self, windows: Sequence[Array], size: int) -> list[list[Step]]:
        """What is done after each meeting."""
        rank, count = self._endpoint.rank, self._operation.count
        folded: set[Range] = set()
        phases: list[list[Step]] = []
        for instruction in self._plan(rank, size):
            if isinstance(instruction, Meet):
                phases.append([])
            elif isinstance(instruction, Take) and instruction.here.length:
                peer, there, here = instruction
                (_, _, at), *more = _blocks(here.start, here.stop, size, count)
                assert not more, f"{instruction} takes more than one block"
                own = _source_at(there, size, count) if peer == rank and there not in folded else None
                phases[-1].append(_take(windows[peer][there.start : there.stop], at, here.length, own))
            elif isinstance(instruction, Fold) and instruction.here.length:
                there, here = instruction.there, instruction.here
                parts = [window[there.start : there.stop] for window in windows]
                at = _source_at(here, size, count)
                into = windows[rank][here.start : here.stop] if here.place == WINDOW else None
                own_at = _source_at(there, size, count)
                phases[-1].append(_fold(self._reduction, parts, rank, own_at, into, at))
                if here.place == WINDOW:
                    folded.add(here)
        return phases


def _joined(spans: set[Span]) -> list[Span]:
    """Spans that follow one another, or overlap, as one."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if start == stop:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _blocks(start: int, stop: int, size: int, count: int) -> list[tuple[int, int, int]]:
    """A range of a window, whose blocks have ``size`` elements, cut at blocks: start, stop, and where each begins in a
    vector whose blocks have ``count``."""
    cuts = [start, *range((start // size + 1) * size, stop, size), stop]
    return [(low, high, low // size * count + low % size) for low, high in itertools.pairwise(cuts)]


def _source_at(where: Range, size: int, count: int) -> int:
    return where.start // size * count + where.start % size


def _put(window: Array, at: int) -> Step:
    length = window.size

    def put(source: Array, destination: Array, start: int) -> None:
        begin = at + start
        window[...] = source[begin : begin + length]

    return put


def _take(window: Array, at: int, length: int, own: int | None) -> Step:
    def take(source: Array, destination: Array, start: int) -> None:
        begin = at + start
        destination[begin : begin + length] = window

    def keep(source: Array, destination: Array, start: int) -> None:
        if source is not destination or own != at:
            begin, begun = at + start, own + start  # type: ignore[operator]
            destination[begin : begin + length] = source[begun : begun + length]

    return take if own is None else keep


def _fold(reduction: Reduction, parts: list[Array], rank: int, own: int, into: Array | None, at: int) -> Step:
    length, fold = parts[0].size, reduction.fold

    def step(source: Array, destination: Array, start: int) -> None:
        begin, begun = at + start, own + start
        vectors = parts.copy()
        vectors[rank] = source[begun : begun + length]
        fold(vectors, [destination[begin : begin + length] if into is None else into])

    return step


FLAT_BYTES = 8 * 1024
"""Up to here reading everybody's vector costs less than a second meeting."""

RunFunction = Callable[[Array, Array, float], None]
"""An operation: from the source to the destination, until the deadline."""


class ShmExecutor:
    """One rank's side of shared plans."""

    def __init__(self, endpoint: SharedEndpoint) -> None:
        self._endpoint = endpoint
        self._views: dict[tuple[str, DType], list[list[Array]]] = {}

    def move(self, operation: Operation, algorithm: str, call: Call) -> RunFunction:
        """The operation, worked out for any buffers; ``gather`` has been called."""
        if operation.collective == "barrier":
            return lambda source, destination, deadline: self._endpoint.meet(deadline, call)
        if algorithm == "direct":
            return partial(self._direct, operation, call, Reduction(operation.op, operation.dtype), [])
        return self._staged(operation, algorithm, call)

    # ---- through windows

    def _staged(self, operation: Operation, algorithm: str, call: Call | None) -> RunFunction:
        """``call``: compared at the first meeting, if it was not before."""
        if not operation.count:  # nothing moves, but the ranks meet: another may have something to move
            return lambda source, destination, deadline: self._endpoint.meet(deadline, call)
        kind, blocks = operation.dtype, operation.blocks(self._endpoint.size)
        small = blocks * operation.count * kind.itemsize <= SLOT_BYTES and algorithm == "flat"
        where, room = ("slots", SLOT_BYTES) if small else ("stages", STAGE_BYTES)
        width = max(1, room // kind.itemsize // blocks)
        return WindowedOperation(
            self._endpoint, operation, algorithm, self._windows(where, kind), width, call
        )

    def _windows(self, where: str, kind: DType) -> list[list[Array]]:
        """Everybody's slots or stages, as vectors of this type, for each turn."""
        found = self._views.get((where, kind))
        if found is None:
            boxes = self._endpoint.mailboxes
            found = [[getattr(box, where)[turn].view(kind.numpy) for box in boxes] for turn in (0, 1)]
            self._views[where, kind] = found
        return found

    # ---- in arenas

    def in_arena(self, array: Array) -> int | None:
        """Where this array begins in this rank's arena; None if it is not in it."""
        arena = self._endpoint.arenas[self._endpoint.rank]
        if arena is None:
            return None
        start = int(array.__array_interface__["data"][0] - arena.__array_interface__["data"][0])
        return start if start >= 0 and start + array.nbytes <= arena.nbytes else None

    def exchange(
        self, source: Array, destination: Array, deadline: float, call: Call
    ) -> tuple[list[Array], list[Array]] | None:
        """Everybody's source and destination, where all of them are in arenas; a meeting, which compares the call."""
        endpoint = self._endpoint
        endpoint.publications += 1
        turn = endpoint.publications & 1
        told = endpoint.mailboxes[endpoint.rank].told[turn]
        for index, array in enumerate((source, destination)):
            offset = self.in_arena(array)
            told[index] = 0 if offset is None else offset + 1
            told[2 + index] = array.size
        endpoint.meet(deadline, call)
        seen = [box.told[turn].tolist() for box in endpoint.mailboxes]
        if not all(places[0] and places[1] for places in seen):
            return None
        found: tuple[list[Array], list[Array]] = ([], [])
        for index, arrays in enumerate(found):
            for arena, places in zip(endpoint.arenas, seen, strict=True):
                assert arena is not None, "who tells a place in an arena has one"
                start, size = places[index] - 1, places[2 + index] * source.itemsize
                arrays.append(arena[start : start + size].view(source.dtype))
        return found

    def _direct(
        self,
        operation: Operation,
        call: Call,
        reduction: Reduction,
        staged: list[RunFunction],
        source: Array,
        destination: Array,
        deadline: float,
    ) -> None:
        """In everybody's arena; by way of stages where somebody's vector is not in one."""
        endpoint = self._endpoint
        seen = self.exchange(source, destination, deadline, call)
        if seen is None:
            if operation.algorithm == "direct":
                raise InvalidArgument(f"algorithm: direct needs all buffers in arenas; {operation}")
            if not staged:
                staged.append(self._staged(operation, "staged", None))
            staged[0](source, destination, deadline)
            return
        sources, destinations = seen
        for instruction in list(operation.plan(endpoint.size, endpoint.rank, "direct"))[1:]:
            match instruction:  # the first meeting was the exchange
                case Meet():
                    endpoint.meet(deadline)
                case Take(peer, there, here) if here.length:
                    np.copyto(destination[here.start : here.stop], sources[peer][there.start : there.stop])
                case Fold(there, here, everyone) if here.length:
                    into = destinations if everyone else [destination]
                    reduction.fold(
                        [source[there.start : there.stop] for source in sources],
                        [target[here.start : here.stop] for target in into],
                    )

    # ---- all_reduces that are run again and again

    def prepare(
        self, operation: Operation, call: Call, source: Array, destination: Array, deadline: float
    ) -> tuple[str, Callable[[float], None]]:
        """An all_reduce on the same memory: how, and what to call with a deadline; every rank must prepare it."""
        endpoint = self._endpoint
        endpoint.gather(deadline)
        if operation.count * operation.dtype.itemsize <= FLAT_BYTES:
            return "flat", self._flat(operation, call, source, destination)
        preparing = Call(f"prepare {call.text}", endpoint.size)
        exchanged = self.exchange(source, destination, deadline, preparing)
        if exchanged is None:
            return "staged", partial(self._staged(operation, "staged", call), source, destination)
        fold = next(
            one for one in operation.plan(endpoint.size, endpoint.rank, "direct") if isinstance(one, Fold)
        )
        span = slice(fold.there.start, fold.there.stop)
        sources, destinations = ([array[span] for array in arrays] for arrays in exchanged)
        reduce_slice = Reduction(operation.op, operation.dtype).always(sources, destinations)
        meet = endpoint.meet

        def direct(deadline: float) -> None:
            meet(deadline, call)
            QUIET.run(reduce_slice)
            meet(deadline)

        return "direct", direct

    def _flat(
        self, operation: Operation, call: Call, source: Array, destination: Array
    ) -> Callable[[float], None]:
        """The plan's one meeting, put, and fold, without a step in between: here Python's time is what counts."""
        endpoint, count, rank = self._endpoint, operation.count, self._endpoint.rank
        given, into, meet = source[:count], [destination[:count]], endpoint.meet
        vectors = [[one[:count] for one in turn] for turn in self._windows("slots", operation.dtype)]
        # As bytes: a view's copy takes half the time of an array's.
        mine, laid = [turn[rank].view(np.uint8).data for turn in vectors], given.view(np.uint8).data
        for turn in vectors:
            turn[rank] = given
        folds = [Reduction(operation.op, operation.dtype).always(turn, into) for turn in vectors]

        def flat(deadline: float) -> None:
            endpoint.publications = publication = endpoint.publications + 1
            mine[publication & 1][:] = laid
            meet(deadline, call)
            QUIET.run(folds[publication & 1])

        return flat
