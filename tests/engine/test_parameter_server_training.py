"""Parameter servers on forked processes: BSP gives the bits of data parallel; ASP and SSP keep their bounds."""

from __future__ import annotations

import re

import pytest
import torch
from forked_ranks import Outcome, checkpoint, differing, tensors_in, train
from short_jobs import JOBS, SAMPLES, STEPS, alone
from small_jobs import settings
from torch import nn

from hoop.collectives.shard_tree import merge_plan
from hoop.config import parse_size
from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.engine.gradient_slots import gradient_memory_for
from hoop.engine.job import Job, blocks_of
from hoop.engine.stage.state import StateLayout
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.partition import Block
from hoop.strategies.catalog import parse
from hoop.strategies.memory_fit import fit

pytestmark = pytest.mark.slow_if(
    when=lambda params: (
        params.get("scheme") == "tcp"
        or params.get("job") == "normed"
        or (params.get("job"), params.get("devices")) == ("mlp", 2)
    )
)  # shm, mlp and several workers are there


def workers_of(outcomes: list[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.more["weights"]]


def servers_of(outcomes: list[Outcome]) -> list[Outcome]:
    return [one for one in outcomes if one.more["slices"]]


def check_agreement(outcomes: list[Outcome], servers: int) -> None:
    """The concatenated slices of the servers equal the weights of every worker."""
    with_slices = servers_of(outcomes)
    assert len(with_slices) == servers
    whole = "".join(one.more["slices"][0] for one in with_slices)
    for one in workers_of(outcomes):
        assert one.more["weights"]["0"] == whole


def check_samples(outcomes: list[Outcome]) -> None:
    """The workers together read every sample exactly once per epoch; servers read none."""
    assert not any(one.more["seen"] for one in servers_of(outcomes))
    for epoch in ("0", "1"):
        used = [sample for one in workers_of(outcomes) for sample in one.more["seen"].get(epoch, [])]
        assert sorted(used) == list(range(SAMPLES)), f"epoch {epoch}"


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("job", "servers", "devices"),
    [("mlp", 1, 2), ("mlp", 1, 4), ("mlp", 3, 4), ("normed", 1, 3), ("normed", 2, 4)],
)
def test_bsp_trains_like_one_device(scheme: str, job: str, servers: int, devices: int) -> None:
    outcomes = train(scheme, devices, settings(f"ps:servers={servers}"), JOBS[job])
    assert differing(alone(job), tensors_in(checkpoint(outcomes))) == []
    check_agreement(outcomes, servers)
    check_samples(outcomes)
    with_losses = [one for one in outcomes if one.losses]
    assert with_losses == [outcomes[-1]], "only the last server reports losses"
    assert len(with_losses[0].losses) == 2 * STEPS
    assert len(with_losses[0].of("evaluated")) == 2


@pytest.mark.slow_if(when=lambda params: params["shards"] != 3)
@pytest.mark.parametrize(("shards", "nodes"), [(7, [1, 1, 1, 1]), (9, [2, 2, 2, 2]), (3, [1, 1, 1, 0])])
def test_bsp_with_uneven_and_empty_shares(shards: int, nodes: list[int]) -> None:
    plan = parse("ps").plan(5, shards)
    assert [len(merge_plan(plan.computed_by(rank, 0), shards).nodes) for rank in range(4)] == nodes
    outcomes = train("shm", 5, settings("ps", shards=shards, epochs=1), JOBS["normed"])
    expected = alone("normed", (("shards", shards), ("epochs", 1)))
    assert differing(expected, tensors_in(checkpoint(outcomes))) == []
    check_agreement(outcomes, 1)


def test_more_servers_than_slices_of_weights() -> None:
    """64 elements for 3 servers: one has all of them, one has none, one has only the losses."""
    outcomes = train("shm", 4, settings("ps:servers=3"), JOBS["tiny"])
    assert [len(one.more["slices"][0]) // 8 for one in outcomes[1:]] == [
        64,
        1,
        1,
    ]  # an empty vector has one element
    assert differing(alone("tiny"), tensors_in(checkpoint(outcomes))) == []
    assert len(outcomes[-1].losses) == 2 * STEPS


