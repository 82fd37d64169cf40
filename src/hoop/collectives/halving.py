"""Recursive halving and doubling: the ring's bytes in 2 log2 n rounds instead of 2(n-1).

    8 ranks, reduce-scatter: exchange half with the rank 4 away, a quarter with 2 away, an eighth with 1 away;
    all-gather: the same backwards.

Where n is no power of two, the ranks beyond the largest one (the *extra* ones) first send their vector to a
partner, wait, and get the result at the end.
"""

from __future__ import annotations

from hoop.collectives.plan import (
    DESTINATION,
    SOURCE,
    Copy,
    Finish,
    Instruction,
    Plan,
    Range,
    Recv,
    Reduce,
    Send,
    Shape,
    split,
)


def all_reduce(shape: Shape, rank: int) -> Plan:
    """2 log2 n messages and 2(n-1)/n · S elements a rank where n is a power of two.

    Otherwise, with m the largest power of two below n, the n-m extra ranks send S once and their partners S more.
    """
    n, count = shape.size, shape.count
    power = 1 << (n.bit_length() - 1)
    extra = n - power
    whole = Range(DESTINATION, 0, count)
    copy = Copy(Range(SOURCE, 0, count), whole)
    if not count or n == 1:
        return Plan(((copy, Finish(whole)),))
    if rank >= power:
        partner = rank - power
        return Plan(((copy, Send(partner, whole)), *_idle(power), (Recv(partner, whole),)))
    first: tuple[Instruction, ...] = (copy, Reduce(rank + power, whole)) if rank < extra else (copy,)
    last: tuple[Instruction, ...] = (Send(rank + power, whole),) if rank < extra else ()
    return Plan((first, *_halve_and_double(rank, power, count), last))


def _idle(power: int) -> tuple[tuple[Instruction, ...], ...]:
    """As many empty rounds as the others have, so that rounds mean the same on every rank."""
    return ((),) * (2 * (power.bit_length() - 1) + 1)


def _halve_and_double(rank: int, power: int, count: int) -> list[tuple[Instruction, ...]]:
    bounds = [start for start, _ in split(count, power)] + [count]
    low, high = 0, power  # the segments this rank is still responsible for
    halving: list[tuple[Instruction, ...]] = []
    doubling: list[tuple[Instruction, ...]] = []
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


def _send(peer: int, what: Range) -> tuple[Instruction, ...]:
    return (Send(peer, what),) if what.length else ()
