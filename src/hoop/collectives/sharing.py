"""Runs plans between ranks that see each other's memory.

A vector is laid open in this rank's slot (small) or stage (large, piece by piece), or it is in shared memory
already (an arena), where only its place is told. Two of each are used in turn, so one meeting an operation is enough
before a peer may go on to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from hoop.collectives.catalog import Operation
from hoop.collectives.plan import Fold, Meet, Take
from hoop.collectives.reduction import QUIET, Array, Reduction
from hoop.collectives.staged import Staged
from hoop.errors import InvalidArgument
from hoop.memory.dtypes import DType
from hoop.transport.base import SharedEndpoint
from hoop.transport.calls import Call
from hoop.transport.mailbox import SLOT_BYTES, STAGE_BYTES

FLAT_BYTES = 8 * 1024
"""Up to here reading everybody's vector costs less than a second meeting."""

Move = Callable[[Array, Array, float], None]
"""An operation: from the source to the destination, until the deadline."""


class Sharing:
    """One rank's side of shared plans."""

    def __init__(self, endpoint: SharedEndpoint) -> None:
        self._endpoint = endpoint
        self._views: dict[tuple[str, DType], list[list[Array]]] = {}

    def move(self, operation: Operation, algorithm: str, call: Call) -> Move:
        """The operation, worked out for any buffers; ``gather`` has been called."""
        if operation.collective == "barrier":
            return lambda source, destination, deadline: self._endpoint.meet(deadline, call)
        if algorithm == "direct":
            return partial(self._direct, operation, call, Reduction(operation.op, operation.dtype), [])
        return self._staged(operation, algorithm, call)

    # ---- through windows

    def _staged(self, operation: Operation, algorithm: str, call: Call | None) -> Move:
        """``call``: compared at the first meeting, if it was not before."""
        if not operation.count:  # nothing moves, but the ranks meet: another may have something to move
            return lambda source, destination, deadline: self._endpoint.meet(deadline, call)
        kind, blocks = operation.dtype, operation.blocks(self._endpoint.size)
        small = blocks * operation.count * kind.itemsize <= SLOT_BYTES and algorithm == "flat"
        where, room = ("slots", SLOT_BYTES) if small else ("stages", STAGE_BYTES)
        width = max(1, room // kind.itemsize // blocks)
        return Staged(self._endpoint, operation, algorithm, self._windows(where, kind), width, call)

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
        staged: list[Move],
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
