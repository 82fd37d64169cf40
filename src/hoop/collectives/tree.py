"""Tree algorithms: log2 n rounds, for when latency counts more than bandwidth.

    binomial tree of 8, seen from the root (ranks are counted from it):

        0 ─┬─ 4 ─┬─ 6 ── 7
           │     └─ 5
           ├─ 2 ── 3
           └─ 1

In round k of a reduction the ranks with k trailing zero bits below them send to the one 2^k before.

Recursive halving and doubling: the ring's bytes in 2 log2 n rounds instead of 2(n-1).

    8 ranks, reduce-scatter: exchange half with the rank 4 away, a quarter with 2 away, an eighth with 1 away;
    all-gather: the same backwards.

Where n is no power of two, the ranks beyond the largest one (the *extra* ones) first send their vector to a
partner, wait, and get the result at the end.
"""

from __future__ import annotations

import dataclasses

from hoop.collectives.plan import (
    DESTINATION,
    SCRATCH,
    SOURCE,
    CollectiveInstruction,
    CollectivePlan,
    Copy,
    Finish,
    Range,
    Recv,
    Reduce,
    Send,
    Shape,
    split_range,
)


def _levels(n: int) -> int:
    return max(n - 1, 0).bit_length()


def _up(shape: Shape, rank: int, own: Range) -> list[tuple[CollectiveInstruction, ...]]:
    """A round a level: children are reduced into ``own``, then ``own`` goes to the parent."""
    n = shape.size
    place = (rank - shape.root) % n
    rounds: list[tuple[CollectiveInstruction, ...]] = []
    for level in range(_levels(n)):
        bit = 1 << level
        steps: list[CollectiveInstruction] = []
        if shape.count and place & (bit - 1) == 0:
            if place & bit:
                steps.append(Send((rank - bit) % n, own))
            elif place + bit < n:
                steps.append(Reduce((rank + bit) % n, own))
        rounds.append(tuple(steps))
    return rounds


def _down(shape: Shape, rank: int, own: Range) -> list[tuple[CollectiveInstruction, ...]]:
    """The same tree the other way: received from the parent, then sent to the children."""
    n = shape.size
    place = (rank - shape.root) % n
    rounds: list[tuple[CollectiveInstruction, ...]] = []
    for level in reversed(range(_levels(n))):
        bit = 1 << level
        steps: list[CollectiveInstruction] = []
        if shape.count and place & (bit - 1) == 0:
            if place & bit:
                steps.append(Recv((rank - bit) % n, own))
            elif place + bit < n:
                steps.append(Send((rank + bit) % n, own))
        rounds.append(tuple(steps))
    return rounds


def all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """Reduce to rank 0 and broadcast: 2(n-1) messages of S in all, in 2 ceil(log2 n) rounds."""
    shape = dataclasses.replace(shape, root=0)
    own = Range(DESTINATION, 0, shape.count)
    finish = ((Finish(own),),) if rank == 0 else ((),)
    return CollectivePlan(
        (
            (Copy(Range(SOURCE, 0, shape.count), own),),
            *_up(shape, rank, own),
            *finish,
            *_down(shape, rank, own),
        )
    )


def reduce(shape: Shape, rank: int) -> CollectivePlan:
    """n-1 messages of S in all, in ceil(log2 n) rounds; ranks that pass sums on keep them in scratch."""
    is_root = rank == shape.root
    own = Range(DESTINATION if is_root else SCRATCH, 0, shape.count)
    finish = ((Finish(own),),) if is_root else ((),)
    return CollectivePlan(
        ((Copy(Range(SOURCE, 0, shape.count), own),), *_up(shape, rank, own), *finish),
        scratch=0 if is_root else shape.count,
    )


def broadcast(shape: Shape, rank: int) -> CollectivePlan:
    """n-1 messages of S in all, in ceil(log2 n) rounds."""
    own = Range(DESTINATION, 0, shape.count)
    start: tuple[CollectiveInstruction, ...] = (
        (Copy(Range(SOURCE, 0, shape.count), own),) if rank == shape.root else ()
    )
    return CollectivePlan((start, *_down(shape, rank, own)))


def barrier(shape: Shape, rank: int) -> CollectivePlan:
    """In round k rank r tells r + 2^k and hears r - 2^k: ceil(log2 n) empty messages a rank."""
    n = shape.size
    nothing = Range(SOURCE, 0, 0)
    return CollectivePlan(
        tuple(
            (Send((rank + (1 << k)) % n, nothing), Recv((rank - (1 << k)) % n, nothing))
            for k in range(_levels(n))
        )
    )


def halving_doubling_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """2 log2 n messages and 2(n-1)/n · S elements a rank where n is a power of two.

    Otherwise, with m the largest power of two below n, the n-m extra ranks send S once and their partners S more.
    """
    n, count = shape.size, shape.count
    power = 1 << (n.bit_length() - 1)
    extra = n - power
    whole = Range(DESTINATION, 0, count)
    copy = Copy(Range(SOURCE, 0, count), whole)
    if not count or n == 1:
        return CollectivePlan(((copy, Finish(whole)),))
    if rank >= power:
        partner = rank - power
        return CollectivePlan(((copy, Send(partner, whole)), *_idle(power), (Recv(partner, whole),)))
    first: tuple[CollectiveInstruction, ...] = (
        (copy, Reduce(rank + power, whole)) if rank < extra else (copy,)
    )
    last: tuple[CollectiveInstruction, ...] = (Send(rank + power, whole),) if rank < extra else ()
    return CollectivePlan((first, *_halve_and_double(rank, power, count), last))


def _idle(power: int) -> tuple[tuple[CollectiveInstruction, ...], ...]:
    """As many empty rounds as the others have, so that rounds mean the same on every rank."""
    return ((),) * (2 * (power.bit_length() - 1) + 1)


def _halve_and_double(rank: int, power: int, count: int) -> list[tuple[CollectiveInstruction, ...]]:
    bounds = [start for start, _ in split_range(count, power)] + [count]
    low, high = 0, power  # the segments this rank is still responsible for
    halving: list[tuple[CollectiveInstruction, ...]] = []
    doubling: list[tuple[CollectiveInstruction, ...]] = []
    distance = power // 2
    while distance:
        peer, middle = rank ^ distance, (low + high) // 2
        keeps_low = not rank & distance
        mine, theirs = ((low, middle), (middle, high)) if keeps_low else ((middle, high), (low, middle))
        kept = Range(DESTINATION, bounds[mine[0]], bounds[mine[1]])
        given = Range(DESTINATION, bounds[theirs[0]], bounds[theirs[1]])
        halving.append((*_send(peer, given), *((Reduce(peer, kept),) if kept.length else ())))
        doubling.insert(0, (*_send(peer, kept), *((Recv(peer, given),) if given.length else ())))
        low, high = mine
        distance //= 2
    own = Range(DESTINATION, bounds[low], bounds[high])
    return [*halving, (Finish(own),), *doubling]


def _send(peer: int, what: Range) -> tuple[CollectiveInstruction, ...]:
    return (Send(peer, what),) if what.length else ()
