"""Hierarchical algorithms: shared memory inside a host, messages between hosts.

    host A: ranks 0 1      host B: ranks 2 3      h hosts, and k *lanes*: as many as the smallest host has ranks

    inside     rank i of a host folds slice i of the k slices of the vector, over all ranks of its host
    between    lane i is rank i of every host: they all-reduce slice i among themselves, 0 with 2 and 1 with 3
    inside     everybody takes the finished slices from the ranks of its host that own them

So what crosses a host's border is what one rank would send there if the host were one rank, and it crosses by k links.
With unequal hosts the ranks beyond the k-th send nothing; with a host of one rank there is one lane, the leaders.

Inside a host vectors are laid open in windows of ``chunk`` elements, piece by piece; with ``chunk`` 0 they lie in
shared memory themselves. What is sent between hosts is the same either way, so hosts need not agree on it.

The order of every reduction is fixed: in rank order inside a host, then over hosts as the algorithm between them does
it. The finished slice is what everybody copies: all ranks hold the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hoop.collectives import ring, tree
from hoop.collectives.plan import (
    DESTINATION,
    SOURCE,
    WINDOW,
    CollectiveInstruction,
    CollectivePlan,
    Copy,
    Finish,
    Fold,
    Meet,
    Range,
    Recv,
    Reduce,
    Round,
    Send,
    Shape,
    Take,
    split_range,
)


@dataclass(frozen=True)
class HostLayout:
    """Who is where, as one rank sees it; hosts are counted by their first rank."""

    teams: tuple[tuple[int, ...], ...]
    """The ranks of each host."""
    host: int
    place: int
    """Which of its host's ranks it is."""

    @classmethod
    def of(cls, shape: Shape, rank: int) -> HostLayout:
        hosts = shape.hosts or range(shape.size)
        teams: dict[int, tuple[int, ...]] = {}
        for one, host in enumerate(hosts):
            teams[host] = (*teams.get(host, ()), one)
        return cls(tuple(teams.values()), list(teams).index(hosts[rank]), teams[hosts[rank]].index(rank))

    @property
    def team(self) -> tuple[int, ...]:
        return self.teams[self.host]

    @property
    def lanes(self) -> int:
        return min(map(len, self.teams))


def all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """A ring between hosts: 2(h-1) messages and 2(h-1)/h · S/k elements a rank of a lane; none of the others."""
    return _all_reduce(shape, rank, ring.all_reduce)


def tree_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """A tree between hosts: in all k · 2(h-1) messages and 2(h-1) · S elements, in 2 ceil(log2 h) rounds."""
    return _all_reduce(shape, rank, tree.all_reduce)


def _all_reduce(shape: Shape, rank: int, between: Callable[[Shape, int], CollectivePlan]) -> CollectivePlan:
    at = HostLayout.of(shape, rank)
    slices = split_range(shape.count, at.lanes)
    in_lane = at.place < at.lanes
    start, stop = slices[at.place] if in_lane else (0, 0)
    across = between(Shape(len(at.teams), stop - start), at.host)
    lane = [team[at.place] for team in at.teams] if in_lane else []
    rounds = _between(across, lane, start) if in_lane else [()] * len(across.rounds)
    owners = dict(zip(at.team, slices, strict=False))
    return CollectivePlan((_fold_inside(shape, at, slices), *rounds, _share_inside(shape, at, owners)))


def broadcast(shape: Shape, rank: int) -> CollectivePlan:
    """A tree between the leaders of hosts (the root is its host's): h-1 messages of S in all, ceil(log2 h) rounds."""
    at = HostLayout.of(shape, rank)
    leaders = [shape.root if shape.root in team else team[0] for team in at.teams]
    leader = leaders[at.host]
    across = tree.broadcast(Shape(len(leaders), shape.count, root=leaders.index(shape.root)), at.host)
    rounds = _between(across, leaders, 0) if rank == leader else [()] * len(across.rounds)
    whole = (0, shape.count)
    start = [Copy(Range(SOURCE, *whole), Range(DESTINATION, *whole))] if rank == shape.root else []
    meet = [Meet(at.team)] if len(at.team) > 1 and not shape.chunk else []
    return CollectivePlan(((*meet, *start), *rounds, _share_inside(shape, at, {leader: whole})))


