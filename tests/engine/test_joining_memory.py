"""The memory check of a data parallel rank that sets up alone, and trains with others later."""

from __future__ import annotations

import bisect
from pathlib import Path

import pytest
from short_jobs import JOBS
from small_jobs import settings

from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext, single_rank
from hoop.engine.trainer import Trainer
from hoop.errors import FailedPrecondition, HoopError
from hoop.memory import Arena
from hoop.transport.registry import open_transport

RANKS = 8
SETTINGS = settings("data", balance=False, pin=False, epochs=1)
"""With 8 ranks each computes one of 8 shards and has one gradient slot; a rank alone has four."""


def set_up_alone(folder: Path, size: int, future_size: int) -> int:
    """Sets up a joining rank in an arena of ``size`` bytes; returns how many of them it uses."""

    def wait_reassignment(timeout: float, error: HoopError | None) -> RankContext:
        raise AssertionError("this test assigns no rank")

    with (
        Arena.create(folder / f"arena.{future_size}.{size}", size) as arena,
        open_transport("inproc://one:0") as transport,
    ):
        one = Communicator(transport.endpoint(1, 1, 0, [transport.address]))
        context = RankContext(
            arena, one, lambda ranks: one, wait_reassignment=wait_reassignment, joining=True, future_size=future_size
        )
        trainer = Trainer(context, SETTINGS, JOBS["mlp"], lambda event: None, lambda: False)
        used = arena.used
        trainer.close()
        return used


def is_enough(folder: Path, size: int, future_size: int) -> bool:
    try:
        set_up_alone(folder, size, future_size)
    except FailedPrecondition as error:
        if not str(error).startswith("memory: "):
            raise
        return False
    return True


def test_a_joining_rank_needs_the_memory_of_the_ranks_that_it_joins(tmp_path: Path) -> None:
    """A rank of eight sums one shard's gradient; the second total, for a recovery, is less than three more slots."""
    sizes = [quarter << 18 for quarter in range(1, 64)]

    def fewest(future_size: int) -> int:
        """Index of the least size that is enough."""
        return bisect.bisect_left(sizes, True, key=lambda size: is_enough(tmp_path, size, future_size))

    joining, alone = fewest(RANKS), fewest(0)
    assert joining < alone < len(sizes), "it is checked as a world of one rank"


def test_a_joining_rank_allocates_no_gradient_slots_for_shards_of_others(tmp_path: Path) -> None:
    assert set_up_alone(tmp_path, 64 << 20, RANKS) < set_up_alone(tmp_path, 64 << 20, 0)


def test_a_rank_whose_peers_failed_is_checked_for_their_number(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "arena", 1 << 20) as arena, open_transport("inproc://one:0") as transport:
        peers = [transport.address] * RANKS
        world = Communicator(transport.endpoint(1, 1, 0, peers))
        found = single_rank(RankContext(arena, world, lambda ranks: world))
        assert (found.size, found.future_size) == (1, RANKS)


@pytest.mark.parametrize("future_size", [0, RANKS])
def test_a_rank_that_is_too_small_is_refused(tmp_path: Path, future_size: int) -> None:
    with pytest.raises(FailedPrecondition, match="memory: "):
        set_up_alone(tmp_path, 1 << 20, future_size)
