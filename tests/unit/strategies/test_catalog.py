"""Strategies as text, and which strategies a model fits into memory with."""

from __future__ import annotations

import pytest

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.plan.partition import Block
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import STRATEGIES, all_strategies, parse
from hoop.strategies.data_parallel import DataParallel
from hoop.strategies.hybrid import Hybrid
from hoop.strategies.memory_fit import GPU_ALIGNMENT, Gradients, advice, fit, fitting_strategies, gpu_shard_bytes
from hoop.strategies.parameter_server import ParameterServer
from hoop.strategies.pipeline import Pipeline
from hoop.strategies.ring import RingModel

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("data", DataParallel()),
        ("data:sharded", DataParallel(sharded=True)),
        (" data: ", DataParallel()),
        ("ps", ParameterServer()),
        ("ps:asp", ParameterServer(mode="asp")),
        ("ps:ssp,staleness=0,servers=2", ParameterServer(2, "ssp", 0)),
        ("ring", RingModel()),
        ("ring:async, limit=3", RingModel(limit=3, asynchronous=True)),
        ("ring:asynchronous=true,limit=none", RingModel(asynchronous=True)),
        ("pipeline", Pipeline()),
        ("pipeline:1f1b", Pipeline("1f1b")),
        ("pipeline:schedule=gpipe,slices=2", Pipeline("gpipe")),
        ("pipeline:interleaved,slices=3", Pipeline("interleaved", 3)),
        ("hybrid:replicas=2", Hybrid(2)),
        ("hybrid:zero-bubble,replicas=4", Hybrid(4, "zero-bubble")),
    ],
)
def test_strategies_are_parsed(text: str, strategy: Strategy) -> None:
    assert parse(text) == strategy


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "strategy: '' is unknown; choose data, ps, ring, pipeline, hybrid"),
        ("dat", "strategy: 'dat' is unknown; choose data, ps, ring, pipeline, hybrid"),
        ("data:fast", "strategy: data knows no 'fast'; it takes sharded, sharded=…"),
        ("ps:fast", "strategy: ps knows no 'fast'; it takes bsp, asp, ssp, servers=…, mode=…, staleness=…"),
        ("ps:mode=fast", "mode: 'fast' is unknown; choose bsp, asp, ssp"),
        ("ps:workers=3", "strategy: ps has no field 'workers'; it has servers, mode, staleness"),
        ("ps:servers=x", "servers: 'x' is not a whole number"),
        ("ps:servers=-1", "servers: '-1' is not a whole number"),
        ("ps:servers=²", "servers: '²' is not a whole number"),
        ("ring:asynchronous=maybe", "asynchronous: 'maybe' is neither true nor false"),
        ("ring:sync,async", "strategy: asynchronous of ring is given twice, in 'ring:sync,async'"),
        (
            "pipeline:schedule=fast",
            "schedule: 'fast' is unknown; choose 1f1b, gpipe, interleaved, zero-bubble",
        ),
        ("pipeline:slices=0", "slices: 0; a device holds at least 1"),
        ("hybrid:replicas=0", "replicas: 0; there is at least 1"),
    ],
)
def test_invalid_strategies_are_refused_with_a_reason(text: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        parse(text)
    assert str(error.value) == complaint


def test_a_hybrid_needs_equal_replicas() -> None:
    for devices in (1, 3):
        with pytest.raises(InvalidArgument, match=f"devices: {devices} cannot be 2 equal replicas"):
            Hybrid(2).stages(devices)


def test_the_catalog_has_every_strategy() -> None:
    assert list(STRATEGIES) == ["data", "ps", "ring", "pipeline", "hybrid"]
    assert {strategy.name for strategy in all_strategies(4)} == set(STRATEGIES)
    assert {strategy.name for strategy in all_strategies(1)} == {"data", "ring", "pipeline"}
    assert [s.replicas for s in all_strategies(12) if isinstance(s, Hybrid)] == [2, 3, 4, 6]


def blocks(count: int = 8, activation: int = 0) -> list[Block]:
    """Return blocks with 1 MiB of weights, 1 MiB of gradients and 2 MiB of optimizer state each."""
    return [Block(f"b{at}", 1.0, MIB, 2 * MIB, activation) for at in range(count)]


def test_memory_of_each_device() -> None:
    def held(strategy: Strategy, activation: int = 0) -> list[float]:
        fits = fit(strategy, strategy.plan(4, 8), blocks(activation=activation), [None] * 4)
        return [size / MIB for size in fits.bytes]

    assert held(DataParallel()) == [32] * 4
    assert held(DataParallel(), MIB) == [40] * 4
    assert held(Pipeline()) == [8] * 4
    assert held(Pipeline(), MIB) == [16, 14, 12, 10]
    assert held(Pipeline("gpipe"), MIB) == [24] * 4
    assert held(RingModel(asynchronous=True)) == [10] * 4
    assert held(Hybrid(2)) == [16] * 4
    assert held(ParameterServer(2)) == [16, 16, 16, 16]


def test_strategies_that_would_fit_are_suggested() -> None:
    memory = [10 * MIB] * 4
    with pytest.raises(FailedPrecondition) as error:
        fit(DataParallel(), DataParallel().plan(4, 8), blocks(), memory)
    assert str(error.value) == (
        "memory: each of ranks 0, 1, 2, 3 needs 32 MiB and has 10 MiB, in one stage of 8 blocks"
    )
    fits = fitting_strategies(all_strategies(4), blocks(), memory, 8)
    assert {one.strategy.name for one in fits} == {"ring", "pipeline"}
    assert "33 MiB a device are enough: --memory 33MiB (memory= of hoop.train)." in advice(fits, 32 * MIB)
    assert "it would fit with ring:sync,slices=1 (at most 8 MiB a device), " in advice(fits, 32 * MIB)
    none = fitting_strategies(all_strategies(4), blocks(), [MIB] * 4, 8)
    assert "no strategy fits; add devices" in advice(none, 32 * MIB)


def test_the_smallest_device_of_a_stage_limits_it() -> None:
    with pytest.raises(FailedPrecondition, match="needs 32 MiB and has 10 MiB"):
        fit(DataParallel(), DataParallel().plan(3, 8), blocks(), [40 * MIB, 10 * MIB, None])


@pytest.mark.parametrize(
    ("strategy", "devices", "rank", "weights", "optimizer", "gradients"),
    [
        pytest.param("pipeline:1f1b", 4, 0, 2, 4, 2 * 3, id="the row of the whole sum is the total"),
        pytest.param("hybrid:replicas=2", 4, 3, 4, 8, 4 * 4, id="three rows, and the total"),
        pytest.param("ring:async", 4, 0, 3 * 2, 4, 2 * 3, id="two versions, and the one that computes"),
        pytest.param("ps:bsp", 3, 0, 8, 0, 8 * 4, id="a worker has a row for each slot"),
        pytest.param("ps:bsp", 3, 2, 8, 16, 8 * 5, id="a server has a row for each node, and the sum"),
    ],
)
def test_memory_on_a_gpu_where_the_state_is_partitioned(
    strategy: str, devices: int, rank: int, weights: int, optimizer: int, gradients: int
) -> None:
    """Four gradient buffers a stage: three slots and a total, or a worker's four slots. In MiB, as the blocks are."""
    plan = parse(strategy).plan(devices, 8)
    found = fit(parse(strategy), plan, blocks(), [None] * devices)
    needed = gpu_shard_bytes(found, plan, blocks(), Gradients(4, 4), rank)
    assert 0 < needed - (weights + optimizer + gradients) * MIB <= 16 * GPU_ALIGNMENT


def test_a_server_with_too_little_memory_is_refused() -> None:
    strategy = ParameterServer()
    with pytest.raises(FailedPrecondition, match="the server on rank 2 needs 32 MiB and has 8 MiB"):
        fit(strategy, strategy.plan(3, 8), blocks(), [None, None, 8 * MIB])


def test_cuts_follow_device_speeds_or_are_given() -> None:
    plan = Pipeline().plan(2, 4)
    fast = fit(Pipeline(), plan, blocks(), [None] * 2, speeds=[3, 1])
    assert [stage.blocks for stage in fast.stages] == [range(6), range(6, 8)]
    given = fit(Pipeline(), plan, blocks(), [None] * 2, cuts=[1])
    assert [stage.blocks for stage in given.stages] == [range(1), range(1, 8)]
    with pytest.raises(InvalidArgument, match="stages: 2 are more than the model's 1 block;"):
        fit(Pipeline(), plan, blocks(1), [None] * 2)
    with pytest.raises(InvalidArgument, match="memory: 3 values for 2 devices"):
        fit(Pipeline(), plan, blocks(), [None] * 3)
