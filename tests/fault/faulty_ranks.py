"""Runs a job on forked ranks that kill themselves where a test says; the parent assigns the survivors new ranks.

    results = run_with_faults(4, settings, job, [Fault(2, "instruction", 40)])

A place is a function of the engine. A rank sends itself SIGKILL when it calls that function for the n-th time. A fault
that never fires fails the test.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from forked_ranks import Outcome, import_for_ranks, measure_briefly
from torch import Tensor

import hoop.engine.fault_tolerance.manager as engine_manager
import hoop.engine.fault_tolerance.replication as engine_replication
import hoop.engine.progress_reporter as engine_reporter
import hoop.engine.setup as engine_setup
import hoop.engine.trainer as engine_trainer
from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext, group_id
from hoop.engine.executor import DeferredUpdates
from hoop.engine.fault_tolerance.checkpoint_format import deserialize, serialize, tensors_of
from hoop.engine.fault_tolerance.replication import Replicator
from hoop.engine.fault_tolerance.snapshots import SnapshotPublisher
from hoop.engine.job import Job, names_of
from hoop.engine.peer_tensors import PeerTensors
from hoop.engine.profiler import InstructionProfiler
from hoop.engine.roles.resident import ResidentRole
from hoop.engine.settings import Settings
from hoop.engine.stage.device_group import DeviceGroup
from hoop.engine.stage.device_reduction import SlotRows
from hoop.engine.stage.peer_rows import MappedRows
from hoop.engine.stage.sharded_update import ShardedGradientReducer
from hoop.engine.trainer import Trainer
from hoop.errors import DeadlineExceeded, HoopError, PeerLost
from hoop.job_events import JobEvent, Ready, SnapshotTaken
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport import Transport, open_transport
from hoop.transport.shm_listener import ShmTransport

TIMEOUT_S = 400.0
ARENA_BYTES = 24 << 20
PLACES: dict[str, tuple[Any, str]] = {
    "instruction": (InstructionProfiler, "record"),
    "keeps": (Replicator, "replicate"),
    "copies": (engine_replication, "copy_from_arena"),
    "meets": (engine_manager, "any_rank"),
    "settles": (DeferredUpdates, "apply_all"),
    "gathers": (ShardedGradientReducer, "gather"),
    "reads": (PeerTensors, "read"),
    "adds": (SlotRows, "sum_into"),
    "sums": (MappedRows, "sum_into"),
    "evaluates": (engine_trainer, "evaluate"),
    "snapshots": (SnapshotPublisher, "publish"),
    "prepares": (engine_manager, "prepare"),
    "begins": (engine_trainer, "prepare"),
    "collects": (engine_manager, "collect"),
    "measures": (engine_setup, "measure_lateness"),
    "rehearses": (ResidentRole, "advance"),
    "exchanges": (DeviceGroup, "start_all_to_all"),
    "shares": (DeviceGroup, "start_all_gather"),
}
"""Functions of the engine at whose call a rank can die or wait, by the name of the place."""


@dataclass(frozen=True)
class Fault:
    """The rank dies when it reaches the place for the n-th time; ``waits``: it waits there for a membership change.

    ``others``: ranks that die at the same moment, wherever they are. ``stops``: the process is stopped there, and the
    others go on without it; when all of them have died it is continued, and goes on alone. With ``others``, these die
    while it is stopped, and new processes on their arenas write other bytes before it is continued.
    """

    rank: int
    place: str
    occurrence: int = 1
    waits: bool = False
    others: tuple[int, ...] = ()
    stops: bool = False


@dataclass
class RankResult:
    """What one rank emitted and holds at the end; ``state``: tensors by name and index of their first element."""

    outcome: Outcome
    state: dict[tuple[str, int], Tensor]


def run_with_faults(
    size: int,
    settings: Settings,
    job: Job,
    faults: Sequence[Fault],
    joins: int = 0,
    scheme: str = "shm",
    hosts: str = "",
    memory: int = ARENA_BYTES,
) -> dict[int, RankResult]:
    """Runs the job; returns the results of the surviving ranks by their initial number (joining ranks come last).

    ``joins``: number of ranks that join later. ``hosts``: one letter per rank, its host; empty: all on one host.
    ``memory``: bytes of each rank's arena.
    """
    torch.set_num_threads(1)
    import_for_ranks()
    job.data()
    parent = Parent(scheme, settings, job, faults, hosts, memory)
    try:
        for number in range(size + joins):
            parent.fork(number, joining=number >= size)
        return parent.run(size)
    finally:
        parent.close()


class Parent:
    """Does what the coordinator does for devices: assigns ranks, and again after ranks were lost or join."""

    def __init__(
        self,
        scheme: str,
        settings: Settings,
        job: Job,
        faults: Sequence[Fault],
        hosts: str = "",
        memory: int = ARENA_BYTES,
    ) -> None:
        self._child = partial(_run_rank, scheme, settings, job, memory)
        self._faults, self._hosts = faults, hosts
        self._links: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._addresses: dict[int, Any] = {}
        self._generation = 0
        self._stopped: list[int] = []
        self._arenas: dict[int, str] = {}

    def fork(self, number: int, joining: bool) -> None:
        parent_end, child_end = Pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                for link in [*self._links.values(), parent_end]:
                    link.close()
                measure_briefly()
                faults = [fault for fault in self._faults if fault.rank == number]
                with ThreadPoolExecutor(1) as thread:
                    thread.submit(self._child, child_end, faults, joining).result()
                code = 0
            finally:
                os._exit(code)
        child_end.close()
        self._links[number], self._pids[number] = parent_end, pid

    def run(self, size: int) -> dict[int, RankResult]:
        for number, link in self._links.items():
            *self._addresses[number], self._arenas[number] = json.loads(_receive(link, f"rank {number}"))
        members = list(range(size))
        joining = [number for number in self._links if number >= size]
        self._assign(members)
        results: dict[int, RankResult] = {}
        ready: set[int] = set()
        waiting = False
        reasons: dict[int, str] = {}
        while members:
            links = {self._links[number]: number for number in [*members, *joining] if number not in results}
            readable = wait(list(links), TIMEOUT_S)
            missing = sorted(links.values())
            assert readable, f"ranks {missing} did not finish within {TIMEOUT_S:g} s; they left their links: {reasons}"
            lost = []
            for ready_link in readable:
                assert isinstance(ready_link, Connection)
                number = links[ready_link]
                try:
                    message = json.loads(ready_link.recv_bytes())
                except (EOFError, ConnectionResetError):
                    lost.append(number)
                    continue
                if message["kind"] == "failed":
                    raise AssertionError(f"rank {number}:\n{message['text']}")
                if message["kind"] == "ready":
                    ready.add(number)
                if message["kind"] == "waiting":
                    waiting = True
                if message["kind"] == "stops":
                    os.kill(self._pids[number], signal.SIGSTOP)
                    os.waitid(os.P_PID, self._pids[number], os.WSTOPPED | os.WNOWAIT)
                    if message["others"]:
                        self._restart(message["others"])
                        os.kill(self._pids[number], signal.SIGCONT)
                        continue
                    members.remove(number)
                    self._stopped.append(number)
                    self._assign(members)
                if message["kind"] == "dies":
                    for victim in (number, *message["others"]):
                        os.kill(self._pids[victim], signal.SIGKILL)
                if message["kind"] == "left":
                    reasons[number] = message["text"]
                if message["kind"] == "done":
                    results[number] = _receive_result(ready_link, message)
            for number in lost:
                self._check_killed(number)
                members.remove(number)
                waiting = True  # other ranks may wait for it
            if not members:
                members, self._stopped = self._stopped, []
                for number in members:
                    os.kill(self._pids[number], signal.SIGCONT)
                self._assign(members, left_out=True)
                continue
            if waiting and (lost or ready == set(joining)) and (lost or joining):
                members, joining, waiting = members + joining * (not lost), joining * bool(lost), False
                self._assign(members)
            if len(results) == len(members):
                break
        deadly = [fault.rank for fault in self._faults if not fault.waits and not fault.stops]
        expected_dead = {*deadly, *(rank for fault in self._faults for rank in fault.others)}
        assert expected_dead == set(self._pids) - set(members), (
            f"{expected_dead} should have died, and {members} are left"
        )
        for number in members:
            self._links[number].send_bytes(b"{}")
        return results

    def _assign(self, members: Sequence[int], left_out: bool = False) -> None:
        self._generation += 1
        peers = [self._addresses[number] for number in members]
        for rank, number in enumerate(members):
            assignment = {"generation": self._generation, "rank": rank, "peers": peers, "left_out": left_out}
            assignment["hosts"] = [self._hosts[member] for member in members] if self._hosts else []
            with contextlib.suppress(BrokenPipeError):  # the rank is dying; the next read gets the end of file
                self._links[number].send_bytes(json.dumps(assignment).encode())

    def _restart(self, victims: Sequence[int]) -> None:
        """Kills ranks, and does what new processes on their arenas do: they write other bytes to the same buffers."""
        for victim in victims:
            os.kill(self._pids[victim], signal.SIGKILL)
            os.waitid(os.P_PID, self._pids[victim], os.WEXITED | os.WNOWAIT)
            with Arena.open(self._arenas[victim]) as arena:
                arena.view(arena.min_address, arena.capacity)[:] = b"?" * arena.capacity

    def _check_killed(self, number: int) -> None:
        _, status = os.waitpid(self._pids.pop(number), 0)
        self._pids[number] = 0
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"rank {number} ended with {status}"

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        for number, pid in self._pids.items():
            if pid:
                if number in self._stopped:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _receive(link: Connection, sender: str) -> bytes:
    if not link.poll(TIMEOUT_S):
        raise AssertionError(f"{sender} said nothing for {TIMEOUT_S:g} s")
    return link.recv_bytes()


def _receive_result(link: Connection, message: dict[str, Any]) -> RankResult:
    snapshots = [link.recv_bytes() for _ in range(message["snapshots"])]
    state = {}
    for name, tensor in deserialize(link.recv_bytes())[0].items():
        tensor_name, _, low = name.rpartition("@")
        state[tensor_name, int(low)] = tensor
    return RankResult(Outcome(message["events"], snapshots, {}), state)


class _AssignmentReceiver:
    """A rank's end of the link to the parent: receives its rank assignments, one per generation."""

    def __init__(self, transport: Transport, arena: Arena, link: Connection) -> None:
        self._transport, self._arena, self._link = transport, arena, link
        self._assignments: queue.Queue[dict[str, Any]] = queue.Queue()
        self._open_communicators: list[Communicator] = []
        self._lock = threading.Lock()
        self.membership_changed = threading.Event()
        self.finished = threading.Event()
        self.generation = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while not self.finished.is_set():
            try:
                assignment = json.loads(self._link.recv_bytes())
            except (EOFError, OSError):
                os._exit(3)  # the parent has exited
            if not assignment:
                self.finished.set()
                return
            with self._lock:
                self._assignments.put(assignment)
                if assignment["generation"] > 1:
                    for communicator in self._open_communicators:
                        communicator.endpoint.abort(PeerLost("the members have changed"))
                    self.membership_changed.set()

    def single_rank(self) -> RankContext:
        """Returns the context in which a joining rank prepares, with a world of one rank."""
        assignment = {"generation": 1, "rank": 0, "peers": [list(vars(self._transport.address).values())]}
        return dataclasses.replace(self._world(1 << 20, assignment), joining=True)

    def first(self, timeout: float) -> RankContext:
        """Returns the context of the first rank, as a device that starts a task, although there may be a newer one."""
        return self._world(9, self._assignments.get(timeout=timeout))

    def next(self, timeout: float) -> RankContext:
        self.close()
        assignment = self._assignments.get(timeout=timeout)
        while not self._assignments.empty():  # only the newest counts
            assignment = self._assignments.get()
        return self._world(9, assignment)

    def _world(self, base_identity: int, assignment: dict[str, Any]) -> RankContext:
        generation, rank = assignment["generation"], assignment["rank"]
        peers = [Address(*address) for address in assignment["peers"]]
        communicators: dict[tuple[int, ...], Communicator] = {}

        def open_communicator(identity: int, position: int, members: Sequence[Address]) -> Communicator:
            communicator = Communicator(self._transport.endpoint(identity, generation, position, members))
            with self._lock:
                self._open_communicators.append(communicator)
                if not self._assignments.empty():
                    communicator.endpoint.abort(PeerLost("the members have changed"))
            return communicator

        def group(ranks: Sequence[int]) -> Communicator:
            key = tuple(ranks)
            if key not in communicators:
                members = [peers[member] for member in key]
                communicators[key] = open_communicator(group_id(base_identity, key), key.index(rank), members)
            return communicators[key]

        def wait_reassignment(timeout: float, error: HoopError | None = None) -> RankContext:
            if error is not None:
                raise error
            try:
                return self.next(timeout)
            except queue.Empty:
                raise DeadlineExceeded("no further rank assignment") from None

        self.generation = generation
        world = communicators[tuple(range(len(peers)))] = open_communicator(base_identity, rank, peers)
        hosts = tuple(assignment.get("hosts", ()))
        left_out = assignment.get("left_out", False)
        return RankContext(
            self._arena, world, group, (rank, len(peers)), wait_reassignment, hosts=hosts, left_out=left_out
        )

    def close(self) -> None:
        with self._lock:
            communicators, self._open_communicators = self._open_communicators, []
        for communicator in communicators:
            communicator.close()


