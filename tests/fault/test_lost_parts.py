"""Ranks that hold parts of a model die at any place; the others end with bitwise the state of an undisturbed run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
from faulty_ranks import Fault, RankResult, run_with_faults
from forked_ranks import checkpoint, differing, tensors_in, train
from reported_rows import check_events
from small_jobs import JOBS, STEPS, alone, alone_losses, settings
from torch import Tensor, nn

from hoop.engine import setup as engine_setup
from hoop.engine.fault_tolerance.replication import check_memory, copies_bytes
from hoop.errors import FailedPrecondition
from hoop.plan.partition import Block
from hoop.strategies.catalog import parse
from hoop.strategies.memory_fit import fit

EPOCH = {"epochs": 1}


def check(
    results: Mapping[int, RankResult], expected: dict[str, Tensor], survivors: int, losses: Sequence[float]
) -> None:
    """Checks the state of each surviving rank, the last checkpoint and the reported steps."""
    assert len(results) == survivors
    for rank, result in results.items():
        assert result.outcome.account["done"] % STEPS == 0
        for (name, low), tensor in result.state.items():
            slice_expected = expected[name].reshape(-1)[low : low + tensor.numel()]
            assert tensor.reshape(-1).numpy().tobytes() == slice_expected.numpy().tobytes(), (rank, name)
    last = tensors_in(checkpoint([results[rank].outcome for rank in sorted(results)]))
    assert not differing(last, expected)
    assert sum(len(result.outcome.of("recovered")) for result in results.values()) >= 1
    check_events([result.outcome.events for result in results.values()], losses)


def check_lost(strategy: str, size: int, faults: list[Fault], **changes: object) -> None:
    results = run_with_faults(size, settings(strategy, **EPOCH, **changes), JOBS["normed"], faults)
    reference = "normed", tuple({**EPOCH, **changes}.items())
    check(results, alone(*reference), size - len(faults), alone_losses(*reference))


@pytest.mark.parametrize(
    ("strategy", "size", "faults"),
    [
        pytest.param("pipeline:1f1b", 3, [Fault(1, "instruction", 60)], id="in the middle of a step"),
        pytest.param("pipeline:zero-bubble", 2, [Fault(0, "keeps", 3)], id="updated and not replicated"),
        pytest.param("ring", 3, [Fault(2, "meets", 2)], id="replicated and not committed"),
        pytest.param("ps:bsp", 3, [Fault(2, "settles", 4)], id="committed and not updated"),
        pytest.param("hybrid:replicas=2", 4, [Fault(1, "instruction", 60)], id="a stage of a hybrid"),
        pytest.param("ps:servers=2", 4, [Fault(3, "instruction", 20)], id="a server"),
        pytest.param("data:sharded", 3, [Fault(0, "settles", 4)], id="a slice, committed and not updated"),
        pytest.param("data:sharded", 4, [Fault(2, "gathers", 3)], id="a slice, updated and not gathered"),
    ],
)
def test_a_lost_part_is_recovered(strategy: str, size: int, faults: list[Fault]) -> None:
    check_lost(strategy, size, faults)


MEASURING = {
    "data": ("data", "shm", "cpu", Fault(2, "measures")),
    "data, over TCP": ("data", "tcp", "cpu", Fault(2, "measures")),
    "data on a GPU": ("data", "shm", "emulated", Fault(2, "rehearses", 2)),
    "data on a GPU, over TCP": ("data", "tcp", "emulated", Fault(2, "rehearses", 2)),
    "pipeline": ("pipeline:1f1b", "shm", "cpu", Fault(2, "measures")),
}


@pytest.mark.slow_if(
    when=lambda params: (params["strategy"], params["scheme"], params["kind"]) == ("data", "tcp", "cpu")
)
@pytest.mark.parametrize(("strategy", "scheme", "kind", "fault"), MEASURING.values(), ids=MEASURING)
def test_a_rank_dies_while_the_ranks_measure(strategy: str, scheme: str, kind: str, fault: Fault) -> None:
    """The others have set up already, and set up again: with the first weights, in memory that is free."""
    wanted = settings(strategy, **EPOCH, accelerator=kind)
    results = run_with_faults(3, wanted, JOBS["normed"], [fault], scheme=scheme)
    found = [results[rank].outcome for rank in sorted(results)]
    assert len(found) == 2
    assert not differing(tensors_in(checkpoint(found)), alone("normed", tuple(EPOCH.items())))
    check_events([one.events for one in found], alone_losses("normed", tuple(EPOCH.items())))


@pytest.mark.parametrize("kind", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("strategy", "size", "faults"),
    [
        pytest.param("pipeline:1f1b", 3, [Fault(1, "settles", 3)], id="committed and not updated"),
        pytest.param(
            "pipeline:1f1b",
            4,
            [Fault(0, "instruction", 60), Fault(2, "collects")],
            id="during recovery",
            marks=pytest.mark.slow,
        ),
        pytest.param("pipeline:1f1b", 3, [Fault(1, "reads", 20)], id="an activation is sent and not read"),
        pytest.param(
            "hybrid:replicas=2", 4, [Fault(1, "instruction", 60)], id="a stage of a hybrid", marks=pytest.mark.slow
        ),
        pytest.param("hybrid:replicas=2", 4, [Fault(2, "adds", 3)], id="while replicas add their gradients"),
        pytest.param("ring", 3, [Fault(2, "meets", 2)], id="of a ring", marks=pytest.mark.slow),
        pytest.param("ps:bsp", 3, [Fault(2, "settles", 4)], id="a server"),
    ],
)
def test_a_lost_part_on_a_gpu_is_recovered(strategy: str, size: int, faults: list[Fault], kind: str) -> None:
    """With clipping. The survivors' parts and replicas are on their GPUs, which are newer than their arenas."""
    check_lost(strategy, size, faults, accelerator=kind, clip=0.5)