def test_one_server_clips_like_one_device_and_several_refuse_to_clip() -> None:
    outcomes = train("shm", 3, settings("ps", clip=0.05), JOBS["mlp"])
    assert differing(alone("mlp", (("clip", 0.05),)), tensors_in(checkpoint(outcomes))) == []
    with pytest.raises(AssertionError, match=r"InvalidArgument: clip: 0.05 needs the norm.*2 parameter servers"):
        train("shm", 3, settings("ps:servers=2", clip=0.05), JOBS["mlp"])


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("job", "spec", "servers", "devices"),
    [
        ("mlp", "ps:asp", 1, 3),
        ("mlp", "ps:asp,servers=2", 2, 4),
        ("normed", "ps:asp", 1, 4),
        ("mlp", "ps:ssp,staleness=1", 1, 4),
        ("normed", "ps:ssp,staleness=0,servers=2", 2, 4),
    ],
)
def test_every_push_is_an_update(scheme: str, job: str, spec: str, servers: int, devices: int) -> None:
    outcomes = train(scheme, devices, settings(spec), JOBS[job])
    check_agreement(outcomes, servers)
    check_samples(outcomes)
    losses = outcomes[-1].losses
    assert len(losses) == 2 * STEPS
    assert sum(losses[-STEPS:]) < sum(losses[:STEPS])
    for one in servers_of(outcomes):
        kinds = [Instruction.parse(text).kind for text in one.executed]
        assert (
            kinds.count(InstructionKind.UPDATE) == kinds.count(InstructionKind.TAKE) == 2 * STEPS * (devices - servers)
        )
    found = tensors_in(checkpoint(outcomes))
    assert all(int(one) == 2 * STEPS for name, one in found.items() if name.endswith("num_batches_tracked"))
    assert set(found) == set(alone(job)), "all weights and all optimizer state"


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_worker_gets_weights_beyond_the_staleness_bound(staleness: int) -> None:
    """In the trace of the server: at each GIVE, how many more steps that worker has pushed than the slowest one."""
    outcomes = train("tcp", 4, settings(f"ps:ssp,staleness={staleness}", epochs=1, batch_size=10), JOBS["mlp"])
    clocks = dict.fromkeys(range(3), 0)
    gives = 0
    for text in outcomes[3].executed:
        one = Instruction.parse(text)
        if one.kind is InstructionKind.TAKE:
            clocks[one.peer] += 1
        elif one.kind is InstructionKind.GIVE:
            gives += 1
            assert clocks[one.peer] - min(clocks.values()) <= staleness, f"{text} at {clocks}"
    steps = -(-SAMPLES // 10)
    assert gives == 3 * steps
    assert set(clocks.values()) == {steps}


# ---- checkpoints


@pytest.mark.slow
def test_bsp_resumes_from_a_checkpoint_with_the_same_bits() -> None:
    """From its own checkpoint, from one of data parallel, and data parallel from a checkpoint of BSP."""
    outcomes = train("shm", 4, settings("ps:servers=2"), JOBS["normed"])
    middle, end = checkpoint(outcomes, 0), tensors_in(checkpoint(outcomes))
    for spec, devices in (("ps:servers=2", 4), ("ps:servers=1", 3), ("data", 2)):
        resumed = train("shm", devices, settings(spec), JOBS["normed"], resume=middle)
        assert differing(end, tensors_in(checkpoint(resumed))) == [], spec
    data = train("shm", 2, settings("data"), JOBS["normed"])
    resumed = train("shm", 4, settings("ps:servers=3"), JOBS["normed"], resume=checkpoint(data, 0))
    assert differing(end, tensors_in(checkpoint(resumed))) == []


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["ps:asp", "ps:ssp,servers=2"])
def test_asynchronous_servers_resume_from_a_checkpoint(spec: str) -> None:
    outcomes = train("shm", 4, settings(spec), JOBS["normed"])
    end = checkpoint(outcomes)
    again = train("shm", 4, settings(spec), JOBS["normed"], resume=end)  # no steps are left
    assert differing(tensors_in(end), tensors_in(checkpoint(again))) == []
    resumed = train("shm", 4, settings(spec), JOBS["normed"], resume=checkpoint(outcomes, 0))
    assert len(resumed[-1].losses) == STEPS
    assert sum(resumed[-1].losses) < sum(outcomes[-1].losses[:STEPS])


