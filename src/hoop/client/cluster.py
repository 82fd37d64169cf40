"""A client's standing with the coordinator: when the client is gone, however it went, what it made is freed.

The way in: a running coordinator and its devices.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import grpc

from hoop.client.communicator import Communicator
from hoop.client.device import Device, location
from hoop.client.handle import call
from hoop.client.jobs import JobHandle
from hoop.errors import DeadlineExceeded, InvalidArgument, NotFound
from hoop.events import Event
from hoop.signals import signals_held
from hoop.texts import printable
from hoop.topology import Address, Addresses, DeviceInfo
from hoop.wire.auth import Credentials, find
from hoop.wire.channels import STAGING, Backoff, channel_options
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import Role
from hoop.wire.service import Stub, device_info, status_of, translate, unreachable


class Session:
    """Held open while the client lives; opened again when it breaks on the way."""

    def __init__(self, stub: Stub, whom: str) -> None:
        self.id = secrets.token_hex(8)
        self._stub, self._whom = stub, whom
        self._lock = threading.RLock()
        self._call: Any = None
        self._closed = False

    def hold(self) -> str:
        """Its id, which the coordinator knows when this returns."""
        with self._lock:
            if self._call is None and not self._closed:
                call = self._stub.Hold(pb.HoldRequest(session=self.id))
                try:
                    next(call)
                except grpc.RpcError as error:
                    raise translate(error, self._whom) from None
                self._call = call
                call.add_done_callback(self._broke)
        return self.id

    def _broke(self, call: Any) -> None:
        """Opens it again; that waits by itself until the coordinator is there."""
        with self._lock:
            if not self._closed and unreachable(call):
                self._call = self._stub.Hold(pb.HoldRequest(session=self.id), wait_for_ready=True)
                self._call.add_done_callback(self._broke)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            call, self._call = self._call, None
        if call is not None:
            call.cancel()


SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]


class Cluster:
    """A running coordinator and its devices, seen from a client."""

    opened: ClassVar[bool] = False
    """Whether this process has ever opened one: what gRPC starts does not survive a fork."""

    def __init__(self, address: Address | Addresses, timeout: float, credentials: Credentials) -> None:
        Cluster.opened = True
        self.address = address
        self._timeout = timeout
        self._credentials = credentials
        self._channel = credentials.channel(address, Role.COORDINATOR, channel_options())
        self._stub = Stub(self._channel, SERVICE, credentials.metadata)
        # A connection of its own: it knocks for as long as a coordinator is away, and calls are not to wait for that.
        self._holding = credentials.channel(address, Role.COORDINATOR, channel_options())
        holding = Stub(self._holding, SERVICE, credentials.metadata)
        self._session = Session(holding, f"the coordinator at {address}")
        self._devices: dict[str, Device] = {}

    def knock(self, patience: float) -> None:
        """Returns when the coordinator answers; raises if it does not within ``patience`` seconds."""
        knocking = Backoff("the coordinator", self.address, patience)
        for pause in knocking.pauses():
            try:
                self._stub.GetStatus(pb.GetStatusRequest(), timeout=min(self._timeout, 5.0))
                return
            except grpc.RpcError as error:
                if not unreachable(error):
                    raise translate(error, f"the coordinator at {self.address}") from None
                knocking.heard(status_of(error))
                time.sleep(pause)
        raise knocking.failure()

    def status(self) -> pb.GetStatusResponse:
        """Every device and communicator, as the coordinator sees them now."""
        answer: pb.GetStatusResponse = self._call("GetStatus", pb.GetStatusRequest())
        return answer

    def communicator(self, devices: int | Sequence[int]) -> Communicator:
        """A communicator of so many devices, or of exactly those with these ids, in rank order."""
        ids = [devices] if isinstance(devices, int) else list(devices)
        if any(not 0 <= one < 2**32 for one in ids):
            raise InvalidArgument(f"devices: {devices} is neither a number of devices nor their ids")
        count, exactly = (devices, []) if isinstance(devices, int) else (0, ids)
        session = self._session.hold()
        request = pb.CreateCommunicatorRequest(devices=count, device_ids=exactly, session=session)
        answer = self._call("CreateCommunicator", request)
        return Communicator(self._stub, answer.communicator, self._known, self._timeout, session)

    def staged(self) -> str:
        """A name for memory on devices that is freed with this client, however it ends."""
        return f"{STAGING}{self._session.hold()}.{secrets.token_hex(8)}"

    def device(self, device_id: int) -> Device:
        """One device, for its memory."""
        for member in self.status().devices:
            if member.device.device_id == device_id:
                return self._known(device_info(member.device))
        raise NotFound(f"device {device_id} is unknown to the coordinator at {self.address}")

    def wait_for_devices(self, count: int, patience: float = 60.0) -> None:
        """Returns when so many devices are alive."""
        deadline = time.monotonic() + patience
        with signals_held():
            stream = self._stub.WatchEvents(pb.WatchEventsRequest(follow=True), timeout=patience)
        try:
            for _ in stream:
                if sum(one.state == "alive" for one in self.status().devices) >= count:
                    return
        except grpc.RpcError as error:
            if time.monotonic() < deadline:
                raise translate(error, f"the coordinator at {self.address}") from None
        finally:
            stream.cancel()
        raise DeadlineExceeded(f"{count} devices were not all there within {patience:g} s at {self.address}")

    def copy(
        self,
        source: tuple[int, int | str],
        destination: tuple[int, int | str],
        size: int,
    ) -> None:
        """Device to device: each end is a device's id and an address or a buffer's name."""
        request = pb.CopyRequest(
            source_device=source[0],
            source=location(source[1]),
            destination_device=destination[0],
            destination=location(destination[1]),
            bytes=size,
        )
        self._call("Copy", request)

    def start_job(self, settings: str, device_ids: Sequence[int], resume: str = "") -> JobHandle:
        """Trains by these settings (JSON) on these devices; ``resume`` names a buffer that all of them have."""
        whom = f"the coordinator at {self.address}"
        return JobHandle.start(
            self._stub, settings, list(device_ids), resume, self._timeout, whom, self.knock
        )

    def job_settings(self, job_id: int) -> str:
        """The settings (JSON) that a job was started with."""
        return str(self._call("GetJob", pb.GetJobRequest(job_id=job_id)).job.settings)

    def job(self, job_id: int) -> JobHandle:
        """A job that somebody started."""
        return JobHandle(self._stub, job_id, self._timeout, f"the coordinator at {self.address}", self.knock)

    def events(self, after: int = 0, follow: bool = False) -> Iterator[Event]:
        """What happened since the event numbered ``after``; with ``follow``, also what happens from now on."""
        with signals_held():
            stream = self._stub.WatchEvents(pb.WatchEventsRequest(after=after, follow=follow))
        try:
            for event in stream:
                fields = {printable(key): printable(value) for key, value in event.fields.items()}
                yield Event(event.sequence, event.time, printable(event.kind), printable(event.text), fields)
        except grpc.RpcError as error:
            raise translate(error, f"the coordinator at {self.address}") from None
        finally:
            stream.cancel()

    def _known(self, info: DeviceInfo) -> Device:
        if info.incarnation not in self._devices:
            self._devices[info.incarnation] = Device(info, self._timeout, self._credentials)
        return self._devices[info.incarnation]

    def _call(self, method: str, request: object) -> Any:
        return call(getattr(self._stub, method), request, self._timeout, f"the coordinator at {self.address}")

    def close(self) -> None:
        self._session.close()
        for device in self._devices.values():
            device.close()
        self._holding.close()
        self._channel.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def connect(
    address: str | Address | Addresses,
    patience: float = 10.0,
    timeout: float = 60.0,
    *,
    token: str | None = None,
    tls: str | os.PathLike[str] | None = None,
    credentials: Credentials | None = None,
) -> Cluster:
    """The cluster whose coordinator is at ``host:port``; knocks for up to ``patience`` seconds.

    Where a second coordinator stands by: ``host:port,host:port``. Whichever answers is called.

    A cluster beyond this machine wants to know who calls: ``token``, or ``tls``, a folder that ``hoop certs`` made;
    where neither is given, what HOOP_TOKEN, HOOP_TOKEN_FILE or HOOP_TLS says (SECURITY.md).

    >>> with hoop.connect("127.0.0.1:4021") as cluster:
    ...     comm = cluster.communicator(3)
    ...     sums = comm.all_reduce([a, b, c])
    """
    address = Addresses.parse(address) if isinstance(address, str) else address
    credentials = credentials or find(Role.CLIENT, token, tls=Path(tls) if tls else None)
    cluster = Cluster(address, timeout, credentials)
    try:
        cluster.knock(patience)
        return cluster
    except BaseException:
        cluster.close()
        raise
