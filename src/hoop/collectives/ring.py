"""Ring algorithms: everyone sends to r+1 and receives from r-1, so every link carries the same.

    reduce-scatter                         all-gather
    round 0: r sends segment r             round n-1: r sends segment r+1 (complete)
    round 1: r sends r-1 (now of two) …    round n:   r sends r …

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

    Each segment is summed in ring order, starting at the rank of its own number, and the finished
    segment is what everybody copies: all ranks hold the same bits.
    """
    return _all_reduce(dataclasses.replace(shape, chunk=0), rank)


def chunked_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """The ring's elements in messages of at most ``chunk``: 2(n-1) · ceil(S/n / chunk) messages a rank.

    A chunk goes on to the next rank as soon as it is reduced, while the rest of its segment is still
    under way, so adding overlaps with moving.
    """
    return _all_reduce(shape, rank)


def _all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    n, count = shape.size, shape.count
    after, before = (rank + 1) % n, (rank - 1) % n
    segments = split_range(count, n)

    def chunks(segment: int) -> list[Range]:
        return [Range(DESTINATION, *piece) for piece in pieces(*segments[segment % n], shape.chunk)]

    whole = Range(DESTINATION, 0, count)
    start: list[CollectiveInstruction] = [Copy(Range(SOURCE, 0, count), whole)]
    if n == 1:
        return CollectivePlan(((*start, Finish(whole)),))
    rounds: list[tuple[CollectiveInstruction, ...]] = []
    ahead: list[CollectiveInstruction] = start + [Send(after, chunk) for chunk in chunks(rank)]
    for step in range(2 * (n - 1)):
        # What arrives in this round, and is passed on in the next.
        incoming = chunks(rank - step - 1)
        last_sum, last = step == n - 2, step == 2 * n - 3
        instructions: list[CollectiveInstruction] = []
        for chunk in incoming:
            instructions.append(Reduce(before, chunk) if step < n - 1 else Recv(before, chunk))
            if last_sum:
                instructions.append(Finish(chunk))
            if shape.chunk and not last:
                instructions.append(Send(after, chunk))
        rounds.append((*ahead, *instructions))
        # Unchunked, the send opens the next round: a round is then complete in itself and can be stepped.
        ahead = [] if shape.chunk or last else [Send(after, chunk) for chunk in incoming]
    return CollectivePlan(tuple(rounds))


def reduce_scatter(shape: Shape, rank: int) -> CollectivePlan:
    """n-1 messages and (n-1) · S elements a rank: rank r ends with block r of the n blocks of S, reduced.

    The source stays as it is: what is under way lies in two scratch blocks used in turn.
    """
    n, count = shape.size, shape.count
    after, before = (rank + 1) % n, (rank - 1) % n

    def block(index: int) -> Range:
        return Range(SOURCE, index % n * count, (index % n + 1) * count)

    destination = Range(DESTINATION, 0, count)
    if n == 1:
        return CollectivePlan(((Copy(block(0), destination), Finish(destination)),))
    rounds: list[tuple[CollectiveInstruction, ...]] = []
    holding = block(rank - 1)
    for step in range(n - 1):
        last = step == n - 2
        slot = step % 2 * count
        target = destination if last else Range(SCRATCH, slot, slot + count)
        steps: list[CollectiveInstruction] = [Copy(block(rank - step - 2), target)]
        if count:
            steps = [Send(after, holding), *steps, Reduce(before, target)]
        if last:
            steps.append(Finish(target))
        rounds.append(tuple(steps))
        holding = target
    return CollectivePlan(tuple(rounds), scratch=2 * count)


def all_gather(shape: Shape, rank: int) -> CollectivePlan:
    """n-1 messages and (n-1) · S elements a rank: every rank ends with the n blocks in rank order."""
    n, count = shape.size, shape.count
    after, before = (rank + 1) % n, (rank - 1) % n

    def block(index: int) -> Range:
        return Range(DESTINATION, index % n * count, (index % n + 1) * count)

    rounds: list[tuple[CollectiveInstruction, ...]] = [(Copy(Range(SOURCE, 0, count), block(rank)),)]
    if count:
        rounds += [
            (Send(after, block(rank - step)), Recv(before, block(rank - step - 1))) for step in range(n - 1)
        ]
    return CollectivePlan(tuple(rounds))
