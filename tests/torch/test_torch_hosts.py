"""A group whose ranks are on several hosts, as far as they know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hoop.torch_backend import rendezvous
from hoop.transport import hybrid

Together = Callable[..., list[Any]]


def on_two_hosts(rank: int, shared: str) -> list[Any]:
    """All-reduces and more in a group of four that believe they are two and two."""
    made: list[tuple[int, ...]] = []
    original = hybrid.HybridEndpoint.__init__

    def noted(self: Any, links: Any, local: Any, hosts: Any) -> None:
        made.append(tuple(hosts))
        original(self, links, local, hosts)

    hybrid.HybridEndpoint.__init__ = noted  # type: ignore[method-assign]
    rendezvous._host_key = lambda: f"host {rank // 2}/{shared}"
    group = dist.new_group([0, 1, 2, 3])
    found = []
    for count in (0, 1, 3, 1001, 600_000):
        tensor = torch.full((count,), float(rank + 1))
        dist.all_reduce(tensor, group=group)
        found.append(bool((tensor == 10).all()))
    tensor = torch.full((5,), rank)
    dist.broadcast(tensor, 3, group=group)
    parts = [torch.zeros(2) for _ in range(4)]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
    gathered = [float(part[1]) for part in parts]
    dist.destroy_process_group(group)
    return [found, tensor.tolist(), gathered, made]


def test_a_group_over_two_hosts(together: Together) -> None:
    for rank, (right, sent, gathered, made) in enumerate(together(4, on_two_hosts, "shm")):
        assert right == [True] * 5, rank
        assert sent == [3] * 5, rank
        assert gathered == [0, 1, 2, 3], rank
        assert made == [(0, 0, 2, 2)], rank


def test_hosts_that_are_to_talk_otherwise_share_no_memory(together: Together) -> None:
    for rank, (right, sent, _, made) in enumerate(together(4, on_two_hosts, "tcp")):
        assert right == [True] * 5, rank
        assert sent == [3] * 5, rank
        assert made == [], rank
