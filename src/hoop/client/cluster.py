"""The client's connection to a cluster: a running coordinator and its devices.

``connect`` returns a ``Cluster``. Its ``Session`` is a stream that stays open while the client lives; when it ends, for
whatever reason, the coordinator frees the client's communicators and staging buffers.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from grpc.experimental import ChannelOptions

from hoop.client.communicator import Communicator
from hoop.client.device import Device, location
from hoop.client.handle import call
from hoop.client.jobs import JobHandle
from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument, NotFound, PeerLost, Unauthenticated
from hoop.events import Event
from hoop.signals import defer_signals
from hoop.texts import printable
from hoop.topology import Address, Addresses, DeviceInfo
from hoop.wire.auth import Credentials, find_credentials
from hoop.wire.channels import NO_COORDINATOR, STAGING_PREFIX, Backoff, Options, channel_options, default_lease_s
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc
from hoop.wire.job_settings import check_settings
from hoop.wire.local_sockets import has_socket
from hoop.wire.roles import Role
from hoop.wire.service import device_info, status_of, translate, unreachable, was_cancelled

CONNECT_S = 1.0
"""Seconds after which a coordinator that does not refuse a connection counts as slow."""
EVENT_STREAM_ATTEMPTS = 5
"""Number of times that a stream of events that gRPC has cancelled is opened again without an event in between."""
EVENT_STREAM_BACKOFF_S = 0.1
"""Linear backoff: seconds added to the wait with each attempt."""
BACKGROUND_OPTIONS: Options = [(ChannelOptions.SingleThreadedUnaryStream, 1)]
"""gRPC options of a channel whose streams are read in the background. The thread that reads a stream waits for its
events by itself. By default gRPC wakes that thread up ten times a second, and has a thread of its own, which wakes up
five times a second."""
DRAIN_AGAIN_S = 0.2
"""Seconds between two attempts to drain a device again."""
START_JOB_S = 60.0
"""Shortest time limit of the start of a job."""
EXAMINE_S = 600.0
"""Seconds that the hosts of a cluster may take to examine themselves."""


class Session:
    """A stream that stays open while this client lives. It is reopened when the connection breaks."""

    def __init__(self, stub: pb_grpc.CoordinatorStub, peer: str) -> None:
        self.id = secrets.token_hex(8)
        self._stub, self._peer = stub, peer
        self._lock = threading.RLock()
        self._call: Any = None
        self._closed = False

    def ensure_open(self) -> str:
        """Open the stream if it is not open; returns the session id, which the coordinator then knows."""
        with self._lock:
            if self._call is None and not self._closed:
                call: Any = self._stub.KeepSession(pb.KeepSessionRequest(session=self.id))
                try:
                    next(call)
                except grpc.RpcError as error:
                    raise translate(error, self._peer) from None
                self._call = call
                call.add_done_callback(self._reopen)
        return self.id

    def _reopen(self, call: Any) -> None:
        """Open the stream again after a transport failure; gRPC waits until the coordinator is reachable."""
        with self._lock:
            if not self._closed and unreachable(call):
                self._call = self._stub.KeepSession(pb.KeepSessionRequest(session=self.id), wait_for_ready=True)
                self._call.add_done_callback(self._reopen)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            call, self._call = self._call, None
        if call is not None:
            call.cancel()


@dataclass(frozen=True)
class DrainProgress:
    """What a drain waits for (``Cluster.drain``)."""

    stage: str
    """How far a job is: ``waiting`` (no device can take over yet), ``loading`` (one loads the job), ``moving`` (the
    ranks go on without the device), ``handed_over``; then how far the device is: ``leaving``, ``left``.
    ``interrupted``: the coordinator has stopped answering."""
    job: int
    """Id of the job; 0: no job."""
    devices: tuple[int, ...]
    """Ids of the devices that load the job; only in stage ``loading``."""
    seconds: float
    text: str


class Cluster:
    """A running coordinator and its devices."""

    def __init__(
        self,
        address: Address | Addresses,
        timeout: float,
        credentials: Credentials,
        background: bool = False,
        lease_s: float | None = None,
    ) -> None:
        """``background``: see ``connect``. ``lease_s``: the cluster's, from which the limits of connections follow;
        None: the default of its address."""
        self.address, self._peer = address, f"the coordinator at {address}"
        self._timeout = timeout
        self._credentials = credentials
        self.lease_s = default_lease_s(address) if lease_s is None else lease_s
        options = channel_options(self.lease_s) + (BACKGROUND_OPTIONS if background else [])
        self._channel = credentials.channel(address, Role.COORDINATOR, options)
        self._stub = pb_grpc.CoordinatorStub(self._channel)
        # A separate channel: it keeps reconnecting while the coordinator is down; other calls must not wait for that.
        self._session_channel = credentials.channel(address, Role.COORDINATOR, channel_options(self.lease_s))
        session_stub = pb_grpc.CoordinatorStub(self._session_channel)
        self._session = Session(session_stub, f"the coordinator at {address}")
        self._devices: dict[str, Device] = {}

    def wait_ready(self, timeout: float) -> pb.GetStatusResponse:
        """Its status, when the coordinator answers; raises DeadlineExceeded after ``timeout`` seconds."""
        backoff = Backoff("the coordinator", self.address, timeout, NO_COORDINATOR)
        for delay in backoff.delays():
            try:
                status: pb.GetStatusResponse = self._stub.GetStatus(
                    pb.GetStatusRequest(), timeout=min(self._timeout, 5.0)
                )
                return status
            except grpc.RpcError as error:
                if not unreachable(error):
                    raise translate(error, f"the coordinator at {self.address}") from None
                self._credentials.check_coordinator(self.address)
                backoff.record_failure(status_of(error))
                time.sleep(delay)
        raise backoff.timeout_error()

    def status(self) -> pb.GetStatusResponse:
        """The current devices and communicators of the coordinator."""
        answer: pb.GetStatusResponse = self._call("GetStatus", pb.GetStatusRequest())
        return answer

    def examine_hosts(self, job: str = "") -> list[pb.HostExamination]:
        """What ``hoop doctor`` finds on every host that has devices; with ``job``, also whether its data is there."""
        request = pb.ExamineHostsRequest(job=job)
        answer = call(self._stub.ExamineHosts, request, EXAMINE_S, f"the coordinator at {self.address}")
        return list(answer.hosts)

    def communicator(self, devices: int | Sequence[int]) -> Communicator:
        """Create a communicator of ``devices`` devices, or of the devices with these ids in rank order."""
        ids = [devices] if isinstance(devices, int) else list(devices)
        if any(not 0 <= one < 2**32 for one in ids):
            raise InvalidArgument(f"devices: {devices} is neither a number of devices nor their ids")
        count, device_ids = (devices, []) if isinstance(devices, int) else (0, ids)
        session = self._session.ensure_open()
        request = pb.CreateCommunicatorRequest(devices=count, device_ids=device_ids, session=session)
        answer = self._call("CreateCommunicator", request)
        return Communicator(self._stub, answer.communicator, self._device, self._timeout, session, self._ended)

    def staging_name(self) -> str:
        """A new name for device buffers that the coordinator frees when this client ends."""
        return f"{STAGING_PREFIX}{self._session.ensure_open()}.{secrets.token_hex(8)}"

    def stage(self, data: bytes, device_ids: Sequence[int]) -> str:
        """Write these bytes into a new buffer of each device; return its name, for ``start_job(resume=…)``."""
        name = self.staging_name()
        for device_id in device_ids:
            device = self.device(device_id)
            device.allocate(name, len(data))
            device.write(name, data)
        return name

    def device(self, device_id: int) -> Device:
        """The device with this id; raises NotFound."""
        for member in self.status().devices:
            if member.device.device_id == device_id:
                return self._device(device_info(member.device))
        raise NotFound(f"device {device_id} is unknown to the coordinator at {self.address}")

    def wait_for_devices(self, count: int, timeout: float = 60.0) -> None:
        """Return when ``count`` devices are alive; raises DeadlineExceeded after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with defer_signals():
            stream = self._stub.WatchEvents(pb.WatchEventsRequest(follow=True), timeout=timeout)
        try:
            for _ in stream:
                if sum(one.state == "alive" for one in self.status().devices) >= count:
                    return
        except grpc.RpcError as error:
            if time.monotonic() < deadline:
                raise translate(error, f"the coordinator at {self.address}") from None
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leave it untyped
        raise DeadlineExceeded(f"{count} devices were not all there within {timeout:g} s at {self.address}")

    def drain(
        self,
        device_id: int,
        timeout: float = 60.0,
        progress: Callable[[DrainProgress], None] | None = None,
        exit_code: int = 0,
        coordinator_timeout: float = 60.0,
    ) -> None:
        """Move the work of a device to others and make it leave; return when it has left.

        Each of its jobs moves to another device: one without work, or one that joins within ``timeout`` seconds. If
        there is none, the job goes on with its other devices, if its strategy can. A device that is loading the job is
        waited for. Raises, and leaves everything as it was, if a job cannot go on without this device. An exception in
        ``progress`` (Ctrl-C, for example) cancels the drain: the device keeps its work. ``exit_code``: of the device's
        process, if it is a rank that a scheduler started; ``hoop device`` ends with 0.

        A coordinator that ends forgets the drain. Waits up to ``coordinator_timeout`` seconds for it to be back, and
        drains the device again.
        """
        if not 0 < device_id < 2**64:
            raise InvalidArgument(f"device: {device_id} is no device id; hoop status lists them")
        deadline, stage, again_until = time.monotonic() + timeout, "", 0.0

        def show(found: DrainProgress) -> None:
            nonlocal stage
            stage = found.stage
            if progress is not None:
                progress(found)

        while stage != "left":
            left_s = max(0.0, deadline - time.monotonic())
            request = pb.DrainDeviceRequest(device_id=device_id, timeout_s=left_s, exit_code=exit_code)
            try:
                self._follow_drain(request, show)
                if stage != "left":
                    raise PeerLost(f"{self._peer} ended the drain of device {device_id} without a reason")
            except grpc.RpcError as error:
                if unreachable(error):
                    self._wait_for_restart(device_id, status_of(error), coordinator_timeout, progress)
                    again_until = time.monotonic() + coordinator_timeout
                    continue
                found = self._state_of(device_id) if again_until else ""
                if stage == "leaving" and again_until and found not in ("alive", "suspect", "draining"):
                    return  # the device had been asked to leave before the coordinator ended
                if found != "draining" or time.monotonic() > again_until:
                    raise translate(error, self._peer) from None
                time.sleep(DRAIN_AGAIN_S)  # only the connection broke: the coordinator cancels the first call soon

    def _follow_drain(self, request: pb.DrainDeviceRequest, show: Callable[[DrainProgress], None]) -> None:
        with defer_signals():
            stream = self._stub.DrainDevice(request)
        try:
            for one in stream:
                devices, text = tuple(one.device_ids), printable(one.text)
                show(DrainProgress(printable(one.stage), one.job_id, devices, one.seconds, text))
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leave it untyped

    def _wait_for_restart(
        self, device_id: int, reason: str, timeout: float, progress: Callable[[DrainProgress], None] | None
    ) -> None:
        """Wait for a coordinator that stopped answering in the middle of a drain."""
        text = f"{self._peer} does not answer ({reason}); the drain of device {device_id} goes on when it is back"
        if progress is not None:
            progress(DrainProgress("interrupted", 0, (), 0.0, text))
        try:
            self.wait_ready(timeout)
        except DeadlineExceeded as error:
            raise PeerLost(
                f"{error}, which ended the drain of device {device_id}; drain it again if hoop status still lists it "
                "as alive"
            ) from None

    def _state_of(self, device_id: int) -> str:
        """The state of a device in ``status``; empty if the coordinator does not know it."""
        states = (one.state for one in self.status().devices if one.device.device_id == device_id)
        return next(states, "")

    def copy(self, source: tuple[int, int | str], destination: tuple[int, int | str], size: int) -> None:
        """Copy ``size`` bytes between devices. Each end is a device id and an address or a buffer name."""
        request = pb.CopyRequest(
            source_device=source[0],
            source=location(source[1]),
            destination_device=destination[0],
            destination=location(destination[1]),
            bytes=size,
        )
        self._call("Copy", request)

    def start_job(self, settings: str, device_ids: Sequence[int], resume: str = "") -> JobHandle:
        """Start a training job with ``settings`` (JSON) on these devices.

        ``resume``: name of a buffer on all of them that holds the checkpoint to resume from.
        """
        check_settings(settings)
        request = pb.StartJobRequest(settings=settings, device_ids=device_ids, resume=resume)
        answer = call(self._stub.StartJob, request, max(self._timeout, START_JOB_S), self._peer, self._ended)
        job = self.job(answer.job_id)
        job.device_ids = list(answer.device_ids)
        return job

    def job_settings(self, job_id: int) -> str:
        """The settings (JSON) that a job was started with."""
        return str(self._call("GetJob", pb.GetJobRequest(job_id=job_id)).job.settings)

    def job(self, job_id: int) -> JobHandle:
        """A handle for a job that was started before."""
        return JobHandle(self._stub, job_id, self._timeout, f"the coordinator at {self.address}", self.wait_ready)

    def events(self, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """The coordinator's events with a sequence number above ``after``; with ``follow`` the stream does not end.

        A stream that gRPC cancels, though neither side asked for it, is opened again after the last event.
        """
        attempts = 0
        while True:
            try:
                for event in self._event_stream(after, follow):
                    after, attempts = event.sequence, 0
                    yield event
                return
            except grpc.RpcError as error:
                attempts += 1
                if not was_cancelled(error) or attempts > EVENT_STREAM_ATTEMPTS:
                    raise translate(error, f"the coordinator at {self.address}") from None
            time.sleep(EVENT_STREAM_BACKOFF_S * attempts)

    def _event_stream(self, after: int, follow: bool) -> Iterator[Event]:
        with defer_signals():
            stream = self._stub.WatchEvents(pb.WatchEventsRequest(after=after, follow=follow))
        try:
            for event in stream:
                fields = {printable(key): printable(value) for key, value in event.fields.items()}
                yield Event(event.sequence, event.time, printable(event.kind), printable(event.text), fields)
        finally:
            stream.cancel()  # type: ignore[no-untyped-call]  # grpc-stubs leave it untyped

    def _device(self, info: DeviceInfo) -> Device:
        if info.incarnation not in self._devices:
            self._devices[info.incarnation] = Device(
                info, self._timeout, self._credentials, self.lease_s, partial(self._is_lost, info.incarnation)
            )
        return self._devices[info.incarnation]

    def _call(self, method: str, request: object) -> Any:
        return call(getattr(self._stub, method), request, self._timeout, self._peer, self._ended)

    def _ended(self) -> bool:
        """Whether no coordinator listens any more: its host refuses the connection."""
        for address in self.address.addresses:
            try:
                socket.create_connection((address.host, address.port), CONNECT_S).close()
            except ConnectionRefusedError:
                continue
            except OSError:
                return False  # it may be slow, or cut off
            return False
        return True

    def _is_lost(self, incarnation: str) -> bool:
        """Whether the coordinator says that a device is dead or has left, or cannot say."""
        try:
            members = self.status().devices
        except HoopError:
            return True
        return not any(
            member.device.incarnation == incarnation and member.state in ("alive", "suspect", "draining")
            for member in members
        )

    def close(self) -> None:
        self._session.close()
        for device in self._devices.values():
            device.close()
        self._session_channel.close()
        self._channel.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    address: str | Address | Addresses,
    connect_timeout: float = 10.0,
    timeout: float = 60.0,
    *,
    token: str | None = None,
    tls: str | os.PathLike[str] | None = None,
    credentials: Credentials | None = None,
    background: bool = False,
) -> Cluster:
    """Connect to the cluster whose coordinator is at ``address`` (``host:port``).

    With a standby coordinator ``address`` is ``host:port,host:port``; the client calls the one that answers.

    ``connect_timeout``: seconds to wait for the coordinator's first answer. ``timeout``: seconds of each later call.

    A cluster that listens beyond this machine authenticates its callers: give ``token``, or ``tls``, a folder made by
    ``hoop certs``. The default is HOOP_TLS, HOOP_TOKEN or HOOP_TOKEN_FILE. Your own coordinator on this machine needs
    none of them (SECURITY.md).

    ``background``: the client follows events in threads beside devices that train, and wakes up for events only. Do not
    use it if the main thread reads a stream: a signal handler would not run until the next event.

    >>> with hoop.connect("127.0.0.1:4021") as cluster:
    ...     comm = cluster.communicator(3)
    ...     sums = comm.all_reduce([a, b, c])
    """
    address = Addresses.parse(address) if isinstance(address, str) else address
    credentials = credentials or find_credentials(Role.CLIENT, token, tls=Path(tls) if tls else None)
    if credentials.required:
        return _open(address, connect_timeout, timeout, credentials, background)
    own = Credentials.of_user(Role.CLIENT, address) if has_socket(address) else credentials
    try:
        return _open(address, connect_timeout, timeout, own, background)
    except Unauthenticated:
        if own.local or not has_socket(address):  # else a coordinator has started meanwhile
            raise
        return _open(address, connect_timeout, timeout, Credentials.of_user(Role.CLIENT, address), background)


def _open(
    address: Address | Addresses, connect_timeout: float, timeout: float, credentials: Credentials, background: bool
) -> Cluster:
    cluster = Cluster(address, timeout, credentials, background)
    try:
        lease_s = cluster.wait_ready(connect_timeout).lease_s
    except BaseException:
        cluster.close()
        raise
    if lease_s in (0.0, cluster.lease_s):  # 0: a coordinator of before, which does not say it
        return cluster
    cluster.close()
    return Cluster(address, timeout, credentials, background, lease_s)
