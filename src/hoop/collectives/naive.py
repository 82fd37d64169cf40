"""The obvious algorithms: one rank does the work. The readable reference beside the fast ones."""

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
    """Everyone sends to rank 0, which sums in rank order and answers: n-1 messages of S there, n-1 back.

    Rank 0 moves 2(n-1) · S elements where a rank of the ring moves 2(n-1)/n · S each way.
    """
    shape = dataclasses.replace(shape, root=0)
    first = reduce(shape, rank).rounds
    second = _spread(Range(DESTINATION, 0, shape.count), shape, rank)
    return CollectivePlan((*first, second))


def reduce(shape: Shape, rank: int) -> CollectivePlan:
    """Everyone sends S to the root, which sums in rank order starting with its own: n-1 messages."""
    source, destination = Range(SOURCE, 0, shape.count), Range(DESTINATION, 0, shape.count)
    if rank != shape.root:
        return CollectivePlan(((Send(shape.root, source),),) if shape.count else ((),))
    steps: list[CollectiveInstruction] = [Copy(source, destination)]
    if shape.count:
        steps += [Reduce(peer, destination) for peer in range(shape.size) if peer != rank]
    return CollectivePlan(((*steps, Finish(destination)),))


def broadcast(shape: Shape, rank: int) -> CollectivePlan:
    """The root sends S to everyone else: n-1 messages."""
    whole = Range(DESTINATION, 0, shape.count)
    mine = (Copy(Range(SOURCE, 0, shape.count), whole),) if rank == shape.root else ()
    return CollectivePlan(((*mine, *_spread(whole, shape, rank)),))


def _spread(what: Range, shape: Shape, rank: int) -> tuple[CollectiveInstruction, ...]:
    if not what.length:
        return ()
    if rank != shape.root:
        return (Recv(shape.root, what),)
    return tuple(Send(peer, what) for peer in range(shape.size) if peer != rank)


def gather(shape: Shape, rank: int) -> CollectivePlan:
    """Everyone sends S to the root, which keeps the n blocks in rank order: n-1 messages."""
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

    In round k rank r sends to r+k and receives from r-k, so that no rank is everybody's target at once.
    """
    n, count = shape.size, shape.count

    def block(place: Range, index: int) -> Range:
        return Range(place.place, index * count, (index + 1) * count)

    source, destination = Range(SOURCE, 0, n * count), Range(DESTINATION, 0, n * count)
    rounds: list[tuple[CollectiveInstruction, ...]] = [(Copy(block(source, rank), block(destination, rank)),)]
    for k in range(1, n) if count else ():
        to, by = (rank + k) % n, (rank - k) % n
        rounds.append((Send(to, block(source, to)), Recv(by, block(destination, by))))
    return CollectivePlan(tuple(rounds))


def send(shape: Shape, rank: int) -> CollectivePlan:
    """The root's S elements go to ``peer``: one message; to itself: a copy."""
    source, destination = Range(SOURCE, 0, shape.count), Range(DESTINATION, 0, shape.count)
    steps: list[CollectiveInstruction] = []
    if shape.root == shape.peer == rank:
        steps.append(Copy(source, destination))
    elif rank == shape.root and shape.count:
        steps.append(Send(shape.peer, source))
    elif rank == shape.peer and shape.count:
        steps.append(Recv(shape.root, destination))
    return CollectivePlan((tuple(steps),))
