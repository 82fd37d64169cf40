"""Hierarchical algorithms: shared memory inside a host, messages between hosts.

    host A: ranks 0 1      host B: ranks 2 3      h hosts, and k *rails*, where k is the size of the smallest host

    inside     rank i of a host folds slice i of the k slices of the vector, over all ranks of its host
    between    rail i is rank i of every host: they all-reduce slice i among themselves, 0 with 2 and 1 with 3
    inside     every rank takes the finished slices from the ranks of its host that own them

A host sends as many bytes as one rank would if the host were one rank, over k links. With hosts of different sizes the
ranks beyond the k-th send nothing. With a host of one rank there is one rail, the leaders.

Inside a host, vectors are published in windows of ``chunk`` elements, piece by piece; with ``chunk`` 0 the vectors
themselves are in shared memory. The messages between hosts are the same either way, so hosts need not agree on it.

The order of every reduction is fixed: rank order inside a host, then the order of the algorithm between hosts. All
ranks copy the finished slices, so they end with the same bits.
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
    """The ranks of each host, and the place of one rank among them. Hosts are in the order of their first ranks."""

    host_ranks: tuple[tuple[int, ...], ...]
    """The ranks of each host."""
    host: int
    """The index of this rank's host."""
    local_rank: int
    """The index of this rank in its host."""

    @classmethod
    def of(cls, shape: Shape, rank: int) -> HostLayout:
        hosts = shape.hosts or range(shape.size)
        members: dict[int, tuple[int, ...]] = {}
        for one, host in enumerate(hosts):
            members[host] = (*members.get(host, ()), one)
        return cls(tuple(members.values()), list(members).index(hosts[rank]), members[hosts[rank]].index(rank))

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's host."""
        return self.host_ranks[self.host]

    @property
    def rails(self) -> int:
        """k, the number of rails."""
        return min(map(len, self.host_ranks))


def all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """A ring between hosts: a rank of a rail sends 2(h-1) messages and 2(h-1)/h · S/k elements, other ranks none."""
    return _all_reduce(shape, rank, ring.all_reduce)


def tree_all_reduce(shape: Shape, rank: int) -> CollectivePlan:
    """A tree between hosts: in all k · 2(h-1) messages and 2(h-1) · S elements, in 2 ceil(log2 h) rounds."""
    return _all_reduce(shape, rank, tree.all_reduce)


def _all_reduce(shape: Shape, rank: int, between: Callable[[Shape, int], CollectivePlan]) -> CollectivePlan:
    layout = HostLayout.of(shape, rank)
    slices = split_range(shape.count, layout.rails)
    in_rail = layout.local_rank < layout.rails
    start, stop = slices[layout.local_rank] if in_rail else (0, 0)
    across = between(Shape(len(layout.host_ranks), stop - start), layout.host)
    rail = [ranks[layout.local_rank] for ranks in layout.host_ranks] if in_rail else []
    rounds = _between_hosts(across, rail, start) if in_rail else [()] * len(across.rounds)
    owners = dict(zip(layout.local_ranks, slices, strict=False))
    return CollectivePlan((_fold_inside(shape, layout, slices), *rounds, _share_inside(shape, layout, owners)))


def broadcast(shape: Shape, rank: int) -> CollectivePlan:
    """A tree between one leader a host (the root leads its own): h-1 messages of S in all, ceil(log2 h) rounds."""
    layout = HostLayout.of(shape, rank)
    leaders = [shape.root if shape.root in ranks else ranks[0] for ranks in layout.host_ranks]
    leader = leaders[layout.host]
    across = tree.broadcast(Shape(len(leaders), shape.count, root=leaders.index(shape.root)), layout.host)
    rounds = _between_hosts(across, leaders, 0) if rank == leader else [()] * len(across.rounds)
    whole = (0, shape.count)
    start = [Copy(Range(SOURCE, *whole), Range(DESTINATION, *whole))] if rank == shape.root else []
    barrier = [Meet(layout.local_ranks)] if len(layout.local_ranks) > 1 and not shape.chunk else []
    return CollectivePlan(((*barrier, *start), *rounds, _share_inside(shape, layout, {leader: whole})))


