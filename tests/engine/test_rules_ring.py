"""RingTMP on forked processes: each device decides by itself, and the results are bit-identical to a reference."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from forked_ranks import Outcome, checkpoint, differing, tensors_in, train
from short_jobs import JOBS, SAMPLES, STEPS, alone, mnist
from small_jobs import BATCH, SHARDS, flat, settings
from torch import Tensor

from hoop.data.sampler import SampleOrder
from hoop.plan.instructions import Instruction, InstructionKind

pytestmark = pytest.mark.slow_if(
    when=lambda params: params.get("scheme") == "tcp" or params.get("job") == "normed"
)  # shm and mlp are there


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("job", "spec", "devices"),
    [
        ("mlp", "ring", 2),
        ("mlp", "ring", 3),
        ("flat", "ring:limit=1", 4),
        ("flat", "ring:slices=2", 2),
        ("normed", "ring", 2),
        ("normed", "ring:slices=2", 2),
        ("normed", "ring", 4),
    ],
)
def test_a_synchronous_ring_trains_like_one_device(scheme: str, job: str, spec: str, devices: int) -> None:
    outcomes = train(scheme, devices, settings(spec), JOBS[job])
    assert differing(alone(job), tensors_in(checkpoint(outcomes))) == []
    assert all(one.account["done"] == 2 * STEPS for one in outcomes)
    with_losses = [one for one in outcomes if one.losses]
    assert len(with_losses) == 1
    assert len(with_losses[0].losses) == 2 * STEPS


def test_a_synchronous_ring_clips_like_one_device() -> None:
    outcomes = train("tcp", 3, settings("ring", clip=0.05), JOBS["mlp"])
    assert differing(alone("mlp", (("clip", 0.05),)), tensors_in(checkpoint(outcomes))) == []
    assert differing(alone("mlp"), tensors_in(checkpoint(outcomes))), "no gradient was clipped"


def test_an_asynchronous_ring_refuses_to_clip() -> None:
    with pytest.raises(AssertionError, match=r"InvalidArgument: clip: 0.5 needs the norm over all stages.*ring:sync"):
        train("shm", 2, settings("ring:async", clip=0.5), JOBS["mlp"])


@lru_cache
def asynchronous_on_one_device(job: str) -> dict[str, Tensor]:
    return tensors_in(checkpoint(train("shm", 1, settings("ring:async"), JOBS[job])))


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("job", "spec", "devices"),
    [
        ("mlp", "ring:async", 2),
        ("mlp", "ring:async", 3),
        ("flat", "ring:async,slices=2", 2),
        ("normed", "ring:async", 2),
        ("normed", "ring:async", 4),
        ("normed", "ring:async,slices=2", 2),
    ],
)
def test_an_asynchronous_ring_does_not_depend_on_timing(scheme: str, job: str, spec: str, devices: int) -> None:
    """On all numbers of devices and transports, the bits are those of one device with weights one update old."""
    outcomes = train(scheme, devices, settings(spec), JOBS[job])
    found = tensors_in(checkpoint(outcomes))
    assert differing(asynchronous_on_one_device(job), found) == []
    assert differing(alone(job), found), "weights were never stale"
    (losses,) = [one.losses for one in outcomes if one.losses]
    assert sum(losses[-STEPS:]) < sum(losses[:STEPS])
    counters = [one for name, one in found.items() if name.endswith("num_batches_tracked")]
    assert all(int(one) == 2 * STEPS for one in counters)


def test_an_asynchronous_ring_is_sgd_with_weights_one_update_old() -> None:
    """W(k+1) = W(k) - lr · gradient at W(k-1), in plain PyTorch; a span begins with current weights."""
    rate = 0.1
    job_settings = settings("ring:async", optimizer="sgd", lr=rate, epochs=1)
    found = tensors_in(checkpoint(train("shm", 2, job_settings, JOBS["flat"])))
    model, data, order = flat(0), mnist().train, SampleOrder(0, SAMPLES)
    before = [one.detach().clone() for one in model.parameters()]
    for step in range(STEPS):
        newest = [one.detach().clone() for one in model.parameters()]
        with torch.no_grad():
            for one, old in zip(model.parameters(), before, strict=True):
                one.copy_(old)
        inputs, targets = data.batch(order.indices(0, step, BATCH), epoch=0, seed=0)
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for one, new, gradient in zip(model.parameters(), newest, gradients, strict=True):
                one.copy_(new - rate * gradient)
        before = newest
    for name, one in model.named_parameters():
        assert torch.allclose(found[name], one, atol=1e-5), name


def steps_of(outcome: Outcome) -> list[tuple[InstructionKind, int, int]]:
    """(kind, stage, step in its span) of each forward, backward and update of a rank."""
    found: list[tuple[InstructionKind, int, int]] = []
    for text in outcome.executed:
        one = Instruction.parse(text)
        if one.kind in (InstructionKind.FORWARD, InstructionKind.BACKWARD, InstructionKind.UPDATE):
            found.append((one.kind, one.stage, one.micro // SHARDS))
    return found


@pytest.mark.parametrize("spec", ["ring:async", "ring:async,slices=2"])
def test_weights_are_at_most_one_update_old_and_steps_overlap(spec: str) -> None:
    slow = settings(spec, epochs=1, slowdown=[1.0, 10.0])  # rank 0 is fast enough to start the next step early
    outcomes = train("shm", 2, slow, JOBS["flat"])
    overlaps = 0
    for one in outcomes:
        updates: dict[int, int] = {}
        for kind, stage, step in steps_of(one):
            if kind is InstructionKind.UPDATE:
                updates[stage] = updates.get(stage, 0) + 1
            else:
                updates_done = updates.get(stage, 0)
                assert updates_done in (step, step - 1), f"stage {stage}, step {step}, after {updates_done} updates"
                overlaps += kind is InstructionKind.FORWARD and updates_done < step
    assert overlaps, "every step waited for the previous one"


@pytest.mark.parametrize(("spec", "devices"), [("ring", 3), ("ring:async", 3)])
def test_every_sample_is_used_once_per_epoch(spec: str, devices: int) -> None:
    outcomes = train("tcp", devices, settings(spec), JOBS["mlp"])
    for rank in (0, devices - 1):  # the first rank reads inputs, the last one targets
        seen = outcomes[rank].more["seen"]
        assert sorted(seen) == ["0", "1"]
        for epoch in seen:
            assert sorted(seen[epoch]) == list(range(SAMPLES)), f"rank {rank}, epoch {epoch}"
    assert not any(outcomes[rank].more["seen"] for rank in range(1, devices - 1))


@pytest.mark.parametrize("spec", ["ring", pytest.param("ring:async", marks=pytest.mark.slow)])
def test_a_ring_resumes_from_a_checkpoint_with_the_same_bits(spec: str) -> None:
    outcomes = train("shm", 2, settings(spec), JOBS["normed"])
    middle, end = checkpoint(outcomes, 0), checkpoint(outcomes)
    resumed = train("shm", 2, settings(spec), JOBS["normed"], resume=middle)
    assert differing(tensors_in(end), tensors_in(checkpoint(resumed))) == []
    assert all(one.account["done"] == 2 * STEPS for one in resumed)


@pytest.mark.parametrize(("spec", "steps"), [("ring", 3), ("ring:async", 32)])
def test_all_ranks_stop_at_the_same_step(spec: str, steps: int) -> None:
    """An asynchronous ring stops at the end of a span: 33 steps per epoch, spans of 32."""
    stop_at = 4 if spec == "ring" else 0
    outcomes = train("shm", 2, settings(spec, batch_size=4, shards=2), JOBS["mlp"], stop_at=stop_at)
    assert [one.account["done"] for one in outcomes] == [steps] * 2
    assert all(one.account["stopped"] for one in outcomes)


def test_waiting_counts_as_idle_and_receiving_as_communication() -> None:
    for one in train("shm", 2, settings("ring"), JOBS["mlp"]):
        account = one.account
        spans = account["spans"]
        waited = sum(seconds for _, category, _, seconds in spans if category == "wait")
        received = [name for name, category, _, _ in spans if category == "recv"]
        assert len(received) == 2 * STEPS * SHARDS
        assert account["shares"]["idle"] == pytest.approx(waited)
        assert account["shares"]["communicate"] > 0
        assert sum(account["shares"].values()) <= account["seconds"]
