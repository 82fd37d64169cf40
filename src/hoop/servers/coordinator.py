"""The coordinator: knows who is in, watches them, and starts what they do together.

It decides nothing itself: every happening goes through ``membership.step``, and what that returns is
done here (journal, events, probes, aborts). No data passes through it but the lab's Memcpy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc

from hoop.errors import DeadlineExceeded, HoopError, PeerLost
from hoop.events import EventLog
from hoop.membership import events as m
from hoop.membership.failure_detector import DetectorConfig
from hoop.membership.journal import Journal
from hoop.membership.state import State
from hoop.membership.state_machine import MAX_COMMUNICATORS, step
from hoop.servers.grpc_server import check_exposure, serve
from hoop.servers.journal_store import JournalLocation, open_journal
from hoop.servers.memory_order import MemoryOrder
from hoop.texts import LONGEST
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.channels import MAX_MESSAGE_BYTES, channel_options
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import Role
from hoop.wire.service import Stub, status_of, translate, unreachable

DEVICE = pb.DESCRIPTOR.services_by_name["Device"]
PROBE_S = 0.5
FINDING_S = 5.0
"""How long members may need to find a coordinator that took over at another address."""
JOURNAL_S = 2.0
"""How long a change waits for a journal that is away, before it is refused."""
AGAIN_S = 0.1


@dataclass(frozen=True)
class CoordinatorConfig:
    """How a coordinator is set up."""

    host: str = "127.0.0.1"
    port: int = 0
    journal: JournalLocation | None = None
    count_unit: str = "bytes"
    """What ``count`` means in the lab's AllReduce: ``bytes``, or ``elements`` of float64."""
    timeout_s: float = 60.0
    """How long an operation may take, where the caller does not say."""
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    reunion_s: float = 60.0
    """How long a job whose devices are all lost waits for those that keep their memory in a file; 0: not at all."""
    max_message: int = MAX_MESSAGE_BYTES
    max_communicators: int = MAX_COMMUNICATORS
    communicators_per_client: int = MAX_COMMUNICATORS // 2
    """A client is the machine that calls: none can take what others need."""
    insecure: bool = False
    credentials: Credentials = field(default_factory=lambda: Credentials(Role.COORDINATOR))


