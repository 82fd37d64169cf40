"""A rank that does not come is named in a warning long before the group's time-out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from world import LONG_S, World

from hoop.torch_backend import late_ranks

MakeWorld = Callable[..., World]
LATE = 1


class Warnings(logging.Handler):
    """Keeps the warnings of a rank, and tells the late rank that there is one."""

    def __init__(self, rank: int) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        dist.distributed_c10d._get_default_store().set(f"warned {self._rank}", "1")


def be_impatient(rank: int) -> None:
    late_ranks.MOST_PATIENCE_S = 0.2


def over_tcp(rank: int) -> None:
    os.environ["HOOP_TRANSPORT"] = "tcp"
    be_impatient(rank)


def without_native_core(rank: int) -> None:
    os.environ["HOOP_NATIVE"] = "0"
    be_impatient(rank)


def all_reduce(rank: int) -> None:
    dist.all_reduce(torch.ones(1000))


def asynchronous(rank: int) -> None:
    dist.all_reduce(torch.ones(1000), async_op=True).wait()


def all_to_all(rank: int) -> None:
    """Sizes differ, so ranks send each other messages."""
    sizes = [1 + peer for peer in range(dist.get_world_size())]
    received = torch.empty(dist.get_world_size() * (1 + rank))
    counts = [1 + rank] * dist.get_world_size()
    dist.all_to_all_single(received, torch.ones(sum(sizes)), counts, sizes)


def message(rank: int) -> None:
    if rank == LATE:
        for peer in range(dist.get_world_size()):
            if peer != LATE:
                dist.send(torch.ones(3), peer)
    else:
        dist.recv(torch.ones(3), LATE)


def monitored(rank: int) -> None:
    dist.monitored_barrier()


def late_or_warned(rank: int, doing: Callable[[int], None]) -> list[str]:
    """The late rank comes when every other one has warned."""
    dist.barrier()
    if rank == LATE:
        others = [f"warned {peer}" for peer in range(dist.get_world_size()) if peer != LATE]
        dist.distributed_c10d._get_default_store().wait(others, timedelta(seconds=LONG_S))
        doing(rank)
        return []
    warnings = Warnings(rank)
    logging.getLogger("hoop.torch_backend").addHandler(warnings)
    doing(rank)
    return warnings.texts


@pytest.mark.parametrize(
    ("before", "doing", "size", "waiting"),
    [
        (be_impatient, all_reduce, 3, "a collective waits for rank 1 (global rank 1)"),
        (be_impatient, asynchronous, 2, "a collective waits for rank 1 (global rank 1)"),
        (be_impatient, all_to_all, 3, "a collective waits for rank 1 (global rank 1)"),
        (be_impatient, message, 3, "waiting for a message from rank 1 (tag 0, 12 bytes)"),
        (be_impatient, monitored, 2, "waiting for a message from rank 1"),
        (without_native_core, all_reduce, 3, "a collective waits for rank 1 (global rank 1)"),
        (over_tcp, all_reduce, 2, "a collective waits for rank 1 (global rank 1)"),
    ],
)
def test_a_rank_that_does_not_come_is_named(
    world: MakeWorld, before: Callable[[int], None], doing: Callable[[int], None], size: int, waiting: str
) -> None:
    ranks = world(size, before=before)
    ranks.start(late_or_warned, doing)
    for rank, texts in enumerate(ranks.results()):
        if rank != LATE:
            assert any(f"rank {rank} (global rank {rank}) of group '0': {waiting}" in text for text in texts), texts


def join_late(rank: int, folder: str) -> list[str]:
    """The late rank makes the group when rank 0 has warned."""
    be_impatient(rank)
    store = dist.FileStore(f"{folder}/own", -1)
    texts: list[str] = []
    if rank == LATE:
        store.wait(["warned"], timedelta(seconds=LONG_S))
    else:
        handler = logging.Handler()

        def emit(record: logging.LogRecord) -> None:
            texts.append(record.getMessage())
            store.set("warned", "1")

        handler.emit = emit  # type: ignore[method-assign]
        logging.getLogger("hoop.torch_backend").addHandler(handler)
    dist.init_process_group(
        "hoop",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LONG_S),
    )
    dist.barrier()
    return texts


def test_a_rank_that_does_not_join_the_group_is_named(run_ranks: Callable[..., list[Any]], tmp_path: Any) -> None:
    texts, _ = run_ranks(2, join_late, str(tmp_path), joins=False)
    assert texts[0].startswith("rank 0: group '0' of 2: waiting for rank 1 for more than 0.2 s"), texts


@pytest.mark.parametrize(("timeout", "seconds"), [(1.0, 10.0), (100.0, 10.0), (200.0, 20.0), (1800.0, 30.0)])
def test_patience_is_a_tenth_of_the_timeout_within_limits(timeout: float, seconds: float) -> None:
    assert late_ranks.patience(timeout) == seconds
