"""Ring algorithms: rank r sends to r+1 and receives from r-1, so every link carries the same number of bytes.

    reduce-scatter                         all-gather
    round 0: r sends segment r             round n-1: r sends segment r+1 (complete)
    round 1: r sends r-1 (sum of two) …    round n:   r sends r …

Empty segments (S < n) are not sent.
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
    pieces,
    split_range,
)


def all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """2(n-1) messages and 2(n-1)/n · S elements a rank, in 2(n-1) rounds.

    Each segment is summed in ring order, starting at the rank of its own number. All ranks receive copies of the
    finished segment, so they end with the same bits.
    """
    return _all_reduce(dataclasses.replace(shape, chunk=0), rank)


def chunked_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """The same elements in messages of at most ``chunk``: 2(n-1) · ceil(S/n / chunk) messages a rank.

    A rank sends a chunk on as soon as it has reduced it, while it still receives the rest of the segment: so reduction
    overlaps with communication.
    """
    return _all_reduce(shape, rank)


def _all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    n, count = shape.size, shape.count
    next_rank, previous = (rank + 1) % n, (rank - 1) % n
    segments = split_range(count, n)

    def chunks(segment: int) -> list[Range]:
        return [Range(DESTINATION, *piece) for piece in pieces(*segments[segment % n], shape.chunk)]

    whole = Range(DESTINATION, 0, count)
    start: list[CollectiveInstruction] = [Copy(Range(SOURCE, 0, count), whole)]
    if n == 1:
        return CollectivePlan(((*start, Finish(whole)),))
    rounds: list[tuple[CollectiveInstruction, ...]] = []
    first: list[CollectiveInstruction] = start + [Send(next_rank, chunk) for chunk in chunks(rank)]
    for step in range(2 * (n - 1)):
        # Received in this round, and sent on in the next.
        incoming = chunks(rank - step - 1)
        last_sum, last = step == n - 2, step == 2 * n - 3
        instructions: list[CollectiveInstruction] = []
        for chunk in incoming:
            instructions.append(Reduce(previous, chunk) if step < n - 1 else Recv(previous, chunk))
            if last_sum:
                instructions.append(Finish(chunk))
            if shape.chunk and not last:
                instructions.append(Send(next_rank, chunk))
        rounds.append((*first, *instructions))
        # Without chunks the send is the first instruction of the next round: then each round can be run by itself.
        first = [] if shape.chunk or last else [Send(next_rank, chunk) for chunk in incoming]
    return CollectivePlan(tuple(rounds))


def reduce_scatter(shape: Shape, rank: int) -> CollectivePlan:
    """n-1 messages and (n-1) · S elements a rank: rank r ends with block r of the n blocks of S, reduced.

    The source is not changed: partial sums are in two scratch blocks used alternately.
    """
    n, count = shape.size, shape.count
    next_rank, previous = (rank + 1) % n, (rank - 1) % n

    def block(index: int) -> Range:
        return Range(SOURCE, index % n * count, (index % n + 1) * count)

    destination = Range(DESTINATION, 0, count)
    if n == 1:
        return CollectivePlan(((Copy(block(0), destination), Finish(destination)),))
    rounds: list[tuple[CollectiveInstruction, ...]] = []
    partial_sum = block(rank - 1)
    for step in range(n - 1):
        last = step == n - 2
        slot = step % 2 * count
        target = destination if last else Range(SCRATCH, slot, slot + count)
        steps: list[CollectiveInstruction] = [Copy(block(rank - step - 2), target)]
        if count:
            steps = [Send(next_rank, partial_sum), *steps, Reduce(previous, target)]
        if last:
            steps.append(Finish(target))
        rounds.append(tuple(steps))
        partial_sum = target
    return CollectivePlan(tuple(rounds), scratch=2 * count)


def all_gather(shape: Shape, rank: int) -> CollectivePlan:
    """n-1 messages and (n-1) · S elements a rank: every rank ends with the n blocks in rank order."""
    n, count = shape.size, shape.count
    next_rank, previous = (rank + 1) % n, (rank - 1) % n

    def block(index: int) -> Range:
        return Range(DESTINATION, index % n * count, (index % n + 1) * count)

    rounds: list[tuple[CollectiveInstruction, ...]] = [(Copy(Range(SOURCE, 0, count), block(rank)),)]
    if count:
        rounds += [
            (Send(next_rank, block(rank - step)), Recv(previous, block(rank - step - 1))) for step in range(n - 1)
        ]
    return CollectivePlan(tuple(rounds))
