"""One operation through slots or stages, worked out once and run on any buffers.

    each piece:  put what others will read into one's window ─▶ meet ─▶ take, fold ─▶ (meet ─▶ take, fold …)

What a rank reads of its own it reads from its source, where that is the same as its window: only what others read is
put there. A vector that does not fit goes through piece by piece; the two windows are used in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

from hoop.collectives.catalog import Operation
from hoop.collectives.plan import WINDOW, Fold, Instruction, Meet, Range, Take
from hoop.collectives.reduction import Array, Reduction
from hoop.errors import DeadlineExceeded
from hoop.transport.base import SharedEndpoint
from hoop.transport.calls import Call

Step = Callable[[Array, Array, int], None]
"""From the source, to the destination, for the piece that begins at this element of every block."""
Turns = list[tuple[list[Step], list[list[Step]]]]
"""For each turn: how a piece is put into one's window, and what is done after each meeting."""
Span = tuple[int, int]


class Staged:
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

    def _plan(self, rank: int, size: int) -> list[Instruction]:
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
