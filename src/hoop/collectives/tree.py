"""Tree algorithms: log2 n rounds, for when latency counts more than bandwidth.

    binomial tree of 8, seen from the root (ranks are counted from it):

        0 ─┬─ 4 ─┬─ 6 ── 7
           │     └─ 5
           ├─ 2 ── 3
           └─ 1

In round k of a reduction the ranks with k trailing zero bits below them send to the one 2^k before.
"""

from __future__ import annotations

import dataclasses

from hoop.collectives.plan import (
    DESTINATION,
    SCRATCH,
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
)


def _levels(n: int) -> int:
    return max(n - 1, 0).bit_length()


def _up(shape: Shape, rank: int, own: Range) -> list[tuple[Instruction, ...]]:
    """A round a level: children are reduced into ``own``, then ``own`` goes to the parent."""
    n = shape.size
    place = (rank - shape.root) % n
    rounds: list[tuple[Instruction, ...]] = []
    for level in range(_levels(n)):
        bit = 1 << level
        steps: list[Instruction] = []
        if shape.count and place & (bit - 1) == 0:
            if place & bit:
                steps.append(Send((rank - bit) % n, own))
            elif place + bit < n:
                steps.append(Reduce((rank + bit) % n, own))
        rounds.append(tuple(steps))
    return rounds


def _down(shape: Shape, rank: int, own: Range) -> list[tuple[Instruction, ...]]:
    """The same tree the other way: received from the parent, then sent to the children."""
    n = shape.size
    place = (rank - shape.root) % n
    rounds: list[tuple[Instruction, ...]] = []
    for level in reversed(range(_levels(n))):
        bit = 1 << level
        steps: list[Instruction] = []
        if shape.count and place & (bit - 1) == 0:
            if place & bit:
                steps.append(Recv((rank - bit) % n, own))
            elif place + bit < n:
                steps.append(Send((rank + bit) % n, own))
        rounds.append(tuple(steps))
    return rounds


def all_reduce(shape: Shape, rank: int) -> Plan:
    """Reduce to rank 0 and broadcast: 2(n-1) messages of S in all, in 2 ceil(log2 n) rounds."""
    shape = dataclasses.replace(shape, root=0)
    own = Range(DESTINATION, 0, shape.count)
    finish = ((Finish(own),),) if rank == 0 else ((),)
    return Plan(
        (
            (Copy(Range(SOURCE, 0, shape.count), own),),
            *_up(shape, rank, own),
            *finish,
            *_down(shape, rank, own),
        )
    )


def reduce(shape: Shape, rank: int) -> Plan:
    """n-1 messages of S in all, in ceil(log2 n) rounds; ranks that pass sums on keep them in scratch."""
    is_root = rank == shape.root
    own = Range(DESTINATION if is_root else SCRATCH, 0, shape.count)
    finish = ((Finish(own),),) if is_root else ((),)
    return Plan(
        ((Copy(Range(SOURCE, 0, shape.count), own),), *_up(shape, rank, own), *finish),
        scratch=0 if is_root else shape.count,
    )


def broadcast(shape: Shape, rank: int) -> Plan:
    """n-1 messages of S in all, in ceil(log2 n) rounds."""
    own = Range(DESTINATION, 0, shape.count)
    start: tuple[Instruction, ...] = (Copy(Range(SOURCE, 0, shape.count), own),) if rank == shape.root else ()
    return Plan((start, *_down(shape, rank, own)))


def barrier(shape: Shape, rank: int) -> Plan:
    """In round k rank r tells r + 2^k and hears r - 2^k: ceil(log2 n) empty messages a rank."""
    n = shape.size
    nothing = Range(SOURCE, 0, 0)
    return Plan(
        tuple(
            (Send((rank + (1 << k)) % n, nothing), Recv((rank - (1 << k)) % n, nothing))
            for k in range(_levels(n))
        )
    )
