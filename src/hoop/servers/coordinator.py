"""The coordinator: the shell round the membership state machine, and its connections to devices.

It takes no decisions itself. Every event goes through ``membership.state_machine.step``, and ``Coordinator`` carries
out the instructions: it writes the journal, publishes events, probes and aborts. No training data passes through it;
the lab's Memcpy and the ``relay`` baseline do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from hoop.errors import DeadlineExceeded, HoopError, PeerCause, PeerLost, ResourceExhausted
from hoop.events import EventLog, Listeners
from hoop.membership import events as m
from hoop.membership.heartbeats import DetectorConfig
from hoop.membership.journal import FileJournal, Journal
from hoop.membership.state import State
from hoop.membership.state_machine import MAX_COMMUNICATORS, step
from hoop.servers.access_order import AccessOrder
from hoop.servers.device_processes import PROBE_S, DeviceProcesses
from hoop.servers.etcd_journal import SCHEME, EtcdJournal, EtcdLocation
from hoop.servers.grpc_server import CallerCheck, Server, check_exposure, serve
from hoop.servers.lab_dialect import Dialect
from hoop.servers.metrics_options import check_metrics
from hoop.texts import MAX_TEXT_BYTES
from hoop.topology import Address, DeviceInfo
from hoop.wire.auth import Credentials
from hoop.wire.channels import MAX_MESSAGE_BYTES, channel_options
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc
from hoop.wire.local_sockets import remove_stale
from hoop.wire.repeated_calls import FIRST_PAUSE_S, MAX_PAUSE_S, make_repeatable
from hoop.wire.roles import Role
from hoop.wire.service import OnRefused, connection_broke, status_of, translate, unreachable

log = logging.getLogger("hoop.servers")
Request = TypeVar("Request")
Response = TypeVar("Response")
DeviceMethod = Callable[["pb_grpc.DeviceAsyncStub"], "grpc.aio.UnaryUnaryMultiCallable[Request, Response]"]
"""Function that selects a method of a device's stub."""
REDISCOVERY_S = 5.0
"""Seconds that members may need to find a coordinator that took over at another address."""
MAX_JOBS = 64
JOURNAL_RETRY_S = 2.0
"""Seconds for which ``apply_with_retry`` tries to write to a journal that does not answer."""
RETRY_PAUSE_S = 0.1
PROBE_PAUSE = 1 / 8
"""Pause after a probe that was answered, as a fraction of a lease."""
WITNESS_S = 2 * PROBE_S
"""Seconds that a witness may take to try the server of a silent device, and to answer."""
JOURNAL_ERRORS = (DeadlineExceeded, ResourceExhausted)
"""The journal does not answer, or its disk is full."""
COUNT_UNITS = ("dialect", "bytes", "elements", "auto")
JournalLocation = Path | EtcdLocation


@dataclass(frozen=True)
class CoordinatorConfig:
    """The configuration of a coordinator."""

    host: str = "127.0.0.1"
    port: int = 0
    journal: JournalLocation | None = None
    lab_dialect: str = Dialect.STARTER
    """Dialect of the lab's clients, or ``auto``."""
    count_unit: str = "dialect"
    """Unit of ``count`` in the lab's AllReduce: ``bytes``, ``elements`` of float64, ``auto``, or the dialect's."""
    timeout_s: float = 60.0
    """Timeout in seconds of an operation for which the caller gives none."""
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    restart_grace_s: float = 60.0
    """Seconds that a job whose devices are all lost waits for those that keep their memory in a file to restart; 0: not
    at all."""
    max_message: int = MAX_MESSAGE_BYTES
    max_communicators: int = MAX_COMMUNICATORS
    communicators_per_client: int = MAX_COMMUNICATORS // 2
    """Maximum number of communicators of one client, which is the host that calls: no client can use up all of them."""
    command: str = "hoop coordinator"
    """Command that started the coordinator, for advice in errors."""
    max_jobs: int = MAX_JOBS
    """Maximum number of jobs that run at the same time."""
    insecure: bool = False
    credentials: Credentials = field(default_factory=lambda: Credentials(Role.COORDINATOR))
    lab: bool = False
    """Whether the lab's calls are open to callers without a token."""
    metrics: Address | None = None
    """Address where Prometheus scrapes the coordinator (``metrics_endpoint``); None: nowhere."""


