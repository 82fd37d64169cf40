"""Devices that hold parts of a model die, anywhere; the others end with the bits of a run to which nothing happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from forked_ranks import checkpoint, differing, tensors_in, train
from mortal_ranks import Ended, Fault, survive
from reported_rows import check_events
from small_jobs import JOBS, STEPS, alone, alone_losses, settings
from torch import Tensor, nn

from hoop.engine.fault_tolerance.replication import check_memory
from hoop.errors import FailedPrecondition
from hoop.plan.partition import Block
from hoop.strategies.catalog import parse
from hoop.strategies.memory_fit import fit

EPOCH = {"epochs": 1}


def check(ended: Mapping[int, Ended], wanted: dict[str, Tensor], left: int, losses: Sequence[float]) -> None:
    """Every rank that is left holds parts of the wanted state, and together they gave and reported all of it."""
    assert len(ended) == left
    for rank, one in ended.items():
        assert one.outcome.account["done"] % STEPS == 0
        for (name, low), tensor in one.state.items():
            expected = wanted[name].reshape(-1)[low : low + tensor.numel()]
            assert tensor.reshape(-1).numpy().tobytes() == expected.numpy().tobytes(), (rank, name)
    last = tensors_in(checkpoint([ended[rank].outcome for rank in sorted(ended)]))
    assert not differing(last, wanted)
    assert sum(len(one.outcome.of("recovered")) for one in ended.values()) >= 1
    check_events([one.outcome.events for one in ended.values()], losses)


def check_lost(strategy: str, size: int, faults: list[Fault], **changes: object) -> None:
    ended = survive(size, settings(strategy, **EPOCH, **changes), JOBS["normed"], faults)
    trained = "normed", tuple({**EPOCH, **changes}.items())
    check(ended, alone(*trained), size - len(faults), alone_losses(*trained))


@pytest.mark.parametrize(
    ("strategy", "size", "faults"),
    [
        pytest.param("pipeline:1f1b", 3, [Fault(1, "instruction", 60)], id="in the middle of a step"),
        pytest.param("pipeline:zero-bubble", 2, [Fault(0, "keeps", 3)], id="updated and not mirrored"),
        pytest.param("ring", 3, [Fault(2, "meets", 2)], id="mirrored and not committed"),
        pytest.param("ps:bsp", 3, [Fault(2, "settles", 4)], id="committed and not updated"),
        pytest.param("hybrid:replicas=2", 4, [Fault(1, "instruction", 60)], id="of a replica"),
        pytest.param("ps:servers=2", 4, [Fault(3, "instruction", 20)], id="a server"),
    ],
)
def test_a_part_is_lost(strategy: str, size: int, faults: list[Fault]) -> None:
    check_lost(strategy, size, faults)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_part_is_lost_under_a_loss_of_the_users_own(reduction: str) -> None:
    """Its reduction is found out once, with the first weights."""
    job = dataclasses.replace(JOBS["normed"], loss=nn.CrossEntropyLoss(reduction=reduction))
    how = {**EPOCH, "optimizer": "sgd", "lr": 0.001}
    (single,) = train("shm", 1, settings("data", **how), job)
    ended = survive(3, settings("pipeline:1f1b", **how), job, [Fault(1, "instruction", 60)])
    check(ended, tensors_in(checkpoint([single])), 2, single.losses)


def test_over_links_the_gradients_travel() -> None:
    """Where a mirror's holder does not see its owner's memory."""
    ended = survive(3, settings("pipeline:1f1b", **EPOCH), JOBS["normed"], [Fault(1, "settles", 3)], scheme="tcp")
    trained = "normed", tuple(EPOCH.items())
    check(ended, alone(*trained), 2, alone_losses(*trained))


@pytest.mark.parametrize(
    ("strategy", "size", "faults"),
    [
        pytest.param("pipeline:1f1b", 4, [Fault(0, "instruction", 60), Fault(2, "collects")], id="while it recovers"),
        pytest.param(
            "pipeline:gpipe",
            4,
            [Fault(3, "keeps", 2), Fault(0, "prepares"), Fault(1, "meets", 6)],
            id="down to one",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "hybrid:replicas=2",
            4,
            [Fault(0, "keeps", 3), Fault(3, "keeps", 3)],
            id="two at once",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ps:bsp", 4, [Fault(3, "keeps", 4), Fault(1, "collects")], id="a server, a worker", marks=pytest.mark.slow
        ),
    ],
)
def test_one_after_the_other(strategy: str, size: int, faults: list[Fault]) -> None:
    check_lost(strategy, size, faults)


def test_a_machine_is_lost() -> None:
    """Two neighbouring ranks at once: their mirrors are on the other machine."""
    changed, faults = settings("pipeline:1f1b", **EPOCH), [Fault(1, "keeps", 3), Fault(0, "keeps", 3)]
    ended = survive(4, changed, JOBS["normed"], faults, hosts="aabb")
    trained = "normed", tuple(EPOCH.items())
    check(ended, alone(*trained), 2, alone_losses(*trained))


PLACES = [
    ("begins", 1),
    ("instruction", 1),
    ("instruction", 30),
    ("keeps", 1),
    ("keeps", 2),
    ("meets", 1),
    ("settles", 2),
    ("evaluates", 1),
    ("snapshots", 1),
]
SYNCHRONOUS = [
    ("pipeline:gpipe", 3),
    ("pipeline:1f1b", 3),
    ("pipeline:interleaved", 2),
    ("pipeline:zero-bubble", 3),
    ("ring", 3),
    ("ring:slices=2", 2),
    ("hybrid:replicas=2", 4),
    ("ps:bsp", 3),
    ("ps:servers=2", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "size", "rank", "place", "time"),
    [
        pytest.param(strategy, size, rank, place, time, id=f"{strategy} {rank} {place} {time}")
        for (strategy, size), (place, time) in product(SYNCHRONOUS, PLACES)
        for rank in range(size)
    ],
)
def test_any_rank_anywhere(strategy: str, size: int, rank: int, place: str, time: int) -> None:
    check_lost(strategy, size, [Fault(rank, place, time)])


@pytest.mark.parametrize(
    ("strategy", "size", "faults", "joins"),
    [
        pytest.param("pipeline:1f1b", 2, [Fault(0, "keeps", 4, waits=True)], 1, id="another stage"),
        pytest.param(
            "pipeline:1f1b",
            4,
            [Fault(1, "keeps", 3, waits=True), Fault(2, "instruction", 150)],
            1,
            id="a spare one that takes a place",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline:1f1b", 1, [Fault(0, "keeps", 4, waits=True)], 1, id="it was alone", marks=pytest.mark.slow
        ),
        pytest.param(
            "hybrid:replicas=2", 2, [Fault(0, "keeps", 4, waits=True)], 2, id="two at once", marks=pytest.mark.slow
        ),
        pytest.param("ps:bsp", 2, [Fault(1, "keeps", 4, waits=True)], 1, id="another worker", marks=pytest.mark.slow),
        pytest.param("ring", 2, [Fault(0, "instruction", 40, waits=True)], 1, id="in the ring", marks=pytest.mark.slow),
    ],
)
def test_devices_join(strategy: str, size: int, faults: list[Fault], joins: int) -> None:
    """The norm is cut as well: all who hold a stage must agree on it, and nobody else is asked."""
    changes = {**EPOCH, "clip": 0.5}
    ended = survive(size, settings(strategy, **changes), JOBS["normed"], faults, joins)
    deaths = sum(not one.waits for one in faults)
    trained = "normed", tuple(changes.items())
    check(ended, alone(*trained), size + joins - deaths, alone_losses(*trained))


def test_the_asynchronous_ring_goes_back_to_where_it_met() -> None:
    """What it had done since is forgotten, and done by those who are left: nothing is applied twice."""
    changed = settings("ring:async")
    ended = survive(3, changed, JOBS["flat"], [Fault(1, "instruction", 500)])
    first = train("shm", 3, changed.replaced({"max_steps": STEPS}), JOBS["flat"])
    rest = train("shm", 2, changed, JOBS["flat"], resume=checkpoint(first))
    losses = [loss for run in (first, rest) for one in run for loss in one.losses]
    recovered = [told["step"] for one in ended.values() for told in one.outcome.of("recovered")]
    assert recovered == [STEPS]
    check(ended, tensors_in(checkpoint(rest)), 2, losses)


@pytest.mark.parametrize("mode", ["asp", pytest.param("ssp", id="ssp", marks=pytest.mark.slow)])
def test_an_asynchronous_server_forgets_a_lost_workers_span(mode: str) -> None:
    """One worker is left, whose pushes have an order; the result is that of one which was always alone."""
    changed = settings(f"ps:{mode}", **EPOCH)
    ended = survive(3, changed, JOBS["normed"], [Fault(1, "instruction", 40)])
    always = train("shm", 2, changed, JOBS["normed"])
    check(ended, tensors_in(checkpoint(always)), 2, [loss for one in always for loss in one.losses])


@pytest.mark.parametrize(
    ("strategy", "size", "faults", "changes", "said"),
    [
        pytest.param(
            "pipeline:1f1b",
            4,
            [Fault(1, "keeps", 10), Fault(2, "keeps", 10)],
            {},
            rf"1\.0\.weight.* was lost: go on from the checkpoint of step {STEPS}",
            id="two neighbours at once",
        ),
        pytest.param(
            "ring",
            2,
            [Fault(1, "instruction", 40)],
            {"replicate": False},
            "replication is off, and its part was lost: there is no checkpoint yet",
            id="no mirrors",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ps:bsp",
            2,
            [Fault(0, "instruction", 20)],
            {},
            "cannot go on with 1 of its devices: .*take 2 or more, or strategy data; there is no checkpoint yet",
            id="too few",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_had_again_is_named(
    strategy: str, size: int, faults: list[Fault], changes: dict[str, object], said: str
) -> None:
    with pytest.raises(AssertionError, match=said):
        survive(size, settings(strategy, **changes), JOBS["normed"], faults)


def test_mirrors_are_counted() -> None:
    """A device has its neighbour's part, and the gradient that brings it further, beside what it trains."""
    strategy = parse("pipeline:1f1b")
    plan, blocks = strategy.plan(3, 4), [Block(str(index), 1.0, 100, 200) for index in range(3)]
    found = fit(strategy, plan, blocks, [None] * 3)
    room = [held + 300 + 100 for held in found.bytes]
    check_memory(plan, found, blocks, room)
    room[1] -= 1
    with pytest.raises(FailedPrecondition, match=r"device 1 needs 400 B, and 400 B for replicas .*--no-replicate"):
        check_memory(plan, found, blocks, room)
