"""After a loss a data parallel rank writes totals to another buffer, also where its arena has no room for many."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from torch import nn

from hoop.engine.settings import Settings
from hoop.engine.stage.state import NUM_TOTAL_BUFFERS, StageSpec, StageState, StateVectors
from hoop.errors import OutOfMemory
from hoop.memory import Arena

CAPACITY = 1 << 20


def addresses(stage: StageState, rotations: int) -> list[int]:
    """Where the total is before and after each loss."""
    found = [stage.total_buffer.ctypes.data]
    for _ in range(rotations):
        stage.rotate_total_buffer()
        assert stage.total is stage.total_buffer
        found.append(stage.total_buffer.ctypes.data)
    return found


def make_stage(arena: Arena) -> StageState:
    return StageState(StateVectors(arena, "job1."), StageSpec([nn.Linear(4, 4)], 0, "stage0."), Settings())


def fill(arena: Arena, stage: StageState, totals: int) -> None:
    """Leave room for this number of total buffers."""
    free = arena.capacity - arena.used - totals * stage.total_buffer.nbytes
    arena.allocate("other", free - free % 64)


def test_a_buffer_is_used_again_only_after_all_others(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "arena", CAPACITY) as arena:
        found = addresses(make_stage(arena), 2 * NUM_TOTAL_BUFFERS)
    assert len(set(found)) == NUM_TOTAL_BUFFERS
    assert found[NUM_TOTAL_BUFFERS:] == [*found[:NUM_TOTAL_BUFFERS], found[0]]


@pytest.mark.parametrize("totals", [1, 2])
def test_a_full_arena_has_buffers_in_turn(tmp_path: Path, totals: int) -> None:
    with Arena.create(tmp_path / "arena", CAPACITY) as arena:
        stage = make_stage(arena)
        fill(arena, stage, totals)
        found = addresses(stage, 7)
    assert len(set(found)) == 1 + totals
    assert all(one != following for one, following in itertools.pairwise(found))


def test_without_a_second_buffer_a_loss_is_an_error(tmp_path: Path) -> None:
    with Arena.create(tmp_path / "arena", CAPACITY) as arena:
        stage = make_stage(arena)
        fill(arena, stage, 0)
        with pytest.raises(OutOfMemory, match=r"stage0\.total1"):
            stage.rotate_total_buffer()