class Coordinator:
    """The membership state, the connections to devices, and the loop that checks their leases."""

    def __init__(self, config: CoordinatorConfig) -> None:
        check_exposure(Address(config.host, config.port), config.credentials, config.insecure, config.lab)
        if config.metrics is not None:
            check_metrics(config.metrics, config.credentials, config.insecure)
        self.config = config
        self.address = Address(config.host, config.port)
        self.events = EventLog(max_bytes=MAX_TEXT_BYTES, on_listener_error=self._listener_failed)
        self.memory: dict[int, pb.DeviceMemory] = {}
        self.activities: dict[int, Sequence[pb.TaskActivity]] = {}
        """Activity of each device's tasks, from the device's newest heartbeat."""
        self.state = State(config.detector, last_tick=time.monotonic())
        self._journal: Journal | None = None
        self._last_failure = ""
        self._failure: HoopError | None = None
        self._failed = asyncio.Event()
        self.stop_events: dict[tuple[int, int], asyncio.Event] = {}
        """Events by communicator and generation, each set when the operations of that generation must stop."""
        self.access_order = AccessOrder()
        """Order of the collectives and copies that were accepted and have not ended."""
        self._channels: dict[int, tuple[str, grpc.aio.Channel, pb_grpc.DeviceAsyncStub]] = {}
        credentials = config.credentials
        # The devices of a local cluster use no TLS, also where their coordinators do.
        self._processes = DeviceProcesses(self._on_process_seen, credentials.encrypted and not credentials.local)
        self._probing: set[int] = set()
        self._asking: set[str] = set()
        """Incarnations of the devices about which witnesses are being asked."""
        self._answered_at: dict[str, float] = {}
        """Time of the last probe that a device has answered, by incarnation."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners = Listeners[()](self._listener_failed)
        self._server: Server | None = None

    # ---- events of the state machine

    def apply(self, event: m.MembershipEvent) -> State:
        """Applies one event and carries out its instructions. If the rules or the journal raise, nothing changes."""
        state, instructions = step(self.state, event)
        entries = [one.entry for one in instructions if isinstance(one, m.Record)]
        if entries and self._journal is not None:
            self._journal.append(*entries)
        self.state = state
        if instructions:
            log.debug("%s -> %s", event, instructions)
        watched_changed = False
        for instruction in instructions:
            match instruction:
                case m.Announce(kind, text, fields):
                    self.events.publish(kind, text, **fields)
                    watched_changed |= kind in ("device_joined", "device_dead", "device_left")
                case m.Probe(device_id, witnesses):
                    self.in_background(self._probe(device_id, witnesses))
                case m.Stop():
                    if stop := self.stop_events.get((instruction.communicator_id, instruction.generation)):
                        stop.set()
                    self.in_background(self.abort(instruction))
        if watched_changed:
            self._watch_processes()
        if instructions or isinstance(event, m.Tick):
            self._listeners.call()
        return self.state

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls ``listener`` after every change of the state and every tick. Returns a function that unsubscribes."""
        return self._listeners.add(listener)

    def _listener_failed(self, text: str) -> None:
        self.events.publish("listener_failed", text)

    async def apply_with_retry(self, event: m.MembershipEvent) -> State:
        """``apply``; if the journal does not answer, tries again for ``JOURNAL_RETRY_S`` seconds."""
        until = time.monotonic() + JOURNAL_RETRY_S
        while True:
            try:
                return self.apply(event)
            except DeadlineExceeded:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _probe(self, device_id: int, witnesses: Sequence[int]) -> None:
        """Looks after the process of a device that is silent or suspect, and asks others if it learns nothing."""
        info, pause = self.state.members[device_id].info, self.config.detector.lease_s * PROBE_PAUSE
        if device_id in self._probing or time.monotonic() - self._answered_at.get(info.incarnation, -pause) < pause:
            return
        self._probing.add(device_id)
        try:
            probed = await self._processes.probe(info)
        finally:
            self._probing.discard(device_id)
        if probed.runs_at:
            self._answered_at[info.incarnation] = probed.runs_at
        self._on_process_seen(probed)
        if not (probed.runs_at or probed.failure or info.incarnation in self._asking or self._processes.sees(info)):
            self._asking.add(info.incarnation)
            try:
                await asyncio.gather(*(self._ask(witness, info) for witness in witnesses))
            finally:
                self._asking.discard(info.incarnation)

    async def _ask(self, witness: int, info: DeviceInfo) -> None:
        """Asks another device whether the server of a silent one answers it."""
        begun, request = time.monotonic(), pb.CheckLinksRequest(addresses=[str(info.address)])
        try:
            # Not by ``call``: a witness that is too slow is no evidence against the witness.
            answer = await self.device(witness).CheckLinks(request, timeout=WITNESS_S)
        except (grpc.RpcError, HoopError):
            return
        if list(answer.answers) == [True]:
            self._on_process_seen(m.Probed(info.device_id, info.incarnation, "", begun, True, witness))

    def _on_process_seen(self, probed: m.Probed) -> None:
        with contextlib.suppress(*JOURNAL_ERRORS):  # the next tick probes again
            self.apply(probed)

    def _watch_processes(self) -> None:
        """Watches the processes of all usable devices, and of no others."""
        usable = [member.info for member in self.state.members.values() if member.usable]
        incarnations = {info.incarnation for info in usable}
        self._processes.keep_only(incarnations)
        self._answered_at = {key: at for key, at in self._answered_at.items() if key in incarnations}
        for info in usable:
            self._processes.watch(info)

    async def abort(self, stop: m.Stop) -> None:
        """Sends Abort to every usable member. Returns when all have answered or timed out."""
        members = [device_id for device_id in stop.members if self.state.members[device_id].usable]
        request = pb.AbortRequest(
            communicator_id=stop.communicator_id,
            generation=stop.generation,
            reason=stop.reason,
            lost_device=stop.lost_device,
        )
        calls = (self.device(device_id).Abort(request, timeout=2.0) for device_id in members)
        await asyncio.gather(*calls, return_exceptions=True)

    # ---- devices

    def device(self, device_id: int) -> pb_grpc.DeviceAsyncStub:
        """The gRPC stub of a device. Its channel is kept while the device has the same incarnation."""
        info = self.state.member(device_id).info
        known = self._channels.get(device_id)
        if known is not None and known[0] == info.incarnation:
            return known[2]
        if known is not None:
            self.in_background(known[1].close(None))
        credentials = self.config.credentials
        options = channel_options(self.config.detector.lease_s, self.config.max_message + 65536)
        channel = credentials.aio_channel(info.address, Role.DEVICE, options)
        async_stub = cast("pb_grpc.DeviceAsyncStub", pb_grpc.DeviceStub(channel))
        self._channels[device_id] = (info.incarnation, channel, async_stub)
        return async_stub

    async def call(
        self, device_id: int, method: DeviceMethod[Request, Response], request: Request, timeout: float
    ) -> Response:
        """One call to a device, as in ``call(3, lambda device: device.StopTask, request, 5.0)``.

        Its outcome goes to the failure detector. A call whose connection breaks is made again while the device is
        usable, and done once.
        """
        member = self.state.member(device_id)
        repeatable, pause = make_repeatable(request), FIRST_PAUSE_S
        deadline = time.monotonic() + timeout
        while True:
            if not member.usable:
                raise PeerLost(f"{member.info} is {member.health}: {member.reason}")
            try:
                answer = await method(self.device(device_id))(request, timeout=max(0.0, deadline - time.monotonic()))
            except grpc.RpcError as error:
                if not unreachable(error):
                    raise translate(error, f"device {device_id}") from None
                failure, name = status_of(error), type(request).__name__.removesuffix("Request")
                with contextlib.suppress(*JOURNAL_ERRORS):  # nobody learns it now: the lease will expire
                    self.apply(m.CallReported(device_id, failure, time.monotonic()))
                lost = f"{member.info} was lost during {name}: {failure}"
                if not (repeatable and connection_broke(error) and time.monotonic() + pause < deadline):
                    raise PeerLost(lost, cause=PeerCause.DEVICE_LOST) from None
            else:
                self.apply(m.CallReported(device_id, "", time.monotonic()))
                return answer
            await asyncio.sleep(pause)  # meanwhile it is probed
            pause = min(2 * pause, MAX_PAUSE_S)
            incarnation, member = member.info.incarnation, self.state.member(device_id)
            if member.info.incarnation != incarnation or not member.usable:
                raise PeerLost(lost, cause=PeerCause.DEVICE_LOST)

    # ---- start and stop

    async def open(self) -> None:
        """Reads the journal. If another coordinator owns it, waits until that one has ended."""
        if self.config.journal is None:
            return
        loop = asyncio.get_running_loop()

        def on_lost(error: PeerLost) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        owner = f"the coordinator at {self.address} (pid {os.getpid()} on {socket.gethostname()})"

        waited = False

        def on_waiting(text: str) -> None:
            nonlocal waited
            waited = True
            self.events.publish("coordinator_waiting", text)

        self._journal = await _open_journal(self.config.journal, self.config.detector, owner, on_waiting, on_lost)
        self.state = self._journal.state
        if waited:
            usable = tuple(key for key, one in self.state.members.items() if one.usable)
            self.apply(m.HeartbeatSuspended(usable, time.monotonic() + REDISCOVERY_S))

    def _fail(self, error: HoopError) -> None:
        self._failure = self._failure or error
        self._failed.set()

    async def wait_failed(self) -> None:
        """Waits until this coordinator cannot go on, and raises why: another one owns the journal, or it has no server.

        The process must end then.
        """
        await self._failed.wait()
        assert self._failure is not None, "set before the event"
        raise self._failure

    async def _watch_server(self, server: Server) -> None:
        self._fail(await server.wait_failed())

    async def start(self, services: tuple[Any, ...], on_lab_refused: OnRefused) -> Address:
        for one in list(self.state.communicators.values()):
            # Launches of the previous coordinator may still run. A new generation keeps their messages apart from those
            # of new launches. Jobs are not launched from here: they go on.
            if not one.broken_by and one.id not in self.state.jobs:
                self.apply(m.Rebuilt(one.id))
        self._server = await serve(
            self.address,
            services,
            self.config.max_message,
            CallerCheck(self.config.credentials, self.config.lab, on_lab_refused),
        )
        self.address = self._server.address
        self.in_background(self._watch_server(self._server))
        self._watch_processes()
        self.in_background(self._tick_forever())
        self.events.publish("coordinator_started", f"coordinator at {self.address}, pid {os.getpid()}")
        return self.address

    async def _tick_forever(self) -> None:
        while True:
            try:
                self.apply(m.Tick(time.monotonic()))
            except HoopError as error:  # the journal's disk is full, or it does not answer: go on watching
                if self._last_failure != str(error):
                    self.events.publish("coordinator_failing", str(error))
                self._last_failure = str(error)
            else:
                self._last_failure = ""
            await asyncio.sleep(self.config.detector.heartbeat_s)

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs a coroutine as a task, which ``stop`` cancels."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        if self.config.credentials.local:  # of devices that were killed
            remove_stale(one.info.address.port for one in self.state.members.values())
        if self._server is not None:
            await self._server.stop(grace=0.2)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._processes.keep_only(set())
        for _, channel, _ in self._channels.values():
            await channel.close(None)
        if self._journal is not None:
            self._journal.close()


def journal_location(text: str, lease_s: float, tls: Path | None) -> JournalLocation:
    """The location of a journal: a path, or ``etcd://…``. ``lease_s`` and ``tls`` apply to etcd only."""
    return EtcdLocation.parse(text, lease_s, tls) if text.startswith(SCHEME) else Path(text)


async def _open_journal(
    location: JournalLocation,
    config: DetectorConfig,
    owner: str,
    on_waiting: Callable[[str], None],
    on_lost: Callable[[PeerLost], None],
) -> Journal:
    """Opens and reads a journal. Waits, without a deadline, for a journal in etcd that another coordinator owns.

    ``owner``: a description of this coordinator for others. ``on_waiting`` is called with a text while this one waits,
    ``on_lost`` when another coordinator has taken the journal over; both may be called from another thread.
    """
    if isinstance(location, Path):
        return FileJournal(location, config, time.monotonic())
    journal = EtcdJournal(location, owner, on_lost)
    try:
        await asyncio.to_thread(journal.open, config, on_waiting)
    except BaseException:
        journal.close()  # ends the wait of the thread
        raise
    return journal
