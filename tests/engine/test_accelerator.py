"""The GPU code path, emulated in host memory, gives the bits of the CPU; on CUDA all strategies give the same bits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked_ranks import LONG_S, checkpoint, tensors_in, train
from gloo_group import open_gloo_group
from gpus import has_gpu
from short_jobs import JOBS, alone
from small_jobs import settings
from torch import Tensor

from hoop.engine.roles.resident import ResidentRole
from hoop.engine.settings import Settings
from hoop.engine.stage import peer_row_selection
from hoop.engine.stage.gpu_resident_state import ResidentStageState, StateCopy
from hoop.errors import InvalidArgument

STRATEGIES = [
    ("data", 1),
    ("data", 3),
    ("pipeline:1f1b", 2),
    ("pipeline:interleaved", 2),
    ("pipeline:zero-bubble", 2),
    ("hybrid:replicas=2", 4),
    ("ps:bsp", 3),
    ("ring", 2),
]
REPRESENTATIVES = [("data", 3), ("pipeline:1f1b", 2), ("ps:bsp", 3)]
"""One of each family; the others are slow."""


def final_state(job: str, strategy: str, devices: int, **changes: object) -> dict[str, Tensor]:
    return tensors_in(checkpoint(train("shm", devices, settings(strategy, **changes), JOBS[job])))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.slow_if(when=lambda params: (params["strategy"], params["devices"]) not in REPRESENTATIVES)
@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_the_emulated_accelerator_gives_the_bits_of_the_cpu(strategy: str, devices: int) -> None:
    """Batch norm, dropout, empty shards; the state stays there, and so do gradients that no other rank needs."""
    assert_same(final_state("normed", strategy, devices, accelerator="emulated"), alone("normed"))


@pytest.mark.parametrize("strategy", [pytest.param("ring:async", marks=pytest.mark.slow), "ring:async,slices=2"])
def test_emulated_with_several_versions_of_the_weights(strategy: str) -> None:
    emulated, cpu = (final_state("normed", strategy, 2, accelerator=accelerator) for accelerator in ("emulated", "cpu"))
    assert_same(emulated, cpu)


@pytest.mark.gpu
def test_on_cuda_graphs_change_no_bit_with_several_versions_of_the_weights() -> None:
    with_graphs, without = (
        final_state("convolved", "ring:async", 2, accelerator="cuda", graphs=graphs) for graphs in (True, False)
    )
    assert_same(with_graphs, without)


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_emulated_with_momentum_clipping_and_micro_batches(scheme: str) -> None:
    """Over TCP the rows are copied to the host and summed there."""
    changes = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "clip": 0.5, "shards": 4, "accumulate": 2}
    expected = tensors_in(checkpoint(train("shm", 1, settings("data", **changes), JOBS["convolved"])))
    emulated = settings("data", accelerator="emulated", **changes)
    assert_same(tensors_in(checkpoint(train(scheme, 3, emulated, JOBS["convolved"]))), expected)


@pytest.mark.parametrize("devices", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_emulated_gpus_that_exchange_their_rows_give_the_bits_of_the_cpu(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over Gloo, with the code that GPUs of several hosts use over NCCL."""
    monkeypatch.setattr(peer_row_selection, "open_group", open_gloo_group)
    monkeypatch.setattr(peer_row_selection, "StagedRows", None)  # the rows are not summed on the host
    found = train("tcp", devices, settings("data", accelerator="emulated"), JOBS["normed"])
    assert_same(tensors_in(checkpoint(found)), alone("normed"))


def test_channels_last_gives_the_same_bits_on_any_number_of_devices() -> None:
    """Filters are stored in another order on the GPU: the checkpoint has the model's."""
    expected, found = (
        final_state("convolved", "data", devices, accelerator="emulated", channels_last=True) for devices in (1, 3)
    )
    assert_same(found, expected)
    for name, tensor in alone("convolved").items():
        torch.testing.assert_close(found[name], tensor, rtol=0.1, atol=0.01)


def test_emulated_with_jointly_computed_shards() -> None:
    assert_same(final_state("mlp", "data", 2, accelerator="emulated"), alone("mlp"))


def test_an_emulated_run_resumes_from_a_checkpoint() -> None:
    first = settings("data", accelerator="emulated", max_steps=5)
    middle = checkpoint(train("shm", 1, first, JOBS["normed"]))
    rest = settings("data", accelerator="emulated")
    assert_same(tensors_in(checkpoint(train("shm", 2, rest, JOBS["normed"], resume=middle))), alone("normed"))


KINDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_partitioned_run_resumes_from_the_checkpoint_of_another_strategy(kind: str) -> None:
    """Also optimizer state and the counters of batch norms come back to the GPU."""
    changes: dict[str, Any] = {"accelerator": kind, "optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "clip": 0.5}
    middle = checkpoint(train("shm", 3, settings("ps:bsp", max_steps=5, **changes), JOBS["normed"]))
    found = train("shm", 2, settings("pipeline:1f1b", **changes), JOBS["normed"], resume=middle)
    assert_same(tensors_in(checkpoint(found)), alone("normed", tuple(changes.items())))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("job", ["normed", "convolved"])
def test_a_checkpoint_is_read_while_later_steps_are_computed(
    kind: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are those of a checkpoint for which training waits."""
    wanted = settings("data", accelerator=kind, epochs=3, checkpoint_every=1, channels_last=job == "convolved")
    monkeypatch.setattr(ResidentRole, "reads_checkpoints_later", False)
    expected = train("shm", 2, wanted, JOBS[job])[0].snapshots
    monkeypatch.setattr(ResidentRole, "reads_checkpoints_later", True)
    copy_state, advance, went_on = ResidentStageState.copy_state, ResidentRole.advance, threading.Event()

    def copy_for_later(self: ResidentStageState) -> Callable[[], StateCopy]:
        read = copy_state(self)
        went_on.clear()

        def read_later() -> StateCopy:
            assert went_on.wait(LONG_S), "training waits for the checkpoint"
            return read()

        return read_later

    def advance_and_say_so(self: ResidentRole, *arguments: Any) -> list[float]:
        losses = advance(self, *arguments)
        went_on.set()
        return losses

    monkeypatch.setattr(ResidentStageState, "copy_state", copy_for_later)
    monkeypatch.setattr(ResidentRole, "advance", advance_and_say_so)
    found = train("shm", 2, wanted, JOBS[job])[0].snapshots
    assert len(found) == 3
    assert found == expected


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(AssertionError, match="accelerator: cuda was asked for, and rank 0, 1 of 2 has none: "):
        train("shm", 2, settings("data", accelerator="cuda"), JOBS["tiny"])
    assert_same(final_state("tiny", "data", 1, accelerator="auto"), alone("tiny"))
    with pytest.raises(InvalidArgument, match="accelerator: 'gpu' is unknown; known: cpu, cuda, auto"):
        Settings(accelerator="gpu").check()


@pytest.mark.gpu
@pytest.mark.parametrize("job", ["normed", "convolved", "mlp"])
def test_on_cuda_every_strategy_gives_the_same_bits(job: str) -> None:
    expected = final_state(job, "data", 1, accelerator="cuda")
    for strategy, devices in STRATEGIES:
        if job == "normed" or strategy != "pipeline:interleaved":  # the other jobs have too few blocks for 4 stages
            assert_same(final_state(job, strategy, devices, accelerator="cuda"), expected)


@pytest.mark.gpu
def test_cuda_graphs_change_no_bit_and_the_gpu_agrees_with_the_cpu() -> None:
    changes: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05}  # Adam would turn rounding differences into full steps
    with_graphs = final_state("convolved", "data", 1, accelerator="cuda", **changes)
    assert_same(final_state("convolved", "data", 1, accelerator="cuda", graphs=False, **changes), with_graphs)
    expected = alone("convolved", tuple(changes.items()))
    assert with_graphs.keys() == expected.keys()
    for name in expected:
        assert torch.allclose(with_graphs[name], expected[name], rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("hybrid:replicas=2", 4),  # of pipelines
        ("ps:bsp", 3),
        pytest.param("pipeline:gpipe", 3, marks=pytest.mark.slow),
        pytest.param("pipeline:interleaved", 2, marks=pytest.mark.slow),
        pytest.param("ring", 2, marks=pytest.mark.slow),
    ],
)
def test_activations_and_sums_in_shared_memory_have_the_bits_of_those_through_the_host(
    strategy: str, devices: int, kind: str
) -> None:
    """In micro-batches of 2 samples and of 1, with clipping; over TCP nothing is shared."""
    wanted = settings(strategy, accelerator=kind, epochs=1, batch_size=10, clip=0.5)
    shared, through_the_host = (
        tensors_in(checkpoint(train(scheme, devices, wanted, JOBS["normed"]))) for scheme in ("shm", "tcp")
    )
    assert_same(shared, through_the_host)
    if kind == "emulated":
        assert_same(shared, alone("normed", (("epochs", 1), ("batch_size", 10), ("clip", 0.5))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("strategy", "devices"), [("ps:servers=2", 4), ("ps:asp", 2)])
def test_several_and_asynchronous_servers_that_share_memory(strategy: str, devices: int, kind: str) -> None:
    """With one worker, the pushes of an asynchronous server are ordered."""
    changes = {"accelerator": kind, "epochs": 1, "batch_size": 10}
    shared, through_the_host = (
        tensors_in(checkpoint(train(scheme, devices, settings(strategy, **changes), JOBS["normed"])))
        for scheme in ("shm", "tcp")
    )
    assert_same(shared, through_the_host)


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_on_cuda_devices_that_share_a_gpu_sum_to_the_same_bits(devices: int, scheme: str) -> None:
    """Through CUDA IPC, and through host memory; with clipping, and a last batch with empty shards."""
    changes: dict[str, Any] = {"accelerator": "cuda", "clip": 0.5}
    expected = final_state("convolved", "data", 1, **changes)
    found = train(scheme, devices, settings("data", **changes), JOBS["convolved"])
    assert_same(tensors_in(checkpoint(found)), expected)


@pytest.mark.gpu
def test_on_cuda_bfloat16_and_channels_last_give_the_same_bits_on_any_number_of_devices() -> None:
    changes: dict[str, Any] = {"accelerator": "cuda", "precision": "bfloat16", "channels_last": True}
    expected, found = (final_state("convolved", "data", devices, **changes) for devices in (1, 3))
    assert_same(found, expected)