@pytest.mark.parametrize("kind", ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("strategy", ["pipeline:1f1b", "ps:bsp"])
def test_ranks_join_on_gpus(strategy: str, kind: str) -> None:
    """The memory of the old generation is unmapped, and that of the new one mapped, by all of them."""
    changes = {**EPOCH, "accelerator": kind}
    waits = Fault(0, "keeps", 4, waits=True)
    results = run_with_faults(2, settings(strategy, **changes), JOBS["normed"], [waits], 1)
    reference = "normed", tuple(changes.items())
    check(results, alone(*reference), 3, alone_losses(*reference))


@pytest.mark.parametrize("reduction", [pytest.param("mean", marks=pytest.mark.slow), "sum"])
def test_a_lost_part_is_recovered_with_a_custom_loss(reduction: str) -> None:
    """The reduction of the loss is detected once, with the initial weights."""
    job = dataclasses.replace(JOBS["normed"], loss=nn.CrossEntropyLoss(reduction=reduction))
    changes = {**EPOCH, "optimizer": "sgd", "lr": 0.001}
    (undisturbed,) = train("shm", 1, settings("data", **changes), job)
    results = run_with_faults(3, settings("pipeline:1f1b", **changes), job, [Fault(1, "instruction", 60)])
    check(results, tensors_in(checkpoint([undisturbed])), 2, undisturbed.losses)


def test_replicas_over_tcp_are_updated_from_gradients() -> None:
    """The holder of a replica cannot read its owner's memory over TCP, so it receives the gradients."""
    results = run_with_faults(
        3, settings("pipeline:1f1b", **EPOCH), JOBS["normed"], [Fault(1, "settles", 3)], scheme="tcp"
    )
    reference = "normed", tuple(EPOCH.items())
    check(results, alone(*reference), 2, alone_losses(*reference))


@pytest.mark.parametrize(
    ("strategy", "size", "faults"),
    [
        pytest.param("pipeline:1f1b", 4, [Fault(0, "instruction", 60), Fault(2, "collects")], id="during recovery"),
        pytest.param(
            "pipeline:gpipe",
            4,
            [Fault(3, "keeps", 2), Fault(0, "prepares"), Fault(1, "meets", 6)],
            id="one rank survives",
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
            "ps:bsp",
            4,
            [Fault(3, "keeps", 4), Fault(1, "collects")],
            id="a server and a worker",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_several_ranks_die(strategy: str, size: int, faults: list[Fault]) -> None:
    check_lost(strategy, size, faults)


@pytest.mark.parametrize("occurrence", [2, 5], ids=["of the state", "of a gradient"])
def test_a_rank_that_is_stopped_in_the_middle_of_a_copy_does_not_offer_it(occurrence: int) -> None:
    """The owner goes on alone, so that its bytes change, and dies. The holder continues its copy, and is alone."""
    faults = [Fault(1, "copies", occurrence, stops=True), Fault(0, "keeps", 6)]
    results = run_with_faults(2, settings("pipeline:1f1b", **EPOCH), JOBS["mlp"], faults)
    reference = "mlp", tuple(EPOCH.items())
    check(results, alone(*reference), 1, alone_losses(*reference))


@pytest.mark.parametrize("occurrence", [2, 5], ids=["of the state", "of a gradient"])
def test_a_rank_that_is_stopped_in_the_middle_of_a_copy_reads_nothing_of_a_restarted_owner(occurrence: int) -> None:
    """The owner is killed, and a new process on its arena writes other bytes before the holder continues its copy."""
    fault = Fault(1, "copies", occurrence, others=(0,), stops=True)
    results = run_with_faults(2, settings("pipeline:1f1b", **EPOCH), JOBS["mlp"], [fault])
    reference = "mlp", tuple(EPOCH.items())
    check(results, alone(*reference), 1, alone_losses(*reference))


def test_a_rank_that_is_stopped_in_the_middle_of_a_sum_on_a_gpu_does_not_offer_its_state() -> None:
    """The others go on, so that their rows change, and die. It has updated with what it read, and is alone."""
    faults = [Fault(1, "sums", 12, stops=True), Fault(0, "sums", 14), Fault(2, "evaluates")]
    with pytest.raises(AssertionError, match=r"TrainingStateLost: .*everything was lost"):
        run_with_faults(3, settings("data", **EPOCH, accelerator="emulated"), JOBS["mlp"], faults)


def test_versions_leave_an_arena_in_which_the_new_part_has_no_room_beside_them() -> None:
    """The memory is hardly more than the rank that remains needs for the whole model."""
    results = run_with_faults(
        2, settings("pipeline:1f1b", **EPOCH), JOBS["mlp"], [Fault(1, "keeps", 4)], memory=int(4.7 * 2**20)
    )
    reference = "mlp", tuple(EPOCH.items())
    check(results, alone(*reference), 1, alone_losses(*reference))


OWNER_AND_HOLDER = [
    pytest.param("pipeline:1f1b", 4, Fault(1, "keeps", 4, others=(2,)), id="before replication"),
    pytest.param(
        "pipeline:1f1b", 4, Fault(3, "settles", 3, others=(0,)), id="committed and not updated", marks=pytest.mark.slow
    ),
    pytest.param("hybrid:replicas=2", 4, Fault(0, "keeps", 3, others=(2,)), id="of a hybrid"),
    pytest.param(
        "hybrid:replicas=2", 4, Fault(3, "meets", 3, others=(1,)), id="of its other stage", marks=pytest.mark.slow
    ),
    pytest.param(
        "pipeline:zero-bubble", 3, Fault(0, "instruction", 60, others=(1,)), id="one is left", marks=pytest.mark.slow
    ),
    pytest.param("ring", 4, Fault(2, "keeps", 5, others=(3,)), id="of the ring", marks=pytest.mark.slow),
    pytest.param("ps:servers=2", 4, Fault(2, "keeps", 3, others=(3,)), id="both servers", marks=pytest.mark.slow),
    pytest.param("data:sharded", 4, Fault(1, "gathers", 3, others=(2,)), id="of a slice", marks=pytest.mark.slow),
]
"""A rank and the rank that holds its only replica if there is one replica of each part."""


@pytest.mark.parametrize(("strategy", "size", "fault"), OWNER_AND_HOLDER)
def test_with_two_replicas_an_owner_and_its_holder_die_at_once(strategy: str, size: int, fault: Fault) -> None:
    results = run_with_faults(size, settings(strategy, **EPOCH, replicas=2), JOBS["normed"], [fault])
    reference = "normed", tuple(EPOCH.items())
    check(results, alone(*reference), size - 2, alone_losses(*reference))


def test_a_rank_that_joins_learns_that_the_update_is_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings say ``auto``. It has set up the whole state; then it gets a slice, and then another rank is lost."""
    monkeypatch.setattr(engine_setup, "is_faster_sharded", lambda *_, **__: True)
    faults = [Fault(1, "keeps", 2, waits=True), Fault(0, "keeps", 6)]
    results = run_with_faults(2, settings("data", **EPOCH), JOBS["normed"], faults, joins=1)
    reference = "normed", tuple(EPOCH.items())
    check(results, alone(*reference), 2, alone_losses(*reference))
    slices = [len([name for name, low in one.state if name == "2.0.weight"]) for one in results.values()]
    assert all(slices), "each rank has a slice beside the whole weights"


def test_ranks_with_different_numbers_of_gradient_slots_finish_a_step_alike() -> None:
    """A rank that joined has set up alone. All ranks must decide alike whether they keep the shards that they have."""
    changes: dict[str, Any] = {**EPOCH, "balance": False, "shards": 13}
    faults = [Fault(1, "instruction", 20, waits=True), Fault(0, "instruction", 45)]
    results = run_with_faults(3, settings("data", **changes), JOBS["mlp"], faults, joins=1)
    reference = "mlp", tuple(changes.items())
    check(results, alone(*reference), 3, alone_losses(*reference))


def test_a_rank_that_joined_counts_the_batches_of_a_step_in_which_it_computes_nothing() -> None:
    """It has run no forward then. Batch norm's number of batches is a part of the state."""
    changes: dict[str, Any] = {**EPOCH, "shards": 13}
    faults = [Fault(1, "instruction", 20, waits=True), Fault(0, "instruction", 45)]
    results = run_with_faults(3, settings("data", **changes), JOBS["normed"], faults, joins=1)
    reference = "normed", tuple(changes.items())
    check(results, alone(*reference), 3, alone_losses(*reference))


def test_a_rank_without_shards_counts_the_batches_too() -> None:
    """It may be the only one that is left."""
    changes: dict[str, Any] = {**EPOCH, "shards": 2, "balance": False}
    results = run_with_faults(3, settings("data", **changes), JOBS["normed"], [Fault(0, "instruction", 30)])
    reference = "normed", tuple(changes.items())
    check(results, alone(*reference), 2, alone_losses(*reference))


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "size", "fault"), OWNER_AND_HOLDER)
def test_with_one_replica_the_same_losses_end_the_run(strategy: str, size: int, fault: Fault) -> None:
    with pytest.raises(AssertionError, match="was lost: there is no checkpoint yet"):
        run_with_faults(size, settings(strategy, **EPOCH), JOBS["normed"], [fault])


def test_two_replicas_over_tcp_are_updated_from_gradients() -> None:
    changes, fault = {**EPOCH, "replicas": 2}, Fault(0, "settles", 3, others=(2,))
    results = run_with_faults(4, settings("hybrid:replicas=2", **changes), JOBS["normed"], [fault], scheme="tcp")
    reference = "normed", tuple(EPOCH.items())
    check(results, alone(*reference), 2, alone_losses(*reference))


@pytest.mark.slow
def test_with_two_replicas_the_asynchronous_ring_rolls_back() -> None:
    job_settings = settings("ring:async", replicas=2)
    results = run_with_faults(4, job_settings, JOBS["flat"], [Fault(1, "instruction", 500, others=(2,))])
    first = train("shm", 4, job_settings.replaced({"max_steps": STEPS}), JOBS["flat"])
    rest = train("shm", 2, job_settings.replaced({"replicas": 1}), JOBS["flat"], resume=checkpoint(first))
    losses = [loss for run in (first, rest) for result in run for loss in result.losses]
    check(results, tensors_in(checkpoint(rest)), 2, losses)


def test_a_lost_machine_is_recovered() -> None:
    """Two neighbouring ranks die at once: their replicas are on the other host."""
    job_settings, faults = settings("pipeline:1f1b", **EPOCH), [Fault(1, "keeps", 3, others=(0,))]
    results = run_with_faults(4, job_settings, JOBS["normed"], faults, hosts="aabb")
    reference = "normed", tuple(EPOCH.items())
    check(results, alone(*reference), 2, alone_losses(*reference))


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
    ("data:sharded", 3),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "size", "rank", "place", "occurrence"),
    [
        pytest.param(strategy, size, rank, place, occurrence, id=f"{strategy} {rank} {place} {occurrence}")
        for (strategy, size), (place, occurrence) in product(SYNCHRONOUS, PLACES)
        for rank in range(size)
    ],
)
def test_any_rank_dies_at_any_place(strategy: str, size: int, rank: int, place: str, occurrence: int) -> None:
    check_lost(strategy, size, [Fault(rank, place, occurrence)])