# ---- between hosts


def _between_hosts(plan: CollectivePlan, ranks: Sequence[int], offset: int) -> list[Round]:
    """Translates an in-place plan for h ranks into one for ``ranks``, whose vectors are at ``offset`` of their
    destinations."""

    def shifted(where: Range) -> Range:
        return Range(DESTINATION, where.start + offset, where.stop + offset)

    def translated(instruction: CollectiveInstruction) -> list[CollectiveInstruction]:
        match instruction:
            case Send(peer, where):
                return [Send(ranks[peer], shifted(where))]
            case Recv(peer, where):
                return [Recv(ranks[peer], shifted(where))]
            case Reduce(peer, where):
                return [Reduce(ranks[peer], shifted(where))]
            case Finish(where):
                return [Finish(shifted(where))]
            case Copy(source, _):
                assert source.buffer == SOURCE, "the vector is in the destination already"
                return []
        raise AssertionError(f"{instruction} has no meaning between hosts")

    return [tuple(new for old in steps for new in translated(old)) for steps in plan.rounds]


# ---- inside a host


def _fold_inside(shape: Shape, layout: HostLayout, slices: list[tuple[int, int]]) -> Round:
    """Local rank i folds slice i of all sources of its host into its destination, without finishing it."""
    if len(layout.local_ranks) == 1:
        return (Copy(Range(SOURCE, 0, shape.count), Range(DESTINATION, 0, shape.count)),)
    if not shape.chunk:
        own = slices[layout.local_rank : layout.local_rank + 1]
        folds = [Fold(Range(WINDOW, *part), Range(DESTINATION, *part), ranks=layout.local_ranks) for part in own]
        return (Meet(layout.local_ranks), *folds)
    steps: list[CollectiveInstruction] = []
    width = shape.chunk // len(slices)
    assert width, f"a window of {shape.chunk} elements has no room for {len(slices)} slices"
    for begin in range(0, slices[0][1], width):
        # The window holds one piece of every slice, side by side; the first slice is the longest.
        parts = [(start + begin, min(start + begin + width, stop)) for start, stop in slices]
        windows = [Range(WINDOW, index * width, index * width + b - a) for index, (a, b) in enumerate(parts)]
        pairs = [(Range(SOURCE, *part), window) for part, window in zip(parts, windows, strict=True)]
        steps += [Copy(source, window) for source, window in pairs if window.length > 0]
        steps.append(Meet(layout.local_ranks))
        if layout.local_rank < len(slices) and windows[layout.local_rank].length > 0:
            steps.append(
                Fold(
                    windows[layout.local_rank], Range(DESTINATION, *parts[layout.local_rank]), ranks=layout.local_ranks
                )
            )
    return tuple(steps)


def _share_inside(shape: Shape, layout: HostLayout, owners: dict[int, tuple[int, int]]) -> Round:
    """Every rank of the host copies the parts that others own; ``owners``: the finished part of each owner."""
    own_rank = layout.local_ranks[layout.local_rank]
    if len(layout.local_ranks) == 1:
        return ()
    if not shape.chunk:
        # From destination to destination. The last barrier keeps them unchanged until all ranks have read them.
        takes = [
            Take(owner, Range(DESTINATION, *part), Range(DESTINATION, *part))
            for owner, part in owners.items()
            if owner != own_rank
        ]
        return (Meet(layout.local_ranks), *takes, Meet(layout.local_ranks))
    steps: list[CollectiveInstruction] = []
    longest = max(stop - start for start, stop in owners.values())
    for begin in range(0, longest, shape.chunk):
        takes = []
        for owner, (start, stop) in owners.items():
            part = Range(DESTINATION, start + begin, min(start + begin + shape.chunk, stop))
            if part.length > 0:
                window = Range(WINDOW, 0, part.length)
                if owner == own_rank:
                    steps.append(Copy(part, window))
                else:
                    takes.append(Take(owner, window, part))
        steps += [Meet(layout.local_ranks), *takes]
    return tuple(steps)
