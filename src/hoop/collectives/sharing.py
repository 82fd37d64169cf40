"""Runs plans between ranks that see each other's memory.

A vector is laid open in this rank's slot (small) or stage (large, piece by piece), or it is in shared memory
already (an arena), where only its place is told. Two of each are used in turn, so one meeting an operation is enough
before a peer may go on to the next.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hoop.collectives.catalog import Operation
from hoop.collectives.plan import WINDOW, Fold, Meet, Plan, Range, Take
from hoop.collectives.reduction import Array, Reduction
from hoop.errors import InvalidArgument
from hoop.memory.dtypes import DType
from hoop.transport.base import SharedEndpoint
from hoop.transport.mailbox import SLOT_BYTES, STAGE_BYTES

FLAT_BYTES = 8 * 1024
"""Up to here reading everybody's vector costs less than a second meeting."""


class Sharing:
    """One rank's side of shared plans."""

    def __init__(self, endpoint: SharedEndpoint) -> None:
        self._endpoint = endpoint
        self._views: dict[tuple[str, DType], tuple[list[Array], list[Array]]] = {}

    # ---- where vectors lie

    def _windows(self, where: str, kind: DType, turn: int, deadline: float) -> list[Array]:
        """Everybody's slots or stages, as vectors of this type."""
        found = self._views.get((where, kind))
        if found is None:
            self._endpoint.gather(deadline)
            boxes = self._endpoint.mailboxes
            found = (
                [getattr(box, where)[0].view(kind.numpy) for box in boxes],
                [getattr(box, where)[1].view(kind.numpy) for box in boxes],
            )
            self._views[where, kind] = found
        return found[turn]

    def in_arena(self, array: Array) -> int | None:
        """Where this array begins in this rank's arena; None if it is not in it."""
        arena = self._endpoint.arenas[self._endpoint.rank]
        if arena is None:
            return None
        start = int(array.__array_interface__["data"][0] - arena.__array_interface__["data"][0])
        return start if start >= 0 and start + array.nbytes <= arena.nbytes else None

    def exchange(
        self, source: Array, destination: Array, deadline: float
    ) -> tuple[list[Array], list[Array]] | None:
        """Everybody's source and destination, where all of them are in arenas; a meeting."""
        endpoint = self._endpoint
        endpoint.publications += 1
        turn = endpoint.publications & 1
        told = endpoint.mailboxes[endpoint.rank].told[turn]
        for index, array in enumerate((source, destination)):
            offset = self.in_arena(array)
            told[index] = 0 if offset is None else offset + 1
            told[2 + index] = array.size
        endpoint.meet(deadline)
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

    # ---- operations

    def run(
        self, operation: Operation, algorithm: str, source: Array, destination: Array, deadline: float
    ) -> None:
        """One operation, from the first meeting to the last."""
        reduction = Reduction(operation.op, operation.dtype)
        if algorithm == "direct":
            seen = self.exchange(source, destination, deadline)
            if seen is not None:
                plan = operation.plan(self._endpoint.size, self._endpoint.rank, "direct")
                self._direct(plan, seen, destination, reduction, deadline)
                return
            if operation.algorithm == "direct":
                raise InvalidArgument(f"algorithm: direct needs all buffers in arenas; {operation}")
            algorithm = "staged"
        if operation.collective == "barrier":
            self._endpoint.meet(deadline)
        elif operation.count:
            self._in_pieces(operation, algorithm, source, destination, reduction, deadline)

    def _in_pieces(
        self,
        operation: Operation,
        algorithm: str,
        source: Array,
        destination: Array,
        reduction: Reduction,
        deadline: float,
    ) -> None:
        """Through slots or stages: as many elements of every block as fit, then the next."""
        endpoint, count, kind = self._endpoint, operation.count, operation.dtype
        has = operation.extents(endpoint.size, endpoint.rank)
        where, room = ("slots", SLOT_BYTES) if algorithm == "flat" else ("stages", STAGE_BYTES)
        width = max(1, room // kind.itemsize // operation.blocks(endpoint.size))
        given = source[: has[0]].reshape(-1, count)
        taken = destination[: has[1]].reshape(-1, count)
        for start in range(0, count, width):
            stop = min(start + width, count)
            size = stop - start
            endpoint.publications += 1
            windows = self._windows(where, kind, endpoint.publications & 1, deadline)
            mine = windows[endpoint.rank]
            if has[0]:
                np.copyto(mine[: len(given) * size].reshape(-1, size), given[:, start:stop])

            def local(where: Range, mine: Array = mine, start: int = start, size: int = size) -> Array:
                if where.place == WINDOW:
                    return mine[where.start : where.stop]
                block, offset = divmod(where.start, size)
                return taken[block, start + offset : start + offset + where.length]

            plan = operation.plan(endpoint.size, endpoint.rank, algorithm, size)
            for instruction in plan:
                match instruction:
                    case Meet():
                        endpoint.meet(deadline)
                    case Take(peer, there, here):
                        if here.length:
                            np.copyto(local(here), windows[peer][there.start : there.stop])
                    case Fold(there, here) if here.length:
                        reduction.fold(
                            [window[there.start : there.stop] for window in windows], [local(here)]
                        )

    def _direct(
        self,
        plan: Plan,
        seen: tuple[list[Array], list[Array]],
        destination: Array,
        reduction: Reduction,
        deadline: float,
    ) -> None:
        sources, destinations = seen
        for instruction in list(plan)[1:]:  # the first meeting was the exchange
            match instruction:
                case Meet():
                    self._endpoint.meet(deadline)
                case Take(peer, there, here) if here.length:
                    np.copyto(destination[here.start : here.stop], sources[peer][there.start : there.stop])
                case Fold(there, here, everyone) if here.length:
                    into = destinations if everyone else [destination]
                    reduction.fold(
                        [source[there.start : there.stop] for source in sources],
                        [target[here.start : here.stop] for target in into],
                    )

    # ---- operations that are run again and again

    def prepare(
        self, operation: Operation, source: Array, destination: Array, deadline: float
    ) -> Callable[[float], None]:
        """An all_reduce on the same memory, ready to be called with a deadline; every rank must prepare it."""
        endpoint = self._endpoint
        reduction = Reduction(operation.op, operation.dtype)
        meet = endpoint.meet
        if source.nbytes <= FLAT_BYTES:
            turns = [self._windows("slots", operation.dtype, turn, deadline) for turn in (0, 1)]
            seen = [[window[: operation.count] for window in windows] for windows in turns]
            mine = [windows[endpoint.rank] for windows in seen]
            folds = [reduction.folding(windows, [destination]) for windows in seen]

            def flat(deadline: float) -> None:
                endpoint.publications = publication = endpoint.publications + 1
                turn = publication & 1
                mine[turn][:] = source
                meet(deadline)
                folds[turn]()

            return flat
        exchanged = self.exchange(source, destination, deadline)
        if exchanged is None:
            return lambda deadline: self._in_pieces(
                operation, "staged", source, destination, reduction, deadline
            )
        plan = operation.plan(endpoint.size, endpoint.rank, "direct")
        fold = next(one for one in plan if isinstance(one, Fold))
        span = slice(fold.there.start, fold.there.stop)
        sources, destinations = ([array[span] for array in arrays] for arrays in exchanged)
        fold_slice = reduction.folding(sources, destinations)

        def direct(deadline: float) -> None:
            meet(deadline)
            fold_slice()
            meet(deadline)

        return direct
