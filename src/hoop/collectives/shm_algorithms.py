"""Plans between ranks that map each other's memory: publish the vector, pass a barrier, read from the others' memory.

No message is sent. Every reduction is in rank order, so all ranks get the same bits, by each of the three algorithms:

    flat      small vectors: one barrier, then every rank folds all vectors itself (n·S elements read a rank)
    staged    any memory: copied into the staging buffer, folded there slice by slice, copied out
    direct    vectors in shared memory (arenas): nothing is copied. Every rank folds its slice of all sources and
              writes it to all destinations (2·S elements read and S written a rank, at memory speed)

Alternating windows (flat, staged) may be read until the second barrier after their publication. A window that is the
caller's own memory (direct) must not change while another rank reads it: there a final barrier ends the operation.
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


def _plan(*steps: CollectiveInstruction, final_barrier: bool) -> CollectivePlan:
    return CollectivePlan(((Meet(),), steps, *(((Meet(),),) if final_barrier else ())))


def flat_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """One barrier; every rank folds all n vectors."""
    whole = Range(DESTINATION, 0, shape.count)
    return _plan(Fold(Range(WINDOW, 0, shape.count), whole), final_barrier=False)


def staged_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """Two barriers; rank r folds slice r in its window, then every rank takes every slice."""
    slices = split_range(shape.count, shape.size)
    own = Range(WINDOW, *slices[rank])
    takes = tuple(Take(peer, Range(WINDOW, *bounds), Range(DESTINATION, *bounds)) for peer, bounds in enumerate(slices))
    return CollectivePlan(((Meet(),), (Fold(own, own), Meet()), takes))


def direct_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """Two barriers; rank r folds slice r of all sources and writes it to all destinations."""
    own = split_range(shape.count, shape.size)[rank]
    target = Range(DESTINATION, *own)
    return _plan(Fold(Range(WINDOW, *own), target, to_all=True), final_barrier=True)


def broadcast(shape: Shape, rank: int, final_barrier: bool = False) -> CollectivePlan:
    """Every rank takes the root's vector."""
    return _plan(
        Take(shape.root, Range(WINDOW, 0, shape.count), Range(DESTINATION, 0, shape.count)), final_barrier=final_barrier
    )


def reduce(shape: Shape, rank: int, final_barrier: bool = False) -> CollectivePlan:
    """The root folds all n vectors."""
    whole = Range(DESTINATION, 0, shape.count)
    steps = (Fold(Range(WINDOW, 0, shape.count), whole),) if rank == shape.root else ()
    return _plan(*steps, final_barrier=final_barrier)


def all_gather(shape: Shape, rank: int, final_barrier: bool = False) -> CollectivePlan:
    """Every rank takes the vectors of all ranks."""
    steps = [Take(peer, Range(WINDOW, 0, shape.count), _block(DESTINATION, peer, shape)) for peer in range(shape.size)]
    return _plan(*steps, final_barrier=final_barrier)


def reduce_scatter(shape: Shape, rank: int, final_barrier: bool = False) -> CollectivePlan:
    """Rank r folds block r of all ranks' vectors."""
    target = Range(DESTINATION, 0, shape.count)
    return _plan(Fold(_block(WINDOW, rank, shape), target), final_barrier=final_barrier)


def gather(shape: Shape, rank: int, final_barrier: bool = False) -> CollectivePlan:
    """The root takes the vectors of all ranks."""
    if rank == shape.root:
        return all_gather(shape, rank, final_barrier)
    return _plan(final_barrier=final_barrier)


def scatter(shape: Shape, rank: int, final_barrier: bool = False) -> CollectivePlan:
    """Rank r takes block r of the root's vector."""
    take = Take(shape.root, _block(WINDOW, rank, shape), Range(DESTINATION, 0, shape.count))
    return _plan(take, final_barrier=final_barrier)


def all_to_all(shape: Shape, rank: int, final_barrier: bool = False) -> CollectivePlan:
    """Rank r takes block r of all ranks' vectors."""
    steps = [Take(peer, _block(WINDOW, rank, shape), _block(DESTINATION, peer, shape)) for peer in range(shape.size)]
    return _plan(*steps, final_barrier=final_barrier)


def barrier(shape: Shape, rank: int, final_barrier: bool = False) -> CollectivePlan:
    """One barrier."""
    return CollectivePlan(((Meet(),),))


def _block(buffer: BufferRole, index: int, shape: Shape) -> Range:
    return Range(buffer, index * shape.count, (index + 1) * shape.count)
