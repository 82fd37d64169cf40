"""A job on forked processes, over links of one's choice: each rank tells what it emitted and what it holds in the end.

    outcomes = train("shm", 3, settings, job)        # one a rank, in order; a rank's failure is raised here

No server and no coordinator: what is tested is the engine.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import Tensor

from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext
from hoop.engine.fault_tolerance.checkpoint import MOMENT, deserialize, serialize
from hoop.engine.job import Job
from hoop.engine.settings import Settings
from hoop.engine.trainer import Trainer
from hoop.job_events import JobEvent, SnapshotTaken
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport import Transport, open_transport
from hoop.transport.shm_listener import ShmTransport

LONG_S = 100.0
ARENA_BYTES = 24 << 20


@dataclass
class Outcome:
    """What one rank came to."""

    events: list[dict[str, Any]]
    snapshots: list[bytes]
    held: dict[str, str]
    """The sha256 of each vector it holds, by name."""
    more: dict[str, Any] = field(default_factory=dict)

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
    def done(self) -> list[str]:
        """The instructions it executed, where they were traced, in order."""
        spans = self.account["spans"]
        return [name for name, category, _, _ in spans if name != "wait" and category != "recv"]


def train(
    scheme: str,
    size: int,
    settings: Settings,
    job: Job,
    *,
    resume: bytes | None = None,
    stop_at: int | None = None,
    memory: int = ARENA_BYTES,
) -> list[Outcome]:
    """Runs a job on ``size`` forked ranks; ``stop_at``: rank 0 wants to stop once it is asked so often."""
    torch.set_num_threads(1)
    job.data()
    links: list[Connection] = []
    pids: list[int] = []
    for rank in range(size):
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                for link in [*links, ours]:
                    link.close()  # or nobody would see the other end's close
                # As on a device, on a thread of its own: OpenMP's threads of this one did not survive the fork.
                work = partial(_rank, theirs, scheme, rank, size, settings, job, resume, stop_at, memory)
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(work).result()
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        links.append(ours)
        pids.append(pid)
    try:
        addresses = json.dumps([json.loads(_next(link, rank)) for rank, link in enumerate(links)])
        for link in links:
            link.send_bytes(addresses.encode())
        outcomes = _collect(links)
        for link in links:
            link.send_bytes(b"done")  # nobody closes its links before all are done
        return outcomes
    finally:
        for link in links:
            link.close()
        for pid in pids:
            os.waitpid(pid, 0)


def _next(link: Connection, rank: int) -> bytes:
    if not link.poll(LONG_S):
        raise AssertionError(f"rank {rank} said nothing for {LONG_S:g} s")
    return link.recv_bytes()


def _collect(links: Sequence[Connection]) -> list[Outcome]:
    found: dict[int, Outcome] = {}
    left = list(links)
    while left:
        ready = wait(left, LONG_S)
        assert ready, f"ranks {[links.index(link) for link in left]} were not done within {LONG_S:g} s"
        for link in ready:
            assert isinstance(link, Connection)
            rank = links.index(link)
            told = json.loads(link.recv_bytes())
            if "failed" in told:
                raise AssertionError(f"rank {rank}:\n{told['failed']}")
            snapshots = [link.recv_bytes() for _ in range(told.pop("snapshots"))]
            found[rank] = Outcome(told["events"], snapshots, told["held"], told["more"])
            left.remove(link)
    return [found[rank] for rank in range(len(links))]


def _rank(
    link: Connection,
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
    vars(job.data().train).pop("seen", None)  # what a test read in the process that this one was forked from
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(f"{folder}/arena", memory)
        local = Address("127.0.0.1", 0)
        transport: Transport = (
            ShmTransport(local, arena) if scheme == "shm" else open_transport(f"{scheme}://127.0.0.1:0")
        )
        link.send_bytes(json.dumps([transport.address.host, transport.address.port]).encode())
        peers = [Address(*one) for one in json.loads(_next(link, rank))]
        communicator = Communicator(transport.endpoint(9, 1, rank, peers))
        groups: dict[tuple[int, ...], Communicator] = {}

        def group(ranks: Sequence[int]) -> Communicator:
            key = tuple(ranks)
            if key not in groups:
                number = 10 + key[0] + (len(key) << 12)
                place = transport.endpoint(number, 1, key.index(rank), [peers[one] for one in key])
                groups[key] = Communicator(place)
            return groups[key]

        events: list[dict[str, Any]] = []
        snapshots: list[bytes] = []

        def emit(event: JobEvent) -> None:
            events.append(event.to_fields())
            if isinstance(event, SnapshotTaken):
                buffer = arena.buffer(event.buffer)
                snapshots.append(arena.read(buffer.address, event.bytes))

        asked = 0

        def stopping() -> bool:
            nonlocal asked
            asked += 1
            return rank == 0 and stop_at is not None and asked > stop_at

        try:
            world = RankContext(arena, communicator, group, (rank, size))
            before = arena.used
            run = Trainer(world, settings, job, emit, stopping, resume, "test.")
            allocated = arena.used - before
            run.train()
            held = {
                buffer.name: hashlib.sha256(arena.read(buffer.address, buffer.size)).hexdigest()
                for buffer in arena.buffers()
            }
            sizes = {buffer.name: buffer.size for buffer in arena.buffers()}
            weights = {str(stage): one.state_array.tobytes().hex() for stage, one in run.executor.stage_states.items()}
            kept = [arena.buffer(name) for name in sizes if name.endswith("slice.weights")]
            sliced = [arena.read(one.address, one.size).hex() for one in kept]
            seen = getattr(job.data().train, "seen", {})
            more = {
                "allocated": allocated,
                "sizes": sizes,
                "weights": weights,
                "slices": sliced,
                "seen": seen,
            }
            told = {"events": events, "snapshots": len(snapshots), "held": held, "more": more}
        except BaseException:
            told, snapshots = {"failed": traceback.format_exc()}, []
        link.send_bytes(json.dumps(told).encode())
        for data in snapshots:
            link.send_bytes(data)
        _next(link, rank)
        run.close()
        for one in [communicator, *groups.values()]:
            one.close()
        transport.close()
        arena.close()


def checkpoint(outcomes: Sequence[Outcome], index: int = -1) -> bytes:
    """The parts of one snapshot as one file, as whoever conducts a job puts them together."""
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, Any] = {}
    parts = [one for one in outcomes if one.snapshots]
    (said,) = {one.of("snapshot")[index]["parts"] for one in parts}
    assert len(parts) == said
    for one in parts:
        found, metadata = deserialize(one.snapshots[index])
        assert not set(found) & set(tensors), "two ranks gave the same tensor"
        tensors |= found
    return serialize(tensors, metadata)


def tensors_in(data: bytes, moments: bool = True) -> dict[str, Tensor]:
    found = deserialize(data)[0]
    return {name: one for name, one in found.items() if moments or not name.startswith(MOMENT)}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same to the bit."""
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one
        or name not in other
        or one[name].shape != other[name].shape
        or one[name].contiguous().numpy().tobytes() != other[name].contiguous().numpy().tobytes()
    ]
