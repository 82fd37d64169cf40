"""Algorithms with a logarithmic number of rounds: binomial trees, and recursive halving and doubling.

Binomial tree: log2 n rounds, for vectors so small that latency dominates. With 8 ranks, counted from the root:

        0 ─┬─ 4 ─┬─ 6 ── 7
           │     └─ 5
           ├─ 2 ── 3
           └─ 1

In round k of a reduction every rank whose lowest set bit is bit k sends to the rank 2^k below it.

Recursive halving and doubling: the bytes of the ring in 2 log2 n rounds instead of 2(n-1).

    reduce-scatter of 8 ranks: exchange half of the vector with the rank 4 away, a quarter with the rank 2 away, an
    eighth with the rank 1 away; all-gather: the same backwards

If n is not a power of two, the ranks from the largest power of two on (the *extra* ranks) first send their vector to a
partner, and receive the result at the end.
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
    """One round a level: reduces the children's vectors into ``own``, then sends ``own`` to the parent."""
    n = shape.size
    position = (rank - shape.root) % n
    rounds: list[tuple[CollectiveInstruction, ...]] = []
    for level in range(_levels(n)):
        bit = 1 << level
        steps: list[CollectiveInstruction] = []
        if shape.count and position & (bit - 1) == 0:
            if position & bit:
                steps.append(Send((rank - bit) % n, own))
            elif position + bit < n:
                steps.append(Reduce((rank + bit) % n, own))
        rounds.append(tuple(steps))
    return rounds


def _down(shape: Shape, rank: int, own: Range) -> list[tuple[CollectiveInstruction, ...]]:
    """One round a level: receives ``own`` from the parent, then sends it to the children."""
    n = shape.size
    position = (rank - shape.root) % n
    rounds: list[tuple[CollectiveInstruction, ...]] = []
    for level in reversed(range(_levels(n))):
        bit = 1 << level
        steps: list[CollectiveInstruction] = []
        if shape.count and position & (bit - 1) == 0:
            if position & bit:
                steps.append(Recv((rank - bit) % n, own))
            elif position + bit < n:
                steps.append(Send((rank + bit) % n, own))
        rounds.append(tuple(steps))
    return rounds


def all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """Reduce to rank 0 and broadcast: 2(n-1) messages of S in all, in 2 ceil(log2 n) rounds."""
    shape = dataclasses.replace(shape, root=0)
    own = Range(DESTINATION, 0, shape.count)
    finish = ((Finish(own),),) if rank == 0 else ((),)
    return CollectivePlan(
        ((Copy(Range(SOURCE, 0, shape.count), own),), *_up(shape, rank, own), *finish, *_down(shape, rank, own))
    )


def reduce(shape: Shape, rank: int) -> CollectivePlan:
    """n-1 messages of S in all, in ceil(log2 n) rounds; ranks other than the root keep partial sums in scratch."""
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
    start: tuple[CollectiveInstruction, ...] = (Copy(Range(SOURCE, 0, shape.count), own),) if rank == shape.root else ()
    return CollectivePlan((start, *_down(shape, rank, own)))


def barrier(shape: Shape, rank: int) -> CollectivePlan:
    """In round k rank r sends to r + 2^k and receives from r - 2^k: ceil(log2 n) empty messages a rank."""
    n = shape.size
    nothing = Range(SOURCE, 0, 0)
    return CollectivePlan(
        tuple((Send((rank + (1 << k)) % n, nothing), Recv((rank - (1 << k)) % n, nothing)) for k in range(_levels(n)))
    )


def halving_doubling_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """2 log2 n messages and 2(n-1)/n · S elements a rank, if n is a power of two.

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
    first: tuple[CollectiveInstruction, ...] = (copy, Reduce(rank + power, whole)) if rank < extra else (copy,)
    last: tuple[CollectiveInstruction, ...] = (Send(rank + power, whole),) if rank < extra else ()
    return CollectivePlan((first, *_halve_and_double(rank, power, count), last))


def _idle(power: int) -> tuple[tuple[CollectiveInstruction, ...], ...]:
    """As many empty rounds as the other ranks have, so that round numbers mean the same on every rank."""
    return ((),) * (2 * (power.bit_length() - 1) + 1)


def _halve_and_double(rank: int, power: int, count: int) -> list[tuple[CollectiveInstruction, ...]]:
    bounds = [start for start, _ in split_range(count, power)] + [count]
    low, high = 0, power  # the segments that this rank still reduces
    halving: list[tuple[CollectiveInstruction, ...]] = []
    doubling: list[tuple[CollectiveInstruction, ...]] = []
    distance = power // 2
    while distance:
        peer, middle = rank ^ distance, (low + high) // 2
        keeps_low = not rank & distance
        mine, theirs = ((low, middle), (middle, high)) if keeps_low else ((middle, high), (low, middle))
        own = Range(DESTINATION, bounds[mine[0]], bounds[mine[1]])
        peer_part = Range(DESTINATION, bounds[theirs[0]], bounds[theirs[1]])
        halving.append((*_send(peer, peer_part), *((Reduce(peer, own),) if own.length else ())))
        doubling.insert(0, (*_send(peer, own), *((Recv(peer, peer_part),) if peer_part.length else ())))
        low, high = mine
        distance //= 2
    reduced = Range(DESTINATION, bounds[low], bounds[high])
    return [*halving, (Finish(reduced),), *doubling]


def _send(peer: int, where: Range) -> tuple[CollectiveInstruction, ...]:
    return (Send(peer, where),) if where.length else ()
