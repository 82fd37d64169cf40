"""A job on forked processes that die where a test says, and a parent that gives those who are left other seats.

    ended = survive(4, settings, job, [Fault(2, "instruction", 40)])

A place is a function of the engine; a rank is killed (SIGKILL, by itself) as it comes to it for the n-th time. That it
died so is checked here: a fault that never fires fails the test.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from forked_ranks import Outcome
from torch import Tensor

import hoop.engine.fault_tolerance.manager as engine_manager
import hoop.engine.progress_reporter as engine_reporter
import hoop.engine.trainer as engine_trainer
from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext
from hoop.engine.executor import DeferredUpdates
from hoop.engine.fault_tolerance.checkpoint import SnapshotPublisher, deserialize, serialize, tensors_of
from hoop.engine.fault_tolerance.replication import Replicator
from hoop.engine.job import Job, names_of
from hoop.engine.profiler import InstructionProfiler
from hoop.engine.settings import Settings
from hoop.engine.trainer import Trainer
from hoop.errors import DeadlineExceeded, HoopError, PeerLost
from hoop.job_events import JobEvent, Ready, SnapshotTaken
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport import Transport, open_transport
from hoop.transport.shm_listener import ShmTransport

LONG_S = 100.0
ARENA_BYTES = 24 << 20
PLACES: dict[str, tuple[Any, str]] = {
    "instruction": (InstructionProfiler, "record"),
    "keeps": (Replicator, "replicate"),
    "meets": (engine_manager, "any_rank"),
    "settles": (DeferredUpdates, "apply_all"),
    "evaluates": (engine_trainer, "evaluate"),
    "snapshots": (SnapshotPublisher, "publish"),
    "prepares": (engine_manager, "prepare"),
    "begins": (engine_trainer, "prepare"),
    "collects": (engine_manager, "collect"),
}
"""Where a rank can die: as it comes there."""


@dataclass(frozen=True)
class Fault:
    """This rank dies as it comes to this place for the n-th time; or waits there until the members have changed."""

    rank: int
    place: str
    time: int = 1
    waits: bool = False


@dataclass
class Ended:
    """What one rank came to; ``state`` is what it holds, by name and first element."""

    outcome: Outcome
    state: dict[tuple[str, int], Tensor]


def survive(
    size: int,
    settings: Settings,
    job: Job,
    faults: Sequence[Fault],
    joins: int = 0,
    scheme: str = "shm",
    hosts: str = "",
) -> dict[int, Ended]:
    """Runs it; the ranks that are left in the end, by their first number (newcomers come after all others).

    ``hosts``: each rank's machine, a letter each; empty: one.
    """
    torch.set_num_threads(1)
    job.data()
    ranks = Parent(scheme, settings, job, faults, hosts)
    try:
        for number in range(size + joins):
            ranks.fork(number, joining=number >= size)
        return ranks.run(size)
    finally:
        ranks.close()


class Parent:
    """As the coordinator is to devices."""

    def __init__(self, scheme: str, settings: Settings, job: Job, faults: Sequence[Fault], hosts: str = "") -> None:
        self._child = partial(_rank, scheme, settings, job)
        self._faults, self._hosts = faults, hosts
        self._links: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._addresses: dict[int, Any] = {}
        self._generation = 0

    def fork(self, number: int, joining: bool) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                for link in [*self._links.values(), ours]:
                    link.close()
                faults = [one for one in self._faults if one.rank == number]
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(self._child, theirs, faults, joining).result()
                code = 0
            finally:
                os._exit(code)
        theirs.close()
        self._links[number], self._pids[number] = ours, pid

    def run(self, size: int) -> dict[int, Ended]:
        for number, link in self._links.items():
            self._addresses[number] = json.loads(_next(link, f"rank {number}"))
        members = list(range(size))
        newcomers = [number for number in self._links if number >= size]
        self._seat(members)
        found: dict[int, Ended] = {}
        ready: set[int] = set()
        waiting = False
        reasons: dict[int, str] = {}
        while members:
            links = {self._links[number]: number for number in [*members, *newcomers] if number not in found}
            came = wait(list(links), LONG_S)
            missing = sorted(links.values())
            assert came, f"ranks {missing} were not done within {LONG_S:g} s; they left their links: {reasons}"
            lost = []
            for ready_link in came:
                assert isinstance(ready_link, Connection)
                number = links[ready_link]
                try:
                    told = json.loads(ready_link.recv_bytes())
                except (EOFError, ConnectionResetError):
                    lost.append(number)
                    continue
                if told["kind"] == "failed":
                    raise AssertionError(f"rank {number}:\n{told['text']}")
                if told["kind"] == "ready":
                    ready.add(number)
                if told["kind"] == "waiting":
                    waiting = True
                if told["kind"] == "left":
                    reasons[number] = told["text"]
                if told["kind"] == "done":
                    found[number] = _ended(ready_link, told)
            for number in lost:
                self._check_killed(number)
                members.remove(number)
                waiting = True  # it may be what others wait for
            if waiting and (lost or ready == set(newcomers)) and (lost or newcomers):
                members, newcomers, waiting = members + newcomers * (not lost), newcomers * bool(lost), False
                self._seat(members)
            if len(found) == len(members):
                break
        fired = {one.rank for one in self._faults if not one.waits}
        assert fired == set(self._pids) - set(members), f"{fired} were to die, and {members} are left"
        for number in members:
            self._links[number].send_bytes(b"{}")
        return found

    def _seat(self, members: Sequence[int]) -> None:
        self._generation += 1
        peers = [self._addresses[number] for number in members]
        for rank, number in enumerate(members):
            seat = {"generation": self._generation, "rank": rank, "peers": peers}
            seat["hosts"] = [self._hosts[one] for one in members] if self._hosts else []
            with contextlib.suppress(BrokenPipeError):  # it is dying: its link's end tells so next
                self._links[number].send_bytes(json.dumps(seat).encode())

    def _check_killed(self, number: int) -> None:
        _, status = os.waitpid(self._pids.pop(number), 0)
        self._pids[number] = 0
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"rank {number} ended with {status}"

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        for pid in self._pids.values():
            if pid:
                os.waitpid(pid, 0)


def _next(link: Connection, who: str) -> bytes:
    if not link.poll(LONG_S):
        raise AssertionError(f"{who} said nothing for {LONG_S:g} s")
    return link.recv_bytes()


def _ended(link: Connection, told: dict[str, Any]) -> Ended:
    snapshots = [link.recv_bytes() for _ in range(told["snapshots"])]
    state = {}
    for name, tensor in deserialize(link.recv_bytes())[0].items():
        at, _, low = name.rpartition("@")
        state[at, int(low)] = tensor
    return Ended(Outcome(told["events"], snapshots, {}), state)


class _Seats:
    """A rank's seats, one generation after the other."""

    def __init__(self, transport: Transport, arena: Arena, link: Connection) -> None:
        self._transport, self._arena, self._link = transport, arena, link
        self._seats: queue.Queue[dict[str, Any]] = queue.Queue()
        self._open: list[Communicator] = []
        self._lock = threading.Lock()
        self.changed = threading.Event()
        self.over = threading.Event()
        self.generation = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while not self.over.is_set():
            try:
                told = json.loads(self._link.recv_bytes())
            except (EOFError, OSError):
                os._exit(3)  # the parent is gone
            if not told:
                self.over.set()
                return
            with self._lock:
                self._seats.put(told)
                if told["generation"] > 1:
                    for one in self._open:
                        one.endpoint.abort(PeerLost("the members have changed"))
                    self.changed.set()

    def alone(self) -> RankContext:
        """Where a newcomer gets ready."""
        return self._world(
            1 << 20, {"generation": 1, "rank": 0, "peers": [list(vars(self._transport.address).values())]}
        )

    def next(self, patience: float) -> RankContext:
        self.close()
        seat = self._seats.get(timeout=patience)
        while not self._seats.empty():  # only the last one counts
            seat = self._seats.get()
        return self._world(9, seat)

    def _world(self, number: int, seat: dict[str, Any]) -> RankContext:
        generation, rank = seat["generation"], seat["rank"]
        peers = [Address(*one) for one in seat["peers"]]
        made: dict[tuple[int, ...], Communicator] = {}

        def opened(identity: int, place: int, members: Sequence[Address]) -> Communicator:
            one = Communicator(self._transport.endpoint(identity, generation, place, members))
            with self._lock:
                self._open.append(one)
                if not self._seats.empty():
                    one.endpoint.abort(PeerLost("the members have changed"))
            return one

        def group(ranks: Sequence[int]) -> Communicator:
            key = tuple(ranks)
            if key not in made:
                identity = number + 1 + key[0] + (len(key) << 12)
                made[key] = opened(identity, key.index(rank), [peers[one] for one in key])
            return made[key]

        def wait_reassignment(patience: float, lacks: HoopError | None = None) -> RankContext:
            if lacks is not None:
                raise lacks
            try:
                return self.next(patience)
            except queue.Empty:
                raise DeadlineExceeded("no other seat") from None

        self.generation = generation
        whole = made[tuple(range(len(peers)))] = opened(number, rank, peers)
        hosts = tuple(seat.get("hosts", ()))
        return RankContext(self._arena, whole, group, (rank, len(peers)), wait_reassignment, hosts=hosts)

    def close(self) -> None:
        with self._lock:
            left, self._open = self._open, []
        for one in left:
            one.close()


