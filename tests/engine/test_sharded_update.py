"""Data parallel with a sharded update, on forked processes: the bits of one device, and 1/N of the optimizer state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forked_ranks import Outcome, checkpoint, differing, tensors_in, train
from short_jobs import JOBS, SAMPLES, STEPS, alone
from small_jobs import settings
from torch import nn

from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.engine import setup as engine_setup
from hoop.engine.job import Job
from hoop.engine.settings import Settings
from hoop.engine.update_choice import UpdateCosts, saved_seconds
from hoop.errors import InvalidArgument

ON = {"sharded_update": "on"}


def is_sharded(outcomes: list[Outcome]) -> bool:
    """Whether each rank has the moments of its slice, and none of the whole model."""
    (found,) = {
        ("test.stage0.slice.moment0" in one.more["sizes"], "test.stage0.moment0" in one.more["sizes"])
        for one in outcomes
    }
    assert found in ((True, False), (False, True))
    return found[0]


def check_like_one_device(outcomes: list[Outcome], job: str, **changes: Any) -> None:
    assert differing(alone(job, tuple(changes.items())), tensors_in(checkpoint(outcomes))) == []
    assert len({one.more["weights"]["0"] for one in outcomes}) == 1, "all ranks have gathered all weights"


@pytest.mark.parametrize(
    ("scheme", "devices", "job", "changes"),
    [
        pytest.param("shm", 1, "normed", {}, id="one device"),
        pytest.param("shm", 2, "normed", {"epochs": 1}, id="batch norm and counters"),
        pytest.param(
            "shm", 3, "mlp", {"epochs": 1, "optimizer": "adamw", "weight_decay": 0.1, "clip": 0.05}, id="clip"
        ),
        pytest.param("shm", 5, "convolved", {"epochs": 1, "optimizer": "sgd", "momentum": 0.9}, id="momentum"),
        pytest.param("tcp", 3, "normed", {"epochs": 1, "clip": 0.05}, id="over TCP"),
        pytest.param("tcp", 5, "tiny", {"epochs": 1, "shards": 3}, id="more devices than 64 elements and than shards"),
        pytest.param("shm", 2, "flat", {"epochs": 1, "optimizer": "sgd"}, id="no moments"),
    ],
)
def test_it_trains_like_one_device(scheme: str, devices: int, job: str, changes: dict[str, Any]) -> None:
    outcomes = train(scheme, devices, settings("data", **ON, **changes), JOBS[job])
    check_like_one_device(outcomes, job, **changes)
    epochs = changes.get("epochs", 2)
    (losses,) = [one.losses for one in outcomes if one.losses]
    assert len(losses) == epochs * STEPS
    used = [sample for one in outcomes for sample in one.more["seen"].get("0", [])]
    assert sorted(used) == list(range(SAMPLES))


def test_a_rank_has_the_moments_of_its_slice_only() -> None:
    outcomes = train("shm", 3, settings("data", **ON, max_steps=1), JOBS["mlp"])
    assert is_sharded(outcomes)
    elements = len(outcomes[0].more["weights"]["0"]) // 8
    for name in ("moment0", "moment1"):
        sizes = [one.more["sizes"][f"test.stage0.slice.{name}"] // 4 for one in outcomes]
        assert sum(sizes) == elements
        assert max(sizes) - min(sizes) <= 64
    totals = [one.more["sizes"]["test.stage0.slice.total"] // 4 for one in outcomes]
    assert all(elements / 3 <= total <= elements / 3 + 256 for total in totals)


def test_the_gather_of_the_weights_has_a_name_of_its_own_in_the_trace() -> None:
    """One sum a step, and a gather of what it updated before the next step, or before the evaluation at the end."""
    for outcome in train("shm", 2, settings("data", **ON, max_steps=3), JOBS["mlp"]):
        categories = [(name, category) for name, category, _, _ in outcome.account["spans"]]
        assert categories.count(("0A", "reduce")) == 3
        assert categories.count(("0C", "gather")) == 3
        measured = sum(seconds for *_, category, _, seconds in outcome.account["spans"] if category == "gather")
        assert 0 < measured <= outcome.account["shares"]["communicate"]


def test_resuming_with_and_without_it_gives_the_same_bits() -> None:
    """On 3 devices with it, on 2 without, on 2 with it, from the checkpoints of each other."""
    changes = {"epochs": 3, "max_steps": 0}
    first = train(
        "shm",
        3,
        settings(
            "data",
            **ON,
            **changes,
        ),
        JOBS["normed"],
    )
    off = train(
        "shm", 2, settings("data", sharded_update="off", **changes), JOBS["normed"], resume=checkpoint(first, 0)
    )
    assert not is_sharded(off)
    again = train("shm", 2, settings("data", **ON, **changes), JOBS["normed"], resume=checkpoint(off, 0))
    assert is_sharded(again)
    for outcomes in (first, off, again):
        check_like_one_device(outcomes, "normed", **changes)


def test_shards_move_to_the_faster_device() -> None:
    changes = {"epochs": 1, "batch_size": 8, "shards": 8}
    slow = 30.0  # it sleeps for longer than a busy machine may keep the other rank from its core
    outcomes = train("shm", 2, settings("data", **ON, **changes, slowdown=[1.0, slow]), JOBS["mlp"])
    (balanced, *_) = [event for one in outcomes for event in one.of("balanced")]
    assert balanced["shards"][0] > balanced["shards"][1]
    assert is_sharded(outcomes)
    check_like_one_device(outcomes, "mlp", **changes)


def test_all_ranks_stop_at_the_same_step() -> None:
    outcomes = train("shm", 3, settings("data", **ON), JOBS["mlp"], stop_at=3)
    assert [one.account["done"] for one in outcomes] == [2] * 3
    assert all(one.account["stopped"] for one in outcomes)


# ---- auto


def test_the_choice_follows_measured_costs() -> None:
    """1 - (1 + replicas) / N of the update is saved; the agreement, the copies and the lost overlap cost time."""
    costs = UpdateCosts(update=1.0, agree=0.05, copy=0.2, keep=0.0, add=0.1)
    assert saved_seconds(costs, devices=4, replicas=0, overlaps=False) == pytest.approx(0.75 - 0.05)
    assert saved_seconds(costs, devices=4, replicas=1, overlaps=False) == pytest.approx(0.5 - 0.05 - 0.05)
    assert saved_seconds(costs, devices=4, replicas=1, overlaps=True) == pytest.approx(0.5 - 0.05 - 0.05 - 0.1)
    assert saved_seconds(costs, devices=2, replicas=1, overlaps=False) < 0


def large_job() -> Job:
    data = TensorData(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 4)
    return Job(
        lambda seed: nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512), nn.Linear(512, 4)),
        lambda: Splits(data, data),
    )


def test_auto_shards_the_update_where_only_then_the_state_fits() -> None:
    """A small model is not sharded, because that is not faster; where memory is short, it is."""
    job_settings = settings("data", epochs=1, batch_size=16, shards=4, balance=False)
    plenty = train("shm", 4, job_settings, large_job())
    assert not is_sharded(plenty)
    little = train("shm", 4, job_settings, large_job(), memory=8 << 20)
    assert is_sharded(little)
    assert differing(tensors_in(checkpoint(plenty)), tensors_in(checkpoint(little))) == []
    with pytest.raises(AssertionError, match="FailedPrecondition: memory: rank 0 needs"):
        train("shm", 4, job_settings.replaced({"sharded_update": "off"}), large_job(), memory=8 << 20)


def test_auto_shards_the_update_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_setup, "is_faster_sharded", lambda *_, **__: True)
    outcomes = train("shm", 2, settings("data", epochs=1), JOBS["normed"])
    assert is_sharded(outcomes)
    check_like_one_device(outcomes, "normed", epochs=1)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sharded_update": "yes"}, "sharded_update: 'yes' is unknown; known: auto, on, off"),
        ({**ON, "strategy": "pipeline:1f1b"}, "sharded_update: 'on' is for data parallel .* is pipeline:1f1b; use "),
        (
            {"sharded_update": "off", "strategy": "data:sharded"},
            "sharded_update: 'off', and strategy data:sharded .*use",
        ),
    ],
)
def test_the_setting_is_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Settings().replaced(changes).check()


def test_it_is_refused_with_the_state_on_a_gpu() -> None:
    with pytest.raises(
        AssertionError, match=r"InvalidArgument: sharded_update: 'on' .*the state on a GPU.*; use sharded"
    ):
        train("shm", 2, settings("data", **ON, accelerator="emulated", max_steps=1), JOBS["mlp"])


@pytest.mark.parametrize(("strategy", "changes"), [("data", ON), ("pipeline:1f1b", {})], ids=["data", "pipeline"])
def test_the_trace_of_a_step_has_its_commit(strategy: str, changes: dict[str, Any]) -> None:
    """Nothing is replicated here, so the update does not wait for the commit."""
    for one in train("shm", 2, settings(strategy, epochs=1, **changes), JOBS["mlp"]):
        spans = sorted(one.account["spans"], key=lambda span: float(span[2]))
        names = [name for name, *_ in spans if name == "commit" or name.endswith("U")]
        assert [name.lstrip("0123456789") for name in names] == ["U", "commit"] * STEPS
        ends = [started + seconds for _, _, started, seconds in spans]
        assert all(later[2] >= end - 1e-6 for later, end in zip(spans[1:], ends, strict=False)), "two spans overlap"
