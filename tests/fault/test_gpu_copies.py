"""What a step of a partitioned model copies between host and GPU: gradients and activations, never the state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faulty_ranks import run_with_faults
from small_jobs import BATCH, JOBS, STEPS, settings

from hoop.engine.fault_tolerance.manager import ShardedStateManager

KINDS = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = 4096
"""Bytes of losses and counters."""
ACTIVATIONS = 4 * BATCH * 2 * 30
"""Bytes of the widest activations with their gradients."""


def samples_bytes(kind: str) -> int:
    """Bytes of the samples of a step; the emulated GPU shares them with the host."""
    return 4 * BATCH * 784 if kind == "cuda" else 0


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which each rank appends, after each commit: step, bytes uploaded and downloaded, bytes of gradients."""
    file, commit = tmp_path / "copies", ShardedStateManager.commit

    def commit_and_count(self: ShardedStateManager, *arguments: Any) -> tuple[bool, list[float]]:
        found = commit(self, *arguments)
        assert self._setup is not None
        executor = self._setup.executor
        accelerator = executor.accelerator
        assert accelerator is not None
        own = sum(4 * one.layout.state for one in executor.stage_states.values())
        replicas = self._replicator._replicas.values() if self._replicator is not None else ()
        held = sum(total.nbytes for (replica,) in replicas for total in replica.totals)
        row = [executor.rank, arguments[2], accelerator.bytes_uploaded, accelerator.bytes_downloaded, own, held]
        with file.open("a") as stream:
            stream.write(json.dumps(row) + "\n")
        return found

    monkeypatch.setattr(ShardedStateManager, "commit", commit_and_count)
    return file


def copied_a_step(file: Path, ranks: int) -> list[tuple[int, ...]]:
    """By rank: bytes uploaded and downloaded in a step in the middle, bytes of its gradients and of its replicas'."""
    rows = {(rank, step): numbers for rank, step, *numbers in map(json.loads, file.read_text().splitlines())}
    assert len(rows) == ranks * STEPS
    found = []
    for rank in range(ranks):
        before, after = rows[rank, STEPS - 2], rows[rank, STEPS - 1]
        found.append((after[0] - before[0], after[1] - before[1], *after[2:]))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_pipeline_copies_gradients_and_activations(kind: str, copies: Path) -> None:
    """Its own gradient goes to the host once, for the holder of its replica; the replica's comes from there."""
    run_with_faults(3, settings("pipeline:1f1b", epochs=1, accelerator=kind), JOBS["flat"], [])
    for uploaded, downloaded, own, held in copied_a_step(copies, 3):
        assert own > 0
        assert held <= uploaded <= held + ACTIVATIONS + samples_bytes(kind) + SMALL
        assert own <= downloaded <= own + ACTIVATIONS + SMALL


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_without_replicas_keeps_its_gradients_on_the_gpu(kind: str, copies: Path) -> None:
    wanted = settings("pipeline:1f1b", epochs=1, accelerator=kind, replicate=False)
    run_with_faults(2, wanted, JOBS["flat"], [])
    for uploaded, downloaded, _, held in copied_a_step(copies, 2):
        assert held == 0
        assert uploaded <= ACTIVATIONS + samples_bytes(kind) + SMALL
        assert downloaded <= ACTIVATIONS + SMALL


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_a_hybrid_sums_on_the_gpu(kind: str, copies: Path) -> None:
    """The pipelines are replicas of each other, and read each other's gradients on the GPU: none goes to the host."""
    run_with_faults(4, settings("hybrid:replicas=2", epochs=1, accelerator=kind), JOBS["flat"], [])
    found = copied_a_step(copies, 4)
    assert max(own for _, _, own, _ in found) > ACTIVATIONS + SMALL
    for uploaded, downloaded, _, held in found:
        assert held == 0
        assert uploaded <= ACTIVATIONS + samples_bytes(kind) + SMALL
        assert downloaded <= ACTIVATIONS + SMALL


@pytest.mark.parametrize("kind", KINDS)
def test_a_hybrid_without_shared_memory_sums_on_the_host(kind: str, copies: Path) -> None:
    """Over TCP a gradient goes to the host and the sum back, nothing else."""
    wanted = settings("hybrid:replicas=2", epochs=1, accelerator=kind)
    run_with_faults(4, wanted, JOBS["flat"], [], scheme="tcp")
    for uploaded, downloaded, own, held in copied_a_step(copies, 4):
        assert held == 0
        assert own <= uploaded <= own + ACTIVATIONS + samples_bytes(kind) + SMALL
        assert own <= downloaded <= own + ACTIVATIONS + SMALL
