"""Partition of a model into stages: the best cut, unequal devices, given cuts, and models that do not fit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.plan.partition import Block, StageCut, StageDevice, over_capacity, partition, partition_at

SMALL = st.integers(0, 9)


@st.composite
def models(draw: st.DrawFn) -> list[Block]:
    count = draw(st.integers(1, 8))
    return [Block(f"b{at}", draw(SMALL), draw(SMALL), draw(SMALL), draw(SMALL), draw(SMALL)) for at in range(count)]


def every_cut(blocks: Sequence[Block], devices: Sequence[StageDevice]) -> list[list[StageCut]]:
    """Return all cuts that fit, by trying all."""
    found = []
    for cuts in itertools.combinations(range(1, len(blocks)), len(devices) - 1):
        try:
            found.append(partition_at(blocks, devices, cuts))
        except FailedPrecondition:
            continue
    return found


def cost(blocks: Sequence[Block], stages: Sequence[StageCut]) -> tuple[float, int, float]:
    transferred = sum(blocks[stage.blocks.stop - 1].output_bytes for stage in stages[:-1])
    return max(stage.seconds for stage in stages), transferred, sum(stage.seconds**2 for stage in stages)


@given(models(), st.data())
@settings(max_examples=200)
def test_no_cut_is_better(blocks: list[Block], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(blocks)))
    devices = [
        StageDevice(
            f"d{at}",
            data.draw(st.sampled_from([1, 2, 4])),
            data.draw(st.none() | st.integers(0, 120)),
            data.draw(st.integers(1, 4)),
            data.draw(st.integers(1, 2)),
        )
        for at in range(count)
    ]
    others = every_cut(blocks, devices)
    if not others:
        with pytest.raises(FailedPrecondition, match=r"needs .* and .*has "):
            partition(blocks, devices)
        return
    stages = partition(blocks, devices)
    assert [block for stage in stages for block in stage.blocks] == list(range(len(blocks)))
    assert over_capacity(stages) == []
    assert cost(blocks, stages) == pytest.approx(min(cost(blocks, other) for other in others))


def test_slow_devices_get_fewer_blocks() -> None:
    blocks = [Block(f"b{at}", 1.0) for at in range(8)]
    stages = partition(blocks, [StageDevice("fast", 3.0), StageDevice("slow", 1.0)])
    assert [stage.blocks for stage in stages] == [range(6), range(6, 8)]
    assert [stage.seconds for stage in stages] == [2.0, 2.0]


def test_memory_moves_the_cut() -> None:
    blocks = [Block(f"b{at}", 1.0, weight_bytes=10, activation_bytes=5) for at in range(4)]
    free = partition(blocks, [StageDevice("a"), StageDevice("b")])
    tight = partition(blocks, [StageDevice("a", memory=35, in_flight=3), StageDevice("b")])
    assert [len(stage.blocks) for stage in free] == [2, 2]
    assert [len(stage.blocks) for stage in tight] == [1, 3]
    assert tight[0].bytes == 35


def test_stages_of_one_device_share_its_memory() -> None:
    blocks = [Block(f"b{at}", 1.0, weight_bytes=10) for at in range(4)]
    ring = [StageDevice("a", memory=40), StageDevice("b", memory=40)] * 2
    assert over_capacity(partition(blocks, ring)) == []
    with pytest.raises(FailedPrecondition, match="a needs 40 B and has 39 B"):
        partition(blocks, [StageDevice("a", memory=39), StageDevice("b", memory=40)] * 2)


def test_a_cut_is_found_where_shared_memory_is_the_limit() -> None:
    sizes = [40, 10, 10, 10]
    blocks = [Block(f"b{at}", 1.0, weight_bytes=size, gradient_bytes=0) for at, size in enumerate(sizes)]
    more = [*blocks, Block("b4", 1.0, weight_bytes=40, gradient_bytes=0)]
    devices = [StageDevice("a", memory=80), StageDevice("b", memory=50), StageDevice("a", memory=80)]
    stages = partition(more, devices)
    assert over_capacity(stages) == []
    assert [stage.blocks for stage in stages] == [range(1), range(1, 4), range(4, 5)]


def test_the_error_for_a_model_that_does_not_fit_states_sizes() -> None:
    blocks = [Block("embedding", 1.0, weight_bytes=1 << 20), Block("head", 1.0, weight_bytes=1 << 10)]
    with pytest.raises(FailedPrecondition) as one:
        partition(blocks, [StageDevice("device 0", memory=1 << 20)])
    assert str(one.value) == "memory: device 0 needs 2.0 MiB and has 1 MiB, in one stage of 2 blocks"
    with pytest.raises(FailedPrecondition) as two:
        partition(blocks, [StageDevice("device 0", memory=1 << 20), StageDevice("device 1", memory=1 << 19)])
    assert str(two.value) == (
        "memory: no cut of 2 blocks into 2 stages fits; with the fastest device 0 needs 2 MiB and has 1 MiB; "
        "the largest block, embedding, needs 2 MiB and device 0 has 1 MiB"
    )


@pytest.mark.parametrize("cuts", [[0, 2], [2, 2], [3, 2], [2, 4], [1], [1, 2, 3], [-1, 2]])
def test_given_cuts_are_validated(cuts: list[int]) -> None:
    blocks = [Block(f"b{at}", 1.0) for at in range(4)]
    with pytest.raises(InvalidArgument, match="cuts: "):
        partition_at(blocks, [StageDevice("a"), StageDevice("b"), StageDevice("c")], cuts)


def test_given_cuts_must_fit() -> None:
    blocks = [Block(f"b{at}", 1.0, weight_bytes=10) for at in range(4)]
    devices = [StageDevice("a", memory=20), StageDevice("b")]
    assert [stage.blocks for stage in partition_at(blocks, devices, [1])] == [range(1), range(1, 4)]
    with pytest.raises(FailedPrecondition, match=r"cuts: \[2\] does not fit: a needs 40 B and has 20 B"):
        partition_at(blocks, devices, [2])


def test_more_stages_than_blocks_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="stages: 3 are more than the model's 2 blocks"):
        partition([Block("a", 1), Block("b", 1)], [StageDevice("x")] * 3)


@pytest.mark.parametrize("block", [Block("a", -1), Block("a", float("nan")), Block("a", 1, -5)])
def test_invalid_costs_are_refused(block: Block) -> None:
    with pytest.raises(InvalidArgument, match="block: "):
        partition([block], [StageDevice("x")])


def test_a_speed_of_zero_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="speed: 0 of x"):
        partition([Block("a", 1)], [StageDevice("x", 0)])


def test_a_long_model_on_many_devices() -> None:
    blocks = [Block(f"b{at}", 1.0 + at % 7, weight_bytes=at % 5) for at in range(400)]
    stages = partition(blocks, [StageDevice(f"d{at}", 1 + at % 3, 10_000) for at in range(32)])
    assert len(stages) == 32
    assert stages[-1].blocks.stop == 400