class Coordinator:
    """The coordinator's state, its devices, and the loop that watches them."""

    def __init__(self, config: CoordinatorConfig) -> None:
        check_exposure(Address(config.host, config.port), config.credentials, config.insecure)
        self.config = config
        self.address = Address(config.host, config.port)
        self.events = EventLog(longest=LONGEST)
        self.memory: dict[int, pb.DeviceMemory] = {}
        self.state = State(config.detector, last_tick=time.monotonic())
        self._journal: Journal | None = None
        self._failing = ""
        self._lost: PeerLost | None = None
        self._over = asyncio.Event()
        self.stops: dict[tuple[int, int], asyncio.Event] = {}
        """Set when a communicator's generation must stop what it does."""
        self.order = MemoryOrder()
        """Collectives and copies that were accepted and have not ended."""
        self._channels: dict[int, tuple[str, grpc.aio.Channel, Stub]] = {}
        self._probing: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: dict[object, Callable[[], None]] = {}
        self._server: grpc.aio.Server | None = None

    # ---- the state machine's hands

    def apply(self, message: m.MembershipEvent) -> State:
        """One step, and what it asks for. Raises what the rules or the journal raise, with nothing changed."""
        state, instructions = step(self.state, message)
        entries = [one.entry for one in instructions if isinstance(one, m.Record)]
        if entries and self._journal is not None:
            self._journal.append(*entries)
        self.state = state
        for instruction in instructions:
            match instruction:
                case m.Announce(kind, text, fields):
                    self.events.publish(kind, text, **fields)
                case m.Probe(device_id):
                    self.in_background(self._probe(device_id))
                case m.Stop():
                    if event := self.stops.get((instruction.communicator_id, instruction.generation)):
                        event.set()
                    self.in_background(self.abort(instruction))
        if instructions or isinstance(message, m.Tick):
            for listener in list(self._listeners.values()):
                listener()
        return self.state

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Calls ``listener`` after every change of the state, and with every tick; returns the way out."""
        key = object()
        self._listeners[key] = listener
        return lambda: self._listeners.pop(key, None) and None

    async def change(self, message: m.MembershipEvent) -> State:
        """``apply``, for who can wait: a journal that is away is tried again, for a while."""
        until = time.monotonic() + JOURNAL_S
        while True:
            try:
                return self.apply(message)
            except DeadlineExceeded:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(AGAIN_S)

    async def _probe(self, device_id: int) -> None:
        """Asks a suspect directly. A refused connection is proof; anything else is the lease's business."""
        if device_id in self._probing:
            return
        info = self.state.members[device_id].info
        failure = ""
        self._probing.add(device_id)
        try:
            _, writer = await asyncio.wait_for(
                asyncio.open_connection(info.address.host, info.address.port), PROBE_S
            )
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        except (ConnectionRefusedError, ConnectionResetError) as error:
            failure = f"{info.address} refuses connections ({error.strerror or error})"
        except (OSError, UnicodeError):  # too slow, or trouble of our own: no evidence against the device
            return
        finally:
            self._probing.discard(device_id)
        with contextlib.suppress(DeadlineExceeded):  # the journal is away: a suspect is asked again
            self.apply(m.Probed(device_id, info.incarnation, failure))

    async def abort(self, stop: m.Stop) -> None:
        """Tells every member that still lives to stop; returns when they have been told."""
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

    def device(self, device_id: int) -> Stub:
        """The services of a device, on a channel that is kept while the device lives."""
        info = self.state.member(device_id).info
        known = self._channels.get(device_id)
        if known is not None and known[0] == info.incarnation:
            return known[2]
        if known is not None:
            self.in_background(known[1].close(None))
        credentials = self.config.credentials
        channel = credentials.aio_channel(
            info.address, Role.DEVICE, channel_options(self.config.max_message + 65536)
        )
        stub = Stub(channel, DEVICE, credentials.metadata)
        self._channels[device_id] = (info.incarnation, channel, stub)
        return stub

    async def call(self, device_id: int, method: str, request: Any, timeout: float) -> Any:
        """One call to a device; how it goes is evidence of the device's health."""
        member = self.state.member(device_id)
        if not member.usable:
            raise PeerLost(f"{member.info} is {member.health}: {member.reason}")
        try:
            answer = await getattr(self.device(device_id), method)(request, timeout=timeout)
        except grpc.RpcError as error:
            if unreachable(error):
                failure = status_of(error)
                with contextlib.suppress(DeadlineExceeded):  # the journal is away: silence tells it again
                    self.apply(m.CallReported(device_id, failure, time.monotonic()))
                raise PeerLost(f"{member.info} was lost during {method}: {failure}") from None
            raise translate(error, f"device {device_id}") from None
        self.apply(m.CallReported(device_id, "", time.monotonic()))
        return answer

    # ---- life

    async def open(self) -> None:
        """Reads the journal; where another coordinator owns it, waits for that one's end."""
        if self.config.journal is None:
            return
        loop = asyncio.get_running_loop()

        def lost(error: PeerLost) -> None:
            self._lost = error
            loop.call_soon_threadsafe(self._over.set)

        who = f"the coordinator at {self.address} (pid {os.getpid()} on {socket.gethostname()})"

        waited = False

        def waiting(text: str) -> None:
            nonlocal waited
            waited = True
            self.events.publish("coordinator_waiting", text)

        self._journal = await open_journal(self.config.journal, self.config.detector, who, waiting, lost)
        self.state = self._journal.state
        if waited:
            there = tuple(key for key, one in self.state.members.items() if one.usable)
            self.apply(m.Excused(there, time.monotonic() + FINDING_S))

    async def lost(self) -> None:
        """Waits for the journal to become another coordinator's, and raises that."""
        await self._over.wait()
        assert self._lost is not None, "set before the event"
        raise self._lost

    async def start(self, services: tuple[Any, ...]) -> Address:
        for one in list(self.state.communicators.values()):
            # What a former coordinator launched may still run: it must not meet, on the same links, what this one will.
            # A job is not launched from here: it goes on.
            if not one.broken_by and one.id not in self.state.jobs:
                self.apply(m.Rebuilt(one.id))
        self._server, self.address = await serve(
            self.address, services, self.config.max_message, self.config.credentials
        )
        self.in_background(self._watch())
        self.events.publish("coordinator_started", f"coordinator at {self.address}, pid {os.getpid()}")
        return self.address

    async def _watch(self) -> None:
        while True:
            try:
                self.apply(m.Tick(time.monotonic()))
            except (
                HoopError
            ) as error:  # the journal's disk is full, or it is away: watching must go on all the same
                if self._failing != str(error):
                    self.events.publish("coordinator_failing", str(error))
                self._failing = str(error)
            else:
                self._failing = ""
            await asyncio.sleep(self.config.detector.heartbeat_s)

    def in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=0.2)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _, channel, _ in self._channels.values():
            await channel.close(None)
        if self._journal is not None:
            self._journal.close()