def _arm(faults: Sequence[Fault], wait_here: Callable[[], None]) -> None:
    """From now on this process dies where it is to."""
    for fault in faults:
        owner, name = PLACES[fault.place]
        before, count = getattr(owner, name), [0]

        def armed(
            *given: Any, _before: Any = before, _count: list[int] = count, _fault: Fault = fault, **named: Any
        ) -> Any:
            _count[0] += 1
            if _count[0] == _fault.time:
                if _fault.waits:
                    wait_here()
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            return _before(*given, **named)

        setattr(owner, name, armed)


def _rank(scheme: str, settings: Settings, job: Job, link: Connection, faults: Sequence[Fault], joining: bool) -> None:
    torch.set_num_threads(1)
    engine_reporter.EMIT_S = LONG_S  # as late as can be: what a rank has not emitted when it dies is lost with it
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(f"{folder}/arena", ARENA_BYTES)
        local = Address("127.0.0.1", 0)
        transport: Transport = (
            ShmTransport(local, arena) if scheme == "shm" else open_transport(f"{scheme}://127.0.0.1:0")
        )
        link.send_bytes(json.dumps([transport.address.host, transport.address.port]).encode())
        seats = _Seats(transport, arena, link)
        events: list[dict[str, Any]] = []
        snapshots: list[bytes] = []

        def tell(told: dict[str, Any]) -> None:
            link.send_bytes(json.dumps(told).encode())

        def emit(event: JobEvent) -> None:
            events.append(event.to_fields())
            if isinstance(event, Ready):
                tell({"kind": "ready"})
            if isinstance(event, SnapshotTaken):
                buffer = arena.buffer(event.buffer)
                snapshots.append(arena.read(buffer.address, event.bytes))

        def wait_here() -> None:
            tell({"kind": "waiting"})
            assert seats.changed.wait(LONG_S), "the members did not change"

        class ReportingRun(Trainer):
            """Reports why it left its links, for the parent to name where no death explains it."""

            def _recover(self, error: HoopError) -> None:
                tell({"kind": "left", "text": str(error)})
                super()._recover(error)

        try:
            _arm(faults, wait_here)
            world = seats.alone() if joining else seats.next(LONG_S)
            run = ReportingRun(world, settings, job, emit, lambda: False, None, "test.", joining)
            run.join() if joining else run.train()
            model, role = run._setup.model, run._role
            held = tensors_of(run.executor.stage_states.values(), names_of(model))
            pieces = {f"{name}@0": one for name, one in held.items()}
            pieces |= {f"{one.name}@{one.low}": one.elements for one in role.live_slices(model)}
            tell({"kind": "done", "events": events, "snapshots": len(snapshots)})
            for data in [*snapshots, serialize({name: one.clone() for name, one in pieces.items()}, {})]:
                link.send_bytes(data)
        except BaseException:
            tell({"kind": "failed", "text": traceback.format_exc()})
        seats.over.wait(LONG_S)
        seats.close()
        transport.close()
        arena.close()
