"""Groups with ranks that cannot share memory: all ranks select the same transport, and collectives work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hoop.transport.semaphore import Semaphore

RunRanks = Callable[..., list[Any]]


def without_semaphores(rank: int, unable: list[int]) -> tuple[str, list[float], list[int]]:
    """The endpoint class of a group in which some ranks cannot create semaphores, and its results."""
    if rank in unable:

        def fail(place: Any, name: str) -> Any:
            raise OSError(f"{name}: no semaphores here")

        Semaphore.create = fail  # type: ignore[method-assign]  # in this rank's own process
    group: Any = dist.new_group(list(range(dist.get_world_size())))
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    work.wait()
    sent = torch.full((3,), rank)
    dist.broadcast(sent, 1, group=group)
    class_names = (one.__name__ for one in type(group._links._communicator.endpoint).__mro__)
    kind = next(one for one in class_names if not one.startswith("_"))
    dist.destroy_process_group(group)
    return kind, sorted(set(tensor.tolist())), sent.tolist()


@pytest.mark.parametrize(
    ("size", "unable", "kind"),
    [(2, [], "ShmEndpoint"), (2, [1], "TcpEndpoint"), (2, [0, 1], "TcpEndpoint"), (3, [0], "HybridEndpoint")],
    ids=["all can", "one cannot", "none can", "two of three can"],
)
def test_ranks_that_cannot_share_memory_use_tcp(run_ranks: RunRanks, size: int, unable: list[int], kind: str) -> None:
    total = size * (size + 1) / 2
    for rank, found in enumerate(run_ranks(size, without_semaphores, unable)):
        assert found == (kind, [total * size], [1, 1, 1]), f"rank {rank}"
