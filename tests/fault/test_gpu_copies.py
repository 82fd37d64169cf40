"""What a step of a partitioned model copies between host and GPU: gradients for replicas, never state or activations.

Ranks of one host read each other's activations, and add their gradients, in the memory of their GPUs. Over TCP both go
through the host.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from faulty_ranks import run_with_faults
from small_jobs import BATCH, JOBS, STEPS, settings

from hoop.engine.fault_tolerance.manager import ShardedStateManager

KINDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = 4096
"""Bytes of targets, losses and counters."""
MESSAGES = 16384
"""Bytes of the headers of a step, and of what ranks exchange at its end."""
ACTIVATIONS = 4 * BATCH * 2 * 30
"""Bytes of the widest activations with their gradients."""


def samples_bytes(kind: str) -> int:
    """Bytes of the samples of a step; the emulated GPU shares them with the host."""
    return 4 * BATCH * 784 if kind == "cuda" else 0


class Copied(NamedTuple):
    """What one rank copied in a step, in bytes."""

    uploaded: int
    downloaded: int
    sent: int
    """Over links."""
    shared: int
    """Read by other ranks in this rank's memory, of activations."""
    own: int
    """Of its own gradient."""
    held: int
    """Of the gradients of the replicas that it holds."""


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which each rank appends, after each commit: its rank, the step, and the counters of ``Copied``."""
    file, commit = tmp_path / "copies", ShardedStateManager.commit

    def commit_and_count(self: ShardedStateManager, *arguments: Any) -> tuple[bool, list[float]]:
        found = commit(self, *arguments)
        assert self._setup is not None
        executor = self._setup.executor
        accelerator, channel = executor.accelerator, executor.channel
        assert accelerator is not None
        own = sum(4 * one.layout.state for one in executor.stage_states.values())
        replicas = self._replicator._replicas.values() if self._replicator is not None else ()
        held = sum(total.nbytes for (replica,) in replicas for total in replica.totals)
        sent, shared = channel.endpoint.bytes_sent, channel.bytes_shared
        counts = Copied(accelerator.bytes_uploaded, accelerator.bytes_downloaded, sent, shared, own, held)
        with file.open("a") as stream:
            stream.write(json.dumps([executor.rank, arguments[2], *counts]) + "\n")
        return found

    monkeypatch.setattr(ShardedStateManager, "commit", commit_and_count)
    return file


def copied_a_step(file: Path, ranks: int) -> list[Copied]:
    """By rank: what it copied in a step in the middle."""
    rows = {(rank, step): Copied(*counts) for rank, step, *counts in map(json.loads, file.read_text().splitlines())}
    assert len(rows) == ranks * STEPS
    found = []
    for rank in range(ranks):
        before, after = rows[rank, STEPS - 2], rows[rank, STEPS - 1]
        differences = [new - old for new, old in zip(after[:4], before[:4], strict=True)]
        found.append(Copied(*[*differences, after.own, after.held]))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_pipeline_copies_the_gradients_of_replicas(kind: str, copies: Path) -> None:
    """Its own gradient goes to the host once, for the holder of its replica; the replica's comes from there."""
    run_with_faults(3, settings("pipeline:1f1b", epochs=1, accelerator=kind), JOBS["flat"], [])
    for one in copied_a_step(copies, 3):
        assert one.own > 0
        assert one.shared > 0
        assert one.held <= one.uploaded <= one.held + samples_bytes(kind) + SMALL
        assert one.own <= one.downloaded <= one.own + SMALL
        assert one.sent <= MESSAGES


def assert_only_samples_are_copied(one: Copied, kind: str) -> None:
    """A step of one rank shares memory with others, and nothing but samples and small messages goes over the host."""
    assert one.held == 0
    assert one.shared > 0
    assert one.uploaded <= samples_bytes(kind) + SMALL
    assert one.downloaded <= SMALL
    assert one.sent <= MESSAGES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("pipeline:1f1b", 2), pytest.param("ring", 2, marks=pytest.mark.slow), ("ps:bsp", 3), ("ps:servers=2", 4)],
)
def test_a_step_without_replicas_copies_samples_only(kind: str, strategy: str, devices: int, copies: Path) -> None:
    """Neither activations nor, with parameter servers, gradients and weights go through the host."""
    wanted = settings(strategy, epochs=1, accelerator=kind, replicate=False)
    run_with_faults(devices, wanted, JOBS["flat"], [])
    for one in copied_a_step(copies, devices):
        assert_only_samples_are_copied(one, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_hybrid_sums_on_the_gpu(kind: str, copies: Path) -> None:
    """The pipelines are replicas of each other, and read each other's gradients on the GPU: none goes to the host."""
    run_with_faults(4, settings("hybrid:replicas=2", epochs=1, accelerator=kind), JOBS["flat"], [])
    found = copied_a_step(copies, 4)
    assert max(one.own for one in found) > SMALL + MESSAGES
    for one in found:
        assert_only_samples_are_copied(one, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_without_shared_memory_sums_on_the_host(kind: str, copies: Path) -> None:
    """Over TCP a gradient goes to the host and the sum back, and so do activations."""
    wanted = settings("hybrid:replicas=2", epochs=1, accelerator=kind)
    run_with_faults(4, wanted, JOBS["flat"], [], scheme="tcp")
    for one in copied_a_step(copies, 4):
        assert one.held == 0
        assert one.shared == 0
        assert one.own <= one.uploaded <= one.own + ACTIVATIONS + samples_bytes(kind) + SMALL
        assert one.own < one.downloaded <= one.own + ACTIVATIONS + SMALL
