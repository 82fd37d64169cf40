"""The simplest algorithms, in which one rank does the work: the reference that tests compare the others with."""

from __future__ import annotations

import dataclasses

from hoop.collectives.plan import (
    DESTINATION,
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
)


def all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """Every rank sends S to rank 0, which sums in rank order and sends the sum back: 2(n-1) messages of S in all.

    Rank 0 moves 2(n-1) · S elements where a rank of the ring moves 2(n-1)/n · S each way.
    """
    shape = dataclasses.replace(shape, root=0)
    first = reduce(shape, rank).rounds
    second = _from_root(Range(DESTINATION, 0, shape.count), shape, rank)
    return CollectivePlan((*first, second))


def reduce(shape: Shape, rank: int) -> CollectivePlan:
    """Every rank sends S to the root, which adds them in rank order to its own: n-1 messages."""
    source, destination = Range(SOURCE, 0, shape.count), Range(DESTINATION, 0, shape.count)
    if rank != shape.root:
        return CollectivePlan(((Send(shape.root, source),),) if shape.count else ((),))
    steps: list[CollectiveInstruction] = [Copy(source, destination)]
    if shape.count:
        steps += [Reduce(peer, destination) for peer in range(shape.size) if peer != rank]
    return CollectivePlan(((*steps, Finish(destination)),))


def broadcast(shape: Shape, rank: int) -> CollectivePlan:
    """The root sends S to every other rank: n-1 messages."""
    whole = Range(DESTINATION, 0, shape.count)
    mine = (Copy(Range(SOURCE, 0, shape.count), whole),) if rank == shape.root else ()
    return CollectivePlan(((*mine, *_from_root(whole, shape, rank)),))


def _from_root(where: Range, shape: Shape, rank: int) -> tuple[CollectiveInstruction, ...]:
    """Sends a range of the root to the same range of all other ranks."""
    if not where.length:
        return ()
    if rank != shape.root:
        return (Recv(shape.root, where),)
    return tuple(Send(peer, where) for peer in range(shape.size) if peer != rank)


def gather(shape: Shape, rank: int) -> CollectivePlan:
    """Every rank sends S to the root, which stores the n blocks in rank order: n-1 messages."""
    count = shape.count
    source = Range(SOURCE, 0, count)
    if rank != shape.root:
        return CollectivePlan(((Send(shape.root, source),),) if count else ((),))
    blocks = [Range(DESTINATION, peer * count, (peer + 1) * count) for peer in range(shape.size)]
    steps: list[CollectiveInstruction] = [Copy(source, blocks[rank])]
    if count:
        steps += [Recv(peer, blocks[peer]) for peer in range(shape.size) if peer != rank]
    return CollectivePlan((tuple(steps),))


def scatter(shape: Shape, rank: int) -> CollectivePlan:
    """The root sends block i of its n blocks of S to rank i: n-1 messages of S."""
    count = shape.count
    destination = Range(DESTINATION, 0, count)
    if rank != shape.root:
        return CollectivePlan(((Recv(shape.root, destination),),) if count else ((),))
    blocks = [Range(SOURCE, peer * count, (peer + 1) * count) for peer in range(shape.size)]
    sends = [Send(peer, blocks[peer]) for peer in range(shape.size) if peer != rank] if count else []
    return CollectivePlan(((*sends, Copy(blocks[rank], destination)),))


def all_to_all(shape: Shape, rank: int) -> CollectivePlan:
    """Block i of rank r becomes block r of rank i: n-1 messages of S a rank.

    In round k rank r sends to r+k and receives from r-k, so that no two ranks send to the same rank at once.
    """
    n, count = shape.size, shape.count

    def block(whole: Range, index: int) -> Range:
        return Range(whole.buffer, index * count, (index + 1) * count)

    source, destination = Range(SOURCE, 0, n * count), Range(DESTINATION, 0, n * count)
    rounds: list[tuple[CollectiveInstruction, ...]] = [(Copy(block(source, rank), block(destination, rank)),)]
    for k in range(1, n) if count else ():
        to, by = (rank + k) % n, (rank - k) % n
        rounds.append((Send(to, block(source, to)), Recv(by, block(destination, by))))
    return CollectivePlan(tuple(rounds))


def send(shape: Shape, rank: int) -> CollectivePlan:
    """The root sends S elements to ``peer``: one message. Root and peer the same: a copy."""
    source, destination = Range(SOURCE, 0, shape.count), Range(DESTINATION, 0, shape.count)
    steps: list[CollectiveInstruction] = []
    if shape.root == shape.peer == rank:
        steps.append(Copy(source, destination))
    elif rank == shape.root and shape.count:
        steps.append(Send(shape.peer, source))
    elif rank == shape.peer and shape.count:
        steps.append(Recv(shape.root, destination))
    return CollectivePlan((tuple(steps),))
