"""Computing on a GPU: the same path in host memory gives the CPU's bits; on CUDA all strategies give one model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forked_ranks import checkpoint, tensors_in, train
from small_jobs import JOBS, alone, settings
from torch import Tensor

from hoop.engine.settings import Settings
from hoop.errors import InvalidArgument

SAME = [
    ("data", 1),
    ("data", 3),
    ("pipeline:1f1b", 2),
    ("pipeline:interleaved", 2),
    ("pipeline:zero-bubble", 2),
    ("hybrid:replicas=2", 4),
    ("ps:bsp", 3),
    ("ring", 2),
]
CUDA = pytest.mark.skipif(not torch.cuda.device_count(), reason="no CUDA GPU here")


def trained(job: str, strategy: str, devices: int, **changes: object) -> dict[str, Tensor]:
    return tensors_in(checkpoint(train("shm", devices, settings(strategy, **changes), JOBS[job])))


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize(("strategy", "devices"), SAME)
def test_a_copy_elsewhere_changes_no_bit(strategy: str, devices: int) -> None:
    """Batch norm, dropout, empty shards; weights up, gradients merged there and brought down."""
    assert_same(trained("normed", strategy, devices, accelerator="emulated"), alone("normed"))


def test_several_versions_of_the_weights_have_their_turn_there() -> None:
    mirrored, plain = (
        trained("normed", "ring:async", 2, accelerator=accelerator) for accelerator in ("emulated", "cpu")
    )
    assert_same(mirrored, plain)


def test_shards_that_are_computed_jointly() -> None:
    assert_same(trained("mlp", "data", 2, accelerator="emulated"), alone("mlp"))


def test_a_run_goes_on_from_a_checkpoint_there() -> None:
    how = settings("data", accelerator="emulated", max_steps=5)
    begun = checkpoint(train("shm", 1, how, JOBS["normed"]))
    rest = settings("data", accelerator="emulated")
    assert_same(tensors_in(checkpoint(train("shm", 2, rest, JOBS["normed"], resume=begun))), alone("normed"))


@pytest.mark.skipif(bool(torch.cuda.device_count()), reason="there is a GPU")
def test_where_there_is_no_gpu() -> None:
    with pytest.raises(AssertionError, match="accelerator: cuda was asked for, and rank 0, 1 of 2 has none: "):
        train("shm", 2, settings("data", accelerator="cuda"), JOBS["tiny"])
    assert_same(trained("tiny", "data", 1, accelerator="auto"), alone("tiny"))
    with pytest.raises(InvalidArgument, match="accelerator: 'gpu' is unknown; known: cpu, cuda, auto"):
        Settings(accelerator="gpu").check()


@CUDA
@pytest.mark.parametrize("job", ["normed", "convolved", "mlp"])
def test_on_cuda_every_strategy_gives_the_same_bits(job: str) -> None:
    wanted = trained(job, "data", 1, accelerator="cuda")
    for strategy, devices in SAME:
        if job == "normed" or strategy != "pipeline:interleaved":  # the others have too few blocks for 4 stages
            assert_same(trained(job, strategy, devices, accelerator="cuda"), wanted)


@CUDA
def test_a_recording_changes_no_bit_and_a_gpu_agrees_with_the_cpu() -> None:
    how: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05}  # Adam would make steps of what is only rounding
    recorded = trained("convolved", "data", 1, accelerator="cuda", **how)
    assert_same(trained("convolved", "data", 1, accelerator="cuda", graphs=False, **how), recorded)
    wanted = alone("convolved", tuple(how.items()))
    assert recorded.keys() == wanted.keys()
    for name in wanted:
        assert torch.allclose(recorded[name], wanted[name], rtol=1e-3, atol=1e-4), name
