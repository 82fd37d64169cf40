"""The sum over shards in an order that does not depend on who computed them.

A global batch is cut into a fixed number of shards, and their gradients are added along a fixed binary tree:

            0..8
        /          \\
      0..4          4..8           8 shards; with 6 the tree is (0..4)+(4..6)
     /    \\        /    \\
    0..2  2..4    4..6  6..8
    / \\   / \\     / \\   / \\
    0 1   2 3     4 5   6 7

A rank adds what it can as it goes: having computed shards 0..3 it holds the node 0..2 and the node 2..3. Whoever sums
an element takes the nodes that the ranks hold and adds them where the tree says. So the result is the same, bit for
bit, for one rank or many, whichever rank computed which shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hoop.errors import InvalidArgument


class Node(NamedTuple):
    """The sum of shards ``[low, high)``, for ranges that are in the tree."""

    low: int
    high: int

    @property
    def halves(self) -> tuple[Node, Node]:
        middle = self.low + (1 << (self.high - self.low - 1).bit_length() - 1)
        return Node(self.low, middle), Node(middle, self.high)


class SlotMerge(NamedTuple):
    """Where a shard's gradient is put, and which slots are added to which afterwards."""

    slot: int
    merges: tuple[tuple[int, int], ...]
    """(into, from): ``from`` is free again afterwards."""


@dataclass(frozen=True)
class MergePlan:
    """What a rank that computes these shards, in this order, does with their gradients, and holds in the end."""

    order: tuple[int, ...]
    landings: tuple[SlotMerge, ...]
    nodes: tuple[tuple[Node, int], ...]
    """Each node it holds in the end, with its slot."""
    slots: int
    """How many gradients it must have room for at once."""


def merge_plan(order: Sequence[int], shards: int) -> MergePlan:
    """How a rank adds up the shards it computes: it merges two halves of the tree as soon as it has both."""
    if len(set(order)) != len(order) or not all(0 <= shard < shards for shard in order):
        raise InvalidArgument(f"order: {list(order)} is not some of {shards} shards, each once")
    parents = _parents(shards)
    held: dict[Node, int] = {}
    free: list[int] = []
    slots = 0
    landings = []
    for shard in order:
        if free:
            slot = free.pop()
        else:
            slot, slots = slots, slots + 1
        node, merges = Node(shard, shard + 1), []
        held[node] = slot
        while (parent := parents.get(node)) is not None and all(half in held for half in parent.halves):
            left, right = (held.pop(half) for half in parent.halves)
            merges.append((left, right))
            free.append(right)
            held[node := parent] = left
        landings.append(SlotMerge(slot, tuple(merges)))
    return MergePlan(tuple(order), tuple(landings), tuple(sorted(held.items())), slots)


def _parents(shards: int) -> dict[Node, Node]:
    found: dict[Node, Node] = {}
    todo = [Node(0, shards)] if shards else []
    while todo:
        node = todo.pop()
        if node.high - node.low > 1:
            for half in node.halves:
                found[half] = node
                todo.append(half)
    return found


class Leaf(NamedTuple):
    """A node that a rank holds."""

    rank: int
    slot: int


Sum = Leaf | tuple["Sum", "Sum"]
"""What is added to what."""


def expression(holdings: Sequence[MergePlan], shards: int) -> Sum:
    """The whole sum in terms of what the ranks hold; every shard must be held exactly once."""
    computed = sorted(shard for one in holdings for shard in one.order)
    if computed != list(range(shards)):
        raise InvalidArgument(f"shards: of {shards}, the ranks compute {computed}; each must be there once")
    leaves = {node: Leaf(rank, slot) for rank, one in enumerate(holdings) for node, slot in one.nodes}

    def build(node: Node) -> Sum:
        leaf = leaves.get(node)
        if leaf is not None:
            return leaf
        left, right = node.halves
        return build(left), build(right)

    return build(Node(0, shards))
