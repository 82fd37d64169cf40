"""Versions of a state that stay where they are in the arena while the rest of it is freed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hoop.engine.fault_tolerance.state_slices import LiveSlice, StateShard
from hoop.engine.stage.state import StateVectors
from hoop.memory import Arena

VECTOR = 1000


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    with Arena.create(tmp_path / "arena", 16 * VECTOR) as found:
        yield found


def test_a_state_in_place_is_what_is_in_the_vectors_and_a_copy_of_the_rest(arena: Arena) -> None:
    vectors = StateVectors(arena, "test.")
    weights, counter = torch.from_numpy(vectors.new("weights", 100)), torch.tensor([7])
    weights[:] = torch.arange(100)
    state = [LiveSlice("low", 0, weights[:40]), LiveSlice("count", 0, counter), LiveSlice("high", 0, weights[40:])]
    inside, elsewhere = StateShard.in_place(state, 3, vectors.memory)
    assert ([one.name for one in inside.slices], inside.step) == (["low", "high"], 3)
    assert ([one.name for one in elsewhere.slices], elsewhere.step) == (["count"], 3)
    clone = inside.clone()
    weights[:] = 0
    counter[:] = 0
    low, high = inside.slices
    assert not inside[high].any()
    assert clone[low].view(np.float32).tolist() == list(range(40))
    assert clone[high].view(np.float32).tolist() == list(range(40, 100))
    assert elsewhere[elsewhere.slices[0]].view(np.int64).tolist() == [7]


def test_vectors_with_a_kept_version_stay_and_the_others_are_freed(arena: Arena) -> None:
    vectors = StateVectors(arena, "test.")
    for name in ("weights", "slots", "moment", "total"):
        vectors.new(name, VECTOR // 4)
    moment = arena.buffer("test.moment")
    inside, _ = StateShard.in_place(
        [LiveSlice("m", 0, torch.from_numpy(vectors.memory[moment.address - arena.min_address :][:8]))],
        1,
        vectors.memory,
    )
    assert vectors.bytes_with(inside.places) == VECTOR
    vectors.free("total", inside.places)
    assert [one.name for one in arena.buffers()] == ["test.total", "test.moment"]
    assert vectors.largest_free < arena.capacity - 2 * VECTOR, "the gap above them counts for itself"
    vectors.free()
    assert not arena.buffers()
    assert vectors.largest_free == arena.capacity
