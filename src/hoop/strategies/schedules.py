"""Written schedules of a pipeline: the order in which each rank computes. p ranks, m micro-batches, v slices a rank.

A forward costs 1, a backward 2, its halves 1 each; the bubble is what a rank waits, as a share of what it computes.

    schedule      bubble            activations held by rank r
    gpipe         (p-1)/m           m
    1f1b          (p-1)/m           p-r
    interleaved   (p-1)/(m v)       up to (p-r-1)·2 + (v-1)p + 1 of a slice    (m a multiple of p)
    zero-bubble   (p-1)/(3m)        about p                                    (ZB-H1; m >= p)

``zero-bubble`` is ZB-H1: a backward is cut in two, the gradient of the input, which the rank before waits for, and the
gradient of the weights, which nobody waits for and which therefore fills what would be a bubble.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hoop.plan.instructions import Instruction, Kind

Order = Iterator[Instruction]


def gpipe(rank: int, ranks: int, micros: range, slices: int = 1) -> Order:
    """All forwards, then all backwards."""
    for micro in micros:
        yield Instruction(Kind.FORWARD, rank, micro)
    for micro in micros:
        yield Instruction(Kind.BACKWARD, rank, micro)


def one_forward_one_backward(rank: int, ranks: int, micros: range, slices: int = 1) -> Order:
    """As many forwards as there are stages behind this one, then a forward and a backward in turn."""
    forwards = [Instruction(Kind.FORWARD, rank, micro) for micro in micros]
    backwards = [Instruction(Kind.BACKWARD, rank, micro) for micro in micros]
    return _alternate(forwards, backwards, ranks - rank - 1)


def interleaved(rank: int, ranks: int, micros: range, slices: int = 1) -> Order:
    """1F1B where rank r holds the stages r, r + p, r + 2p …: micro-batches go round in groups of p.

    Where m is not a multiple of p, the order is that of the next multiple with the micro-batches that do not exist left
    out: what is legal with them is legal without.
    """
    groups = [range(start, start + ranks) for start in range(micros.start, micros.stop, ranks)]
    held = range(rank, ranks * slices, ranks)
    forwards = [
        Instruction(Kind.FORWARD, stage, micro) for group in groups for stage in held for micro in group
    ]
    backwards = [
        Instruction(Kind.BACKWARD, stage, micro)
        for group in groups
        for stage in reversed(held)
        for micro in group
    ]
    order = _alternate(forwards, backwards, (ranks - rank - 1) * 2 + (slices - 1) * ranks)
    return (one for one in order if one.micro in micros)


def zero_bubble(rank: int, ranks: int, micros: range, slices: int = 1) -> Order:
    """1F1B with split backwards: the weights' half of rank r runs r micro-batches late, and the rest at the end."""
    forwards = [Instruction(Kind.FORWARD, rank, micro) for micro in micros]
    backwards = [Instruction(Kind.BACKWARD_INPUT, rank, micro) for micro in micros]
    late = iter(micros)
    done = 0
    for one in _alternate(forwards, backwards, ranks - rank - 1):
        yield one
        if one.kind is Kind.BACKWARD_INPUT:
            done += 1
            if done > rank:
                yield Instruction(Kind.BACKWARD_WEIGHT, rank, next(late))
    for micro in late:
        yield Instruction(Kind.BACKWARD_WEIGHT, rank, micro)


def _alternate(forwards: list[Instruction], backwards: list[Instruction], ahead: int) -> Order:
    """Forwards stay ``ahead`` of backwards, and one more while a backward is awaited."""
    ahead = min(ahead, len(forwards))
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield forward
        yield backward
    yield from backwards[len(forwards) - ahead :]


SCHEDULES: dict[str, Callable[[int, int, range, int], Order]] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}