@pytest.mark.parametrize(
    ("strategy", "size", "faults", "joins"),
    [
        pytest.param("pipeline:1f1b", 2, [Fault(0, "keeps", 4, waits=True)], 1, id="another stage"),
        pytest.param(
            "pipeline:1f1b",
            4,
            [Fault(1, "keeps", 3, waits=True), Fault(2, "instruction", 150)],
            1,
            id="a spare rank gets a stage",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "pipeline:1f1b", 1, [Fault(0, "keeps", 4, waits=True)], 1, id="from one rank", marks=pytest.mark.slow
        ),
        pytest.param(
            "hybrid:replicas=2", 2, [Fault(0, "keeps", 4, waits=True)], 2, id="two at once", marks=pytest.mark.slow
        ),
        pytest.param("ps:bsp", 2, [Fault(1, "keeps", 4, waits=True)], 1, id="another worker", marks=pytest.mark.slow),
        pytest.param("ring", 2, [Fault(0, "instruction", 40, waits=True)], 1, id="in the ring", marks=pytest.mark.slow),
        pytest.param("data:sharded", 2, [Fault(1, "keeps", 4, waits=True)], 1, id="smaller slices"),
    ],
)
def test_ranks_join(strategy: str, size: int, faults: list[Fault], joins: int) -> None:
    """With gradient clipping: the ranks that hold a stage must agree on the norm, the others take no part."""
    changes = {**EPOCH, "clip": 0.5}
    results = run_with_faults(size, settings(strategy, **changes), JOBS["normed"], faults, joins)
    deaths = sum(not fault.waits for fault in faults)
    reference = "normed", tuple(changes.items())
    check(results, alone(*reference), size + joins - deaths, alone_losses(*reference))