# ---- between hosts


def _between(plan: CollectivePlan, ranks: Sequence[int], offset: int) -> list[Round]:
    """A plan for hosts, in place, as one for these ranks, with its vector at ``offset`` of their destinations."""

    def there(where: Range) -> Range:
        return Range(DESTINATION, where.start + offset, where.stop + offset)

    def translated(instruction: CollectiveInstruction) -> list[CollectiveInstruction]:
        match instruction:
            case Send(peer, where):
                return [Send(ranks[peer], there(where))]
            case Recv(peer, where):
                return [Recv(ranks[peer], there(where))]
            case Reduce(peer, where):
                return [Reduce(ranks[peer], there(where))]
            case Finish(where):
                return [Finish(there(where))]
            case Copy(source, _):
                assert source.place == SOURCE, "the vector is there already"
                return []
        raise AssertionError(f"{instruction} has no meaning between hosts")

    return [tuple(new for old in steps for new in translated(old)) for steps in plan.rounds]


# ---- inside a host


def _fold_inside(shape: Shape, at: HostLayout, slices: list[tuple[int, int]]) -> Round:
    """Rank i of the team ends with slice i of everybody's source, not finished, in its destination."""
    if len(at.team) == 1:
        return (Copy(Range(SOURCE, 0, shape.count), Range(DESTINATION, 0, shape.count)),)
    if not shape.chunk:
        own = slices[at.place : at.place + 1]
        folds = [Fold(Range(WINDOW, *part), Range(DESTINATION, *part), ranks=at.team) for part in own]
        return (Meet(at.team), *folds)
    steps: list[CollectiveInstruction] = []
    room = shape.chunk // len(slices)
    assert room, f"a window of {shape.chunk} elements has no room for {len(slices)} slices"
    for begin in range(0, slices[0][1], room):
        # A piece of every slice, one after the other; the first slice is the longest.
        parts = [(start + begin, min(start + begin + room, stop)) for start, stop in slices]
        places = [Range(WINDOW, index * room, index * room + b - a) for index, (a, b) in enumerate(parts)]
        pairs = [(Range(SOURCE, *part), place) for part, place in zip(parts, places, strict=True)]
        steps += [Copy(source, place) for source, place in pairs if place.length > 0]
        steps.append(Meet(at.team))
        if at.place < len(slices) and places[at.place].length > 0:
            steps.append(Fold(places[at.place], Range(DESTINATION, *parts[at.place]), ranks=at.team))
    return tuple(steps)


def _share_inside(shape: Shape, at: HostLayout, owners: dict[int, tuple[int, int]]) -> Round:
    """Everybody ends with every owner's part of the destination."""
    me = at.team[at.place]
    if len(at.team) == 1:
        return ()
    if not shape.chunk:
        # Straight from destination to destination, and nobody goes before all have taken theirs.
        takes = [
            Take(owner, Range(DESTINATION, *part), Range(DESTINATION, *part))
            for owner, part in owners.items()
            if owner != me
        ]
        return (Meet(at.team), *takes, Meet(at.team))
    steps: list[CollectiveInstruction] = []
    longest = max(stop - start for start, stop in owners.values())
    for begin in range(0, longest, shape.chunk):
        takes = []
        for owner, (start, stop) in owners.items():
            part = Range(DESTINATION, start + begin, min(start + begin + shape.chunk, stop))
            if part.length > 0:
                window = Range(WINDOW, 0, part.length)
                if owner == me:
                    steps.append(Copy(part, window))
                else:
                    takes.append(Take(owner, window, part))
        steps += [Meet(at.team), *takes]
    return tuple(steps)
