"""Trains a job on forked processes over a given transport; each rank returns its events, snapshots and final memory.

    outcomes = train("shm", 3, settings, job)        # one per rank, in order; raises if a rank failed

There is no device server and no coordinator: only the engine is tested.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hoop import environment
from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext, group_id
from hoop.engine import cost_probe, rehearsal
from hoop.engine import setup as engine_setup
from hoop.engine.fault_tolerance.checkpoint_format import MOMENT, deserialize, serialize
from hoop.engine.job import Job
from hoop.engine.settings import Settings
from hoop.engine.trainer import Trainer
from hoop.job_events import JobEvent, SnapshotTaken
from hoop.memory import Arena
from hoop.plan.instructions import OTHER
from hoop.topology import Address
from hoop.transport import Transport, open_transport
from hoop.transport.shm_listener import ShmTransport

LONG_S = 400.0
ARENA_BYTES = 24 << 20


@dataclass
class Outcome:
    """The results of one rank."""

    events: list[dict[str, Any]]
    snapshots: list[bytes]
    held: dict[str, str]
    """The sha256 of each buffer in its arena at the end, by name."""
    more: dict[str, Any] = field(default_factory=dict)
    """Allocated bytes, sizes of buffers, weights by stage, slices of a parameter server, samples read by epoch."""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def account(self) -> dict[str, Any]:
        (found,) = self.of("account")
        return found

    @property
    def losses(self) -> list[float]:
        return [loss for event in self.of("steps") for loss in event["loss"]]

    @property
    def executed(self) -> list[str]:
        """The instructions that the rank executed, in order, as far as they were traced."""
        spans = self.account["spans"]
        return [name for name, category, _, _ in spans if name != "wait" and category not in ("recv", OTHER)]


@cache
def import_for_ranks() -> None:
    """Loads, before the first fork, what every rank would otherwise load by itself."""
    for name in ("numpy.ctypeslib", "numpy.ma", "numpy.random", "torch._dynamo"):  # optimizers import the last one
        importlib.import_module(name)
    environment.versions()


def measure_briefly() -> None:
    """Shortens what this process measures before its first step.

    Of the results, times are predicted and stages are cut; no weight depends on them. The usual measurements take as
    long as the few steps of a test, and on an emulated GPU several times as long.
    """
    brief = {"REPEATS": 1, "LATENESS_ROUNDS": 4, "GPU_PROBE_S": 0.0, "_MIN_STEPS": 2, "_GPU_REPEATS": 1}
    brief |= {"_COPIED_BYTES": 1 << 16, "_CACHE_BYTES": 1 << 16}
    for name, value in brief.items():
        mock.patch.object(cost_probe, name, value).start()
    mock.patch.object(rehearsal, "SECONDS", 0.0).start()
    small_vectors = partial(cost_probe.measure_costs, sizes=(1 << 16,))
    mock.patch.object(engine_setup, "measure_costs", small_vectors).start()


def train(
    scheme: str,
    size: int,
    settings: Settings,
    job: Job,
    *,
    resume: bytes | None = None,
    stop_at: int | None = None,
    memory: int = ARENA_BYTES,
    briefly: bool = True,
) -> list[Outcome]:
    """Runs a job on ``size`` forked ranks.

    ``stop_at``: rank 0 requests a stop after this many polls. ``briefly``: see ``measure_briefly``.
    """
    torch.set_num_threads(1)
    import_for_ranks()
    job.data()
    pipes: list[Connection] = []
    pids: list[int] = []
    for rank in range(size):
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                for pipe in [*pipes, ours]:
                    pipe.close()  # otherwise a closed pipe would not be seen at its other end
                if briefly:
                    measure_briefly()
                # In its own thread, as on a device: the OpenMP threads of this thread did not survive the fork.
                work = partial(_run_rank, theirs, scheme, rank, size, settings, job, resume, stop_at, memory)
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(work).result()
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        pipes.append(ours)
        pids.append(pid)
    try:
        addresses = json.dumps([json.loads(_receive(pipe, rank)) for rank, pipe in enumerate(pipes)])
        for pipe in pipes:
            pipe.send_bytes(addresses.encode())
        outcomes = _collect(pipes)
        for pipe in pipes:
            pipe.send_bytes(b"done")  # no rank closes its links before all ranks are done
        return outcomes
    finally:
        for pipe in pipes:
            pipe.close()
        for pid in pids:
            os.waitpid(pid, 0)


def _receive(pipe: Connection, rank: int) -> bytes:
    if not pipe.poll(LONG_S):
        raise AssertionError(f"rank {rank} said nothing for {LONG_S:g} s")
    return pipe.recv_bytes()


def _collect(pipes: Sequence[Connection]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    remaining = list(pipes)
    while remaining:
        ready = wait(remaining, LONG_S)
        assert ready, f"ranks {[pipes.index(pipe) for pipe in remaining]} were not done within {LONG_S:g} s"
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            report = json.loads(pipe.recv_bytes())
            if "failed" in report:
                raise AssertionError(f"rank {rank}:\n{report['failed']}")
            snapshots = [pipe.recv_bytes() for _ in range(report.pop("snapshots"))]
            outcomes[rank] = Outcome(report["events"], snapshots, report["held"], report["more"])
            remaining.remove(pipe)
    return [outcomes[rank] for rank in range(len(pipes))]


def _run_rank(
    pipe: Connection,
    scheme: str,
    rank: int,
    size: int,
    settings: Settings,
    job: Job,
    resume: bytes | None,
    stop_at: int | None,
    memory: int,
) -> None:
    torch.set_num_threads(1)
    vars(job.data().train).pop("seen", None)  # samples that the test read before the fork
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(f"{folder}/arena", memory)
        local = Address("127.0.0.1", 0)
        transport: Transport = (
            ShmTransport(local, arena) if scheme == "shm" else open_transport(f"{scheme}://127.0.0.1:0")
        )
        pipe.send_bytes(json.dumps([transport.address.host, transport.address.port]).encode())
        peers = [Address(*one) for one in json.loads(_receive(pipe, rank))]
        communicator = Communicator(transport.endpoint(9, 1, rank, peers))
        groups: dict[tuple[int, ...], Communicator] = {}

        def group(ranks: Sequence[int]) -> Communicator:
            key = tuple(ranks)
            if key not in groups:
                endpoint = transport.endpoint(group_id(9, key), 1, key.index(rank), [peers[one] for one in key])
                groups[key] = Communicator(endpoint)
            return groups[key]

        events: list[dict[str, Any]] = []
        snapshots: list[bytes] = []

        def emit(event: JobEvent) -> None:
            events.append(event.to_fields())
            if isinstance(event, SnapshotTaken):
                buffer = arena.buffer(event.buffer)
                snapshots.append(arena.read(buffer.address, event.bytes))

        polls = 0

        def stop_requested() -> bool:
            nonlocal polls
            polls += 1
            return rank == 0 and stop_at is not None and polls > stop_at

        try:
            world = RankContext(arena, communicator, group, (rank, size))
            before = arena.used
            run = Trainer(world, settings, job, emit, stop_requested, resume, "test.")
            allocated = arena.used - before
            run.train()
            held = {
                buffer.name: hashlib.sha256(arena.read(buffer.address, buffer.size)).hexdigest()
                for buffer in arena.buffers()
            }
            sizes = {buffer.name: buffer.size for buffer in arena.buffers()}
            for stage_state in run.executor.stage_states.values():
                stage_state.download()
            weights = {str(stage): one.state_array.tobytes().hex() for stage, one in run.executor.stage_states.items()}
            slice_buffers = [arena.buffer(name) for name in sizes if name.endswith("slice.weights")]
            slices = [arena.read(one.address, one.size).hex() for one in slice_buffers]
            seen = getattr(job.data().train, "seen", {})
            more = {
                "allocated": allocated,
                "sizes": sizes,
                "weights": weights,
                "slices": slices,
                "seen": seen,
            }
            report = {"events": events, "snapshots": len(snapshots), "held": held, "more": more}
        except BaseException:
            report, snapshots = {"failed": traceback.format_exc()}, []
        pipe.send_bytes(json.dumps(report).encode())
        for data in snapshots:
            pipe.send_bytes(data)
        _receive(pipe, rank)
        run.close()
        for one in [communicator, *groups.values()]:
            one.close()
        transport.close()
        arena.close()


def checkpoint(outcomes: Sequence[Outcome], index: int = -1) -> bytes:
    """Merges the parts of one snapshot into one checkpoint file, as ``hoop.runs.job_follower`` does."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    parts = [one for one in outcomes if one.snapshots]
    (expected_parts,) = {one.of("snapshot")[index]["parts"] for one in parts}
    assert len(parts) == expected_parts
    for one in parts:
        part_tensors, metadata = deserialize(one.snapshots[index])
        assert not set(part_tensors) & set(tensors), "two ranks sent the same tensor"
        tensors |= part_tensors
    return serialize(tensors, metadata)


def tensors_in(data: bytes, moments: bool = True) -> dict[str, Tensor]:
    found = deserialize(data)[0]
    return {name: one for name, one in found.items() if moments or not name.startswith(MOMENT)}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not bit-identical."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one
        or name not in other
        or one[name].shape != other[name].shape
        or one[name].dtype != other[name].dtype
        or _bytes(one[name]) != _bytes(other[name])
    ]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
