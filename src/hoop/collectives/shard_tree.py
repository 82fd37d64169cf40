"""The fixed summation tree: the sum of all shards' gradients does not depend on which rank computed which shard.

A global batch is cut into a fixed number of shards, and their gradients are added along a fixed binary tree:

            0..8
        /          \\
      0..4          4..8           8 shards; with 6 the tree is (0..4)+(4..6)
     /    \\        /    \\
    0..2  2..4    4..6  6..8
    / \\   / \\     / \\   / \\
    0 1   2 3     4 5   6 7

A rank merges nodes as soon as it has both halves: after computing shards 0, 1 and 2 it has the nodes 0..2 and 2..3.
The final sum (``ordered_all_reduce.py``) adds the nodes of all ranks as the tree says. So the result is bit-identical
for any number of ranks and any assignment of shards to ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from hoop.errors import InvalidArgument


class Node(NamedTuple):
    """A node of the tree: the sum of shards ``[low, high)``."""

    low: int
    high: int

    @property
    def halves(self) -> tuple[Node, Node]:
        middle = self.low + (1 << (self.high - self.low - 1).bit_length() - 1)
        return Node(self.low, middle), Node(middle, self.high)


class SlotMerge(NamedTuple):
    """The slot that receives a shard's gradient, and the additions between slots that follow."""

    slot: int
    merges: tuple[tuple[int, int], ...]
    """(into, from): slot ``from`` is added to slot ``into`` and is free afterwards."""


@dataclass(frozen=True)
class MergePlan:
    """How one rank stores and merges the gradients of its shards, and the nodes that it has at the end."""

    order: tuple[int, ...]
    """The rank's shards, in the order of computation."""
    slot_merges: tuple[SlotMerge, ...]
    """One entry for each shard, in the same order."""
    nodes: tuple[tuple[Node, int], ...]
    """Each node that remains at the end, with its slot."""
    slots: int
    """The number of slots needed: gradients held at the same time."""


def merge_plan(order: Sequence[int], shards: int) -> MergePlan:
    """The merge plan of a rank that computes these of ``shards`` shards, in this order."""
    if len(set(order)) != len(order) or not all(0 <= shard < shards for shard in order):
        raise InvalidArgument(f"order: {list(order)} is not some of {shards} shards, each once")
    parents = _parents(shards)
    slot_of: dict[Node, int] = {}
    free: list[int] = []
    slots = 0
    slot_merges = []
    for shard in order:
        if free:
            slot = free.pop()
        else:
            slot, slots = slots, slots + 1
        node, merges = Node(shard, shard + 1), []
        slot_of[node] = slot
        while (parent := parents.get(node)) is not None and all(half in slot_of for half in parent.halves):
            left, right = (slot_of.pop(half) for half in parent.halves)
            merges.append((left, right))
            free.append(right)
            slot_of[node := parent] = left
        slot_merges.append(SlotMerge(slot, tuple(merges)))
    return MergePlan(tuple(order), tuple(slot_merges), tuple(sorted(slot_of.items())), slots)


@lru_cache(maxsize=8)
def _parents(shards: int) -> Mapping[Node, Node]:
    """The parent of each node but the root. Cached: a rank makes hundreds of merge plans for the same shards."""
    parents: dict[Node, Node] = {}
    todo = [Node(0, shards)] if shards else []
    while todo:
        node = todo.pop()
        if node.high - node.low > 1:
            for half in node.halves:
                parents[half] = node
                todo.append(half)
    return parents


class Leaf(NamedTuple):
    """A node that is in a slot of a rank."""

    rank: int
    slot: int


Sum = Leaf | tuple["Sum", "Sum"]
"""An expression tree of additions; its leaves are slots of ranks."""


def sum_expression(merge_plans: Sequence[MergePlan], shards: int) -> Sum:
    """The sum of all shards over the slots of the ranks; each shard must be computed exactly once.

    ``merge_plans``: those of all ranks, in rank order.
    """
    computed = sorted(shard for one in merge_plans for shard in one.order)
    if computed != list(range(shards)):
        raise InvalidArgument(f"shards: of {shards}, the ranks compute {computed}; each must be there once")
    leaves = {node: Leaf(rank, slot) for rank, one in enumerate(merge_plans) for node, slot in one.nodes}

    def build(node: Node) -> Sum:
        leaf = leaves.get(node)
        if leaf is not None:
            return leaf
        left, right = node.halves
        return build(left), build(right)

    return build(Node(0, shards))