def _install_faults(
    faults: Sequence[Fault],
    wait_here: Callable[[str, Sequence[int]], None],
    die_with: Callable[[Sequence[int]], None],
) -> None:
    """Patches the places so that this process dies, waits or is stopped there."""
    for fault in faults:
        owner, name = PLACES[fault.place]
        original, count = getattr(owner, name), [0]

        def armed(
            *arguments: Any,
            _original: Any = original,
            _count: list[int] = count,
            _fault: Fault = fault,
            **keywords: Any,
        ) -> Any:
            _count[0] += 1
            if _count[0] == _fault.occurrence:
                if _fault.waits or _fault.stops:
                    wait_here("stops" if _fault.stops else "waiting", _fault.others)
                elif _fault.others:
                    die_with(_fault.others)
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            return _original(*arguments, **keywords)

        setattr(owner, name, armed)


def _run_rank(
    scheme: str, settings: Settings, job: Job, memory: int, link: Connection, faults: Sequence[Fault], joining: bool
) -> None:
    torch.set_num_threads(1)
    engine_reporter.EMIT_S = TIMEOUT_S  # as late as possible: events not yet emitted are lost when the rank dies
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(f"{folder}/arena", memory)
        local = Address("127.0.0.1", 0)
        transport: Transport = (
            ShmTransport(local, arena) if scheme == "shm" else open_transport(f"{scheme}://127.0.0.1:0")
        )
        link.send_bytes(json.dumps([transport.address.host, transport.address.port, str(arena.path)]).encode())
        receiver = _AssignmentReceiver(transport, arena, link)
        events: list[dict[str, Any]] = []
        snapshots: list[bytes] = []

        def send(message: dict[str, Any]) -> None:
            link.send_bytes(json.dumps(message).encode())

        def emit(event: JobEvent) -> None:
            events.append(event.to_fields())
            if isinstance(event, Ready):
                send({"kind": "ready"})
            if isinstance(event, SnapshotTaken):
                buffer = arena.buffer(event.buffer)
                snapshots.append(arena.read(buffer.address, event.bytes))

        def wait_here(kind: str, others: Sequence[int]) -> None:
            send({"kind": kind, "others": others})
            assert receiver.membership_changed.wait(TIMEOUT_S), "the membership did not change"

        def die_with(others: Sequence[int]) -> None:
            send({"kind": "dies", "others": others})
            threading.Event().wait(TIMEOUT_S)

        class ReportingTrainer(Trainer):
            """Tells the parent why it left its links, for the error message if the ranks do not finish in time."""

            def _recover(self, error: HoopError, obstacle: HoopError | None = None) -> None:
                send({"kind": "left", "text": str(error)})
                super()._recover(error, obstacle)

        try:
            _install_faults(faults, wait_here, die_with)
            context = receiver.single_rank() if joining else receiver.first(TIMEOUT_S)
            trainer = ReportingTrainer(context, settings, job, emit, lambda: False, None, "test.")
            trainer.join() if joining else trainer.train()
            model, role = trainer._setup.model, trainer._role
            for stage_state in trainer.executor.stage_states.values():
                stage_state.download()
            held = tensors_of(trainer.executor.stage_states.values(), names_of(model))
            pieces = {f"{name}@0": tensor for name, tensor in held.items()}
            pieces |= {f"{part.name}@{part.low}": part.elements for part in role.live_slices(model)}
            send({"kind": "done", "events": events, "snapshots": len(snapshots)})
            for data in [*snapshots, serialize({name: tensor.clone() for name, tensor in pieces.items()}, {})]:
                link.send_bytes(data)
        except BaseException:
            send({"kind": "failed", "text": traceback.format_exc()})
        receiver.finished.wait(TIMEOUT_S)
        receiver.close()
        transport.close()
        arena.close()