@pytest.mark.parametrize(("spec", "steps"), [("ps", 3), ("ps:asp", 32)])
def test_all_ranks_stop_at_the_same_step(spec: str, steps: int) -> None:
    stop_at = 4 if spec == "ps" else 0
    outcomes = train("shm", 3, settings(spec, batch_size=4, shards=2), JOBS["mlp"], stop_at=stop_at)
    assert [one.account["done"] for one in outcomes] == [steps] * 3
    assert all(one.account["stopped"] for one in outcomes)
    check_agreement(outcomes, 1)


# ---- memory


@pytest.mark.parametrize(
    ("spec", "devices"),
    [
        ("ps", 3),
        ("ps:servers=2", 4),
        ("ps:asp,servers=2", 4),
        ("data", 2),
        ("data:sharded", 3),
        ("ring", 3),
        ("ring:async", 3),
        ("ring:async,slices=2", 2),
    ],
)
def test_the_memory_check_counts_what_is_allocated(spec: str, devices: int) -> None:
    """It never counts less, and more only by the padding, tail and provenance of each block."""
    job, job_settings = JOBS["flat"], settings(spec, epochs=1, max_steps=1, cut=cut_for(spec, devices))
    outcomes = train("shm", devices, job_settings, job)
    strategy = parse(spec)
    plan = strategy.plan(devices, job_settings.num_microbatches)
    blocks = []
    for index, block in enumerate(blocks_of(job.model(0))):
        layout = StateLayout([block], job_settings.num_microbatches)
        state = 4 * job_settings.optimizer.num_moments * layout.trained
        blocks.append(Block(str(index), 1.0, 4 * layout.state, state, gradient_bytes=4 * layout.total))
    gradient_memory = gradient_memory_for(job_settings.balance)
    counted = fit(
        strategy, plan, blocks, [None] * devices, cuts=job_settings.cut or None, gradient_buffers=gradient_memory
    ).bytes
    gradients = max(gradient_memory(strategy, plan))
    spare = 4 * 192 * len(blocks) * (2 + job_settings.optimizer.num_moments + gradients)
    for rank, one in enumerate(outcomes):
        # each vector is aligned to 64 bytes, and an empty one has a few bytes
        allocated = one.more["allocated"] - 64 * len(one.more["sizes"])
        assert allocated <= counted[rank] <= one.more["allocated"] + spare, f"rank {rank}"


@pytest.mark.parametrize("spec", ["data", "data:sharded", "ps", "ring"])
def test_the_memory_that_an_error_advises_is_enough(spec: str) -> None:
    """For the whole run: two snapshots of the weights are in it."""
    data = TensorData(torch.randn(16, 8), torch.randint(4, (16,)))
    job = Job(
        lambda seed: nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 4)),
        lambda: Splits(data, data),
    )
    job_settings = settings(spec, epochs=3, batch_size=8, shards=2, seed=0)
    with pytest.raises(AssertionError, match="FailedPrecondition: memory: ") as caught:
        train("shm", 2, job_settings, job, memory=1 << 20)
    advised = re.search(r"are enough: --memory (\w+)", str(caught.value))
    assert advised is not None, caught.value
    outcomes = train("shm", 2, job_settings, job, memory=parse_size(advised[1]))
    assert [one.account["done"] for one in outcomes] == [6, 6]


def cut_for(spec: str, devices: int) -> tuple[int, ...]:
    stages = parse(spec).stages(devices)
    return tuple(range(1, stages))


@pytest.mark.parametrize("spec", ["ps", "ps:asp"])
def test_workers_hold_no_optimizer_state_and_servers_only_their_slice(spec: str) -> None:
    outcomes = train("shm", 3, settings(spec, epochs=1, max_steps=1), JOBS["mlp"])
    weights = len(outcomes[0].more["weights"]["0"]) // 2
    for one in workers_of(outcomes):
        large = {name for name, size in one.more["sizes"].items() if size >= weights}
        assert {name.split(".", 1)[1] for name in large if "snapshot" not in name} == {
            "stage0.weights",
            "stage0.slots",
        }
    (server,) = servers_of(outcomes)
    assert {name.split(".", 1)[1] for name in server.more["sizes"] if "snapshot" not in name} == {
        "slice.weights",
        "slice.moment0",
        "slice.moment1",
        "slice.gradients",
    }
