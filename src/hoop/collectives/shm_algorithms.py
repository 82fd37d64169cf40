"""Collectives where ranks see each other's memory: all lay their vector open, meet, and take what they need.

No message is sent. Every reduction is in rank order, so all ranks, and all three ways below, get the same bits.

    flat      small vectors: one meeting, then every rank folds everything itself (n·S elements read a rank)
    staged    any memory: copied into the shared stage, folded there by slices, copied out
    direct    memory that is shared anyway (arenas): nothing is copied; every rank folds its slice of all buffers and
              writes it to all of them (2·S elements read and S written a rank, by the memory's own speed)

Windows that are used in turn (flat, staged) may be read until the next meeting but one. A window that is the
caller's own memory (direct) must not change under a reader: there a last meeting ends the operation.
"""

from __future__ import annotations

from hoop.collectives.plan import (
    DESTINATION,
    WINDOW,
    BufferRole,
    CollectiveInstruction,
    CollectivePlan,
    Fold,
    Meet,
    Range,
    Shape,
    Take,
    split_range,
)


def _plan(*steps: CollectiveInstruction, last_meeting: bool) -> CollectivePlan:
    return CollectivePlan(((Meet(),), steps, *(((Meet(),),) if last_meeting else ())))


def flat_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """One meeting; every rank folds all n vectors."""
    whole = Range(DESTINATION, 0, shape.count)
    return _plan(Fold(Range(WINDOW, 0, shape.count), whole), last_meeting=False)


def staged_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """Two meetings; rank r folds slice r in its window, then every rank takes every slice."""
    slices = split_range(shape.count, shape.size)
    mine = Range(WINDOW, *slices[rank])
    takes = tuple(
        Take(peer, Range(WINDOW, *bounds), Range(DESTINATION, *bounds)) for peer, bounds in enumerate(slices)
    )
    return CollectivePlan(((Meet(),), (Fold(mine, mine), Meet()), takes))


def direct_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """Two meetings; rank r folds slice r of all sources and writes it to all destinations."""
    mine = split_range(shape.count, shape.size)[rank]
    here = Range(DESTINATION, *mine)
    return _plan(Fold(Range(WINDOW, *mine), here, everyone=True), last_meeting=True)


def broadcast(shape: Shape, rank: int, last_meeting: bool = False) -> CollectivePlan:
    """Everybody takes the root's vector."""
    return _plan(
        Take(shape.root, Range(WINDOW, 0, shape.count), Range(DESTINATION, 0, shape.count)),
        last_meeting=last_meeting,
    )


def reduce(shape: Shape, rank: int, last_meeting: bool = False) -> CollectivePlan:
    """The root folds all n vectors."""
    whole = Range(DESTINATION, 0, shape.count)
    steps = (Fold(Range(WINDOW, 0, shape.count), whole),) if rank == shape.root else ()
    return _plan(*steps, last_meeting=last_meeting)


def all_gather(shape: Shape, rank: int, last_meeting: bool = False) -> CollectivePlan:
    """Everybody takes everybody's vector."""
    steps = [
        Take(peer, Range(WINDOW, 0, shape.count), _block(DESTINATION, peer, shape))
        for peer in range(shape.size)
    ]
    return _plan(*steps, last_meeting=last_meeting)


def reduce_scatter(shape: Shape, rank: int, last_meeting: bool = False) -> CollectivePlan:
    """Rank r folds everybody's block r."""
    here = Range(DESTINATION, 0, shape.count)
    return _plan(Fold(_block(WINDOW, rank, shape), here), last_meeting=last_meeting)


def gather(shape: Shape, rank: int, last_meeting: bool = False) -> CollectivePlan:
    """The root takes everybody's vector."""
    if rank == shape.root:
        return all_gather(shape, rank, last_meeting)
    return _plan(last_meeting=last_meeting)


def scatter(shape: Shape, rank: int, last_meeting: bool = False) -> CollectivePlan:
    """Rank r takes block r of the root's vector."""
    take = Take(shape.root, _block(WINDOW, rank, shape), Range(DESTINATION, 0, shape.count))
    return _plan(take, last_meeting=last_meeting)


def all_to_all(shape: Shape, rank: int, last_meeting: bool = False) -> CollectivePlan:
    """Rank r takes block r of everybody's vector."""
    steps = [
        Take(peer, _block(WINDOW, rank, shape), _block(DESTINATION, peer, shape))
        for peer in range(shape.size)
    ]
    return _plan(*steps, last_meeting=last_meeting)


def barrier(shape: Shape, rank: int, last_meeting: bool = False) -> CollectivePlan:
    """One meeting."""
    return CollectivePlan(((Meet(),),))


def _block(place: BufferRole, index: int, shape: Shape) -> Range:
    return Range(place, index * shape.count, (index + 1) * shape.count)