@pytest.mark.parametrize(
    "kind",
    ["cpu", pytest.param("emulated", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_the_asynchronous_ring_rolls_back_to_its_last_synchronization(kind: str) -> None:
    """Steps since the last synchronization are rolled back and repeated by the survivors: none is applied twice."""
    job_settings = settings("ring:async", accelerator=kind)
    results = run_with_faults(3, job_settings, JOBS["flat"], [Fault(1, "instruction", 500)])
    first = train("shm", 3, job_settings.replaced({"max_steps": STEPS}), JOBS["flat"])
    rest = train("shm", 2, job_settings, JOBS["flat"], resume=checkpoint(first))
    losses = [loss for run in (first, rest) for result in run for loss in result.losses]
    recovered = [event["step"] for result in results.values() for event in result.outcome.of("recovered")]
    assert recovered == [STEPS]
    check(results, tensors_in(checkpoint(rest)), 2, losses)


@pytest.mark.parametrize("mode", ["asp", pytest.param("ssp", id="ssp", marks=pytest.mark.slow)])
def test_an_asynchronous_server_rolls_back_a_lost_workers_span(mode: str) -> None:
    """With one worker left the pushes are ordered: the result equals that of a run with one worker from the start."""
    job_settings = settings(f"ps:{mode}", **EPOCH)
    results = run_with_faults(3, job_settings, JOBS["normed"], [Fault(1, "instruction", 40)])
    reference = train("shm", 2, job_settings, JOBS["normed"])
    check(results, tensors_in(checkpoint(reference)), 2, [loss for outcome in reference for loss in outcome.losses])


@pytest.mark.parametrize(
    ("strategy", "size", "faults", "changes", "message"),
    [
        pytest.param(
            "pipeline:1f1b",
            4,
            [Fault(1, "keeps", 10, others=(2,))],
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
            id="no replicas",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ps:bsp",
            2,
            [Fault(0, "instruction", 20)],
            {},
            "cannot go on with 1 of its devices: .*take 2 or more, or strategy data; there is no checkpoint yet",
            id="too few devices",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_error_names_the_state_that_cannot_be_recovered(
    strategy: str, size: int, faults: list[Fault], changes: dict[str, object], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        run_with_faults(size, settings(strategy, **changes), JOBS["normed"], faults)


def test_the_memory_check_counts_replicas() -> None:
    """Beside its own part a device holds a replica of its neighbour's part and the gradient that updates it."""
    strategy = parse("pipeline:1f1b")
    plan, blocks = strategy.plan(3, 4), [Block(str(index), 1.0, 100, 200) for index in range(3)]
    fitted = fit(strategy, plan, blocks, [None] * 3)
    capacity = [needed + 300 + 100 for needed in fitted.bytes]
    check_memory(plan, fitted, blocks, capacity)
    capacity[1] -= 1
    with pytest.raises(FailedPrecondition, match=r"rank 1 needs 400 B, and 400 B for replicas .*--no-replicate"):
        check_memory(plan, fitted, blocks, capacity)


def test_the_memory_check_counts_every_replica() -> None:
    """Two replicas are twice the bytes; a hybrid keeps only those that its pipelines lack, each once."""
    blocks = [Block(str(index), 1.0, 100, 200) for index in range(4)]
    copies = {}
    for spec, replicas in product(["pipeline:1f1b", "hybrid:replicas=2"], [1, 2, 3]):
        strategy = parse(spec)
        plan = strategy.plan(4, 4)
        fitted = fit(strategy, plan, blocks, [None] * 4)
        copies[spec, replicas] = copies_bytes(plan, fitted, blocks, replicas=replicas)
        check_memory(
            plan,
            fitted,
            blocks,
            [sum(one) for one in zip(fitted.bytes, copies[spec, replicas], strict=True)],
            replicas=replicas,
        )
    assert copies == {
        ("pipeline:1f1b", 1): [400] * 4,
        ("pipeline:1f1b", 2): [800] * 4,
        ("pipeline:1f1b", 3): [1200] * 4,
        ("hybrid:replicas=2", 1): [0] * 4,
        ("hybrid:replicas=2", 2): [0, 800, 800, 0],
        ("hybrid:replicas=2", 3): [800] * 4,
    }
    strategy = parse("pipeline:1f1b")
    plan = strategy.plan(4, 4)
    fitted = fit(strategy, plan, blocks, [None] * 4)
    with pytest.raises(FailedPrecondition, match=r"and 800 B for replicas .*With --replicas 1 a device needs less"):
        check_memory(plan, fitted, blocks, [needed + 400 for needed in fitted.bytes], replicas=2)


def test_the_memory_check_counts_a_slice_of_the_optimizer_state_and_its_replica() -> None:
    """Four blocks of 100 B of weights and 200 B of moments: whole weights and gradient, and a quarter of the rest."""
    strategy, blocks = parse("data:sharded"), [Block(str(index), 1.0, 100, 200) for index in range(4)]
    plan = strategy.plan(4, 4)
    fitted = fit(strategy, plan, blocks, [None] * 4)
    assert fitted.bytes == [400 + 400 + 100 + 200] * 4
    assert copies_bytes(plan, fitted, blocks) == [100 + 200 + 100] * 4
    whole = parse("data")
    assert fit(whole, whole.plan(4, 4), blocks, [None] * 4).bytes == [400 + 400 + 800] * 4


@pytest.mark.parametrize(("spec", "own"), [("pipeline:1f1b", 300), ("hybrid:replicas=2", 600)])
def test_the_memory_check_counts_the_copies_of_a_device_that_keeps_its_memory(spec: str, own: int) -> None:
    """A device with ``--arena`` has its own state of the last two steps there, with any strategy."""
    strategy, blocks = parse(spec), [Block(str(index), 1.0, 100, 200) for index in range(4)]
    plan = strategy.plan(4, 4)
    fitted = fit(strategy, plan, blocks, [None] * 4)
    volatile, kept = (copies_bytes(plan, fitted, blocks, persistent_memory=persistent) for persistent in (False, True))
    assert [more - less for more, less in zip(kept, volatile, strict=True)] == [2 * own] * 4
