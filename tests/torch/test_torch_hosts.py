"""Groups whose ranks believe, by their host keys, that they are on several hosts."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hoop.torch_backend import rendezvous
from hoop.transport import hybrid

RunRanks = Callable[..., list[Any]]


def on_two_hosts(rank: int, shared: str) -> list[Any]:
    """Collectives in a group of four ranks, two on each of two hosts; ``shared`` is the scheme within a host."""
    created: list[tuple[int, ...]] = []
    original = hybrid.HybridEndpoint.__init__

    def recording_init(self: Any, links: Any, local: Any, hosts: Any) -> None:
        created.append(tuple(hosts))
        original(self, links, local, hosts)

    hybrid.HybridEndpoint.__init__ = recording_init  # type: ignore[method-assign]
    os.environ["HOOP_HOST"] = "127.0.0.1"  # beyond loopback the ranks would need a token
    rendezvous._host_key = lambda: f"host {rank // 2}/{shared}"
    group = dist.new_group([0, 1, 2, 3])
    correct = []
    for count in (0, 1, 3, 1001, 600_000):
        tensor = torch.full((count,), float(rank + 1))
        dist.all_reduce(tensor, group=group)
        correct.append(bool((tensor == 10).all()))
    tensor = torch.full((5,), rank)
    dist.broadcast(tensor, 3, group=group)
    parts = [torch.zeros(2) for _ in range(4)]
    dist.all_gather(parts, torch.full((2,), float(rank)), group=group)
    gathered = [float(part[1]) for part in parts]
    dist.destroy_process_group(group)
    return [correct, tensor.tolist(), gathered, created]


def test_a_group_over_two_hosts(run_ranks: RunRanks) -> None:
    for rank, (correct, sent, gathered, created) in enumerate(run_ranks(4, on_two_hosts, "shm")):
        assert correct == [True] * 5, rank
        assert sent == [3] * 5, rank
        assert gathered == [0, 1, 2, 3], rank
        assert created == [(0, 0, 2, 2)], rank


def test_hosts_without_shm_get_no_hybrid_endpoint(run_ranks: RunRanks) -> None:
    for rank, (correct, sent, _, created) in enumerate(run_ranks(4, on_two_hosts, "tcp")):
        assert correct == [True] * 5, rank
        assert sent == [3] * 5, rank
        assert created == [], rank
