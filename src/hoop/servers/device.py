"""A device server: an arena, its transports, and the gRPC services that use them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hoop.environment import processor, versions
from hoop.errors import (
    FailedPrecondition,
    HoopError,
    InvalidArgument,
    OutOfMemory,
    ResourceExhausted,
)
from hoop.host_processes import own_process
from hoop.memory import Arena, DeviceMemory
from hoop.memory.cuda_arena import GpuMemory
from hoop.memory.gpu_driver import open_gpu
from hoop.memory.storage import default_directory
from hoop.resources import arena_shortage, available_memory, in_memory
from hoop.servers import device_service, lab_device
from hoop.servers.advertised_address import check_reachable, host_towards, routes_to
from hoop.servers.device_processes import ServerProbe
from hoop.servers.grpc_server import CallerCheck, ClientReports, Server, check_exposure, serve
from hoop.servers.heartbeat import HeartbeatClient
from hoop.servers.lab_dialect import Dialect
from hoop.servers.lab_streams import MAX_OPEN, StreamTable
from hoop.servers.metrics_options import check_metrics
from hoop.servers.operation_runner import OperationRunner
from hoop.servers.tasks import Tasks, TrainFunction
from hoop.texts import printable
from hoop.topology import Address, Addresses, DeviceInfo, PortRange
from hoop.transport.port_check import PortCheck
from hoop.transport.shm_listener import open_shm_transport
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.auth import Credentials
from hoop.wire.channels import MAX_MESSAGE_BYTES
from hoop.wire.roles import Role
from hoop.wire.service import Receiving, handlers

if TYPE_CHECKING:
    from hoop.servers.metrics_endpoint import MetricsEndpoint

log = logging.getLogger("hoop.servers")
UNREAD_RESULT_S = 10.0
"""Seconds that a device that leaves waits for a client to read what its jobs have trained."""
ID_LABEL = "device_id"
"""Label of the arena that stores the device id, so that a restarted device gets the same id."""


@dataclass(frozen=True)
class DeviceConfig:
    """The configuration of a device."""

    coordinator: Address | Addresses
    memory: int = 256 * 1024 * 1024
    grows: bool = False
    """Whether ``memory`` is the most that the arena may take, which it reserves as jobs need it."""
    host: str = "127.0.0.1"
    port: int | PortRange = 0
    """Port of the device's services, 0: any free one; or a range, of which it takes the first that is free."""
    data_port: int | PortRange = 0
    """Port of the links of other devices, 0: any free one; or a range, of which it takes the first that is free."""
    arena: Path | None = None
    """Arena file that survives the device; None: a file that is deleted with it."""
    device_id: int = 0
    """Id of the device; 0: the id in the arena's label, else the coordinator chooses one."""
    advertise: Address | None = None
    """Address at which peers reach its services, if it is not the listening address (a proxy, a NAT). A device that
    listens on all addresses (``0.0.0.0``) advertises the one from which it reaches the coordinator."""
    advertise_data: Address | None = None
    advertised_host: str = ""
    """Name or address at which peers reach this host, if it is not the one that the device listens on and its ports are
    the same there; empty: the one that it listens on."""
    checksums: bool = True
    """Whether TCP messages carry a checksum, and damaged ones are retransmitted."""
    join_timeout_s: float = 30.0
    max_message: int = MAX_MESSAGE_BYTES
    max_streams: int = MAX_OPEN
    lab_dialect: str = Dialect.STARTER
    """Dialect of the lab's clients, or ``auto``."""
    insecure: bool = False
    credentials: Credentials = field(default_factory=lambda: Credentials(Role.DEVICE))
    lab: bool = False
    """Whether the lab's calls are open to callers without a token."""
    accelerator: str = "cpu"
    """Kind of memory of the lab's calls and of named buffers: ``cpu``, ``auto``, ``cuda``, ``cuda:N`` or ``emulated``.
    Jobs choose for themselves."""
    jobs: Path | None = None
    """Folder with the code of jobs, for ``hoop doctor``; None: the current folder."""
    metrics: Address | None = None
    """Address where Prometheus scrapes the device (``metrics_endpoint``); None: nowhere."""


class DeviceServer:
    """A running device."""

    def __init__(
        self,
        config: DeviceConfig,
        trainer: TrainFunction | None = None,
        report: Callable[[str], None] = lambda _: None,
    ) -> None:
        """``report`` is called with a text about each of the lab's calls that is refused, and each wait to leave."""
        check_exposure(Address(config.host, 0), config.credentials, config.insecure, config.lab)
        if config.metrics is not None:
            check_metrics(config.metrics, config.credentials, config.insecure)
        self.config = config
        self._keeps_arena = config.arena is not None
        incarnation = secrets.token_hex(8)
        self._memory = open_memory(config)
        self._arena = self._memory.host if isinstance(self._memory, GpuMemory) else self._memory
        try:
            self._transport = _open_transport(config)
        except HoopError:
            close_memory(self._memory, config)
            raise
        self._shared = None if config.advertise_data else open_shm_transport(self._transport.address, self._arena)
        self._runner = OperationRunner(self._memory, self._transport, self._shared)
        self._streams = StreamTable(self._memory, self._runner.order_access, config.max_streams)
        self._lab = lab_device.LabDevice(
            self._memory,
            self._runner,
            self._streams,
            config.credentials,
            config.lab_dialect,
            config.max_message,
            config.lab,
        )
        self._on_report = report
        self._reports = ClientReports(self._report)
        self._tasks = Tasks(self._arena, self._memory, self._runner, trainer, self._keeps_arena)
        self._transport.on_damage = self._tasks.on_damage
        self._ports = PortCheck(config.credentials.link_key)
        self._service = device_service.DeviceService(
            self._memory,
            self._runner,
            self._streams,
            self._tasks,
            self._ports,
            ServerProbe(config.credentials.encrypted),
            config.jobs,
        )
        self._heartbeat_client = HeartbeatClient(
            config.coordinator, self._service.memory, config.credentials, self._tasks.stalls, self._tasks.activities
        )
        self._server: Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self.failure: HoopError | None = None
        """Why this device has no server any more, and so is dismissed; None: it has one."""
        self.metrics = None if config.metrics is None else self._metrics_endpoint(config.metrics)
        """Endpoint at which Prometheus scrapes this device; None if ``config.metrics`` is."""
        self._info = DeviceInfo(
            device_id=config.device_id or int(self._arena.label(ID_LABEL) or 0),
            address=Address(config.host, 0),
            data_address=config.advertise_data or self._transport.address,
            min_address=self._memory.min_address,
            max_address=self._memory.max_address,
            gpu=self._memory.gpu.name if isinstance(self._memory, GpuMemory) else "",
            host=printable(socket.gethostname(), 256),
            pid=os.getpid(),
            incarnation=incarnation,
            shared_address=self._shared.address if self._shared else None,
            keeps_memory=self._keeps_arena,
            processor=printable(processor(), 128),
            process=own_process(),
            **{f"{name}_version": printable(version, 64) for name, version in versions().items()},
        )

    def _metrics_endpoint(self, address: Address) -> MetricsEndpoint:
        from hoop.servers.device_metrics import DeviceCollector
        from hoop.servers.metrics_endpoint import MetricsEndpoint

        collector = DeviceCollector(
            info=lambda: self._info,
            arena=self._arena,
            memory=lambda: self._service.last_memory,
            tasks=self._tasks,
            heartbeats=self._heartbeat_client,
            transports=[one for one in (self._transport, self._shared) if one is not None],
        )
        return MetricsEndpoint(address, collector, None if address.is_loopback else self.config.credentials.token)

    @property
    def info(self) -> DeviceInfo:
        return self._info

    @property
    def dismissed(self) -> asyncio.Event:
        """Set when the coordinator asks this device to leave: it was drained (``hoop drain``)."""
        return self._heartbeat_client.dismissed

    @property
    def exit_code(self) -> int:
        """Exit code for this process, if a scheduler started it; valid when ``dismissed`` is set."""
        return self._heartbeat_client.exit_code

    @property
    def failed_heartbeats(self) -> int:
        """How often the coordinator could not be reached since this device joined."""
        return self._heartbeat_client.failures

    async def start(self) -> DeviceInfo:
        """Starts the services, joins the cluster, and starts the heartbeats. On failure it releases everything."""
        try:
            if self.metrics is not None:
                self.metrics.start()
            self._service.info = self._info
            receiving = Receiving()
            services = (
                handlers(lab_device.DEVICE_SERVICE, self._lab, receiving, self._reports.refused),
                handlers(device_service.SERVICE, self._service, receiving),
            )
            check = CallerCheck(self.config.credentials, self.config.lab, self._reports.refused)
            self._server = await serve(
                Address(self.config.host, 0),
                services,
                self.config.max_message,
                check,
                ports=_range(self.config.port),
            )
            info = await self._advertised(self._server.address)
            self._service.info = info
            self._info = await self._heartbeat_client.join(info, self.config.join_timeout_s)
        except (HoopError, asyncio.CancelledError):
            await self.stop()
            raise
        self._service.info = self._info
        self._lab.info = self._info
        if self._keeps_arena:
            self._arena.set_label(ID_LABEL, str(self._info.device_id))
        self._heartbeat_client.start()
        self._watch = asyncio.ensure_future(self._leave_without_server(self._server))
        if self.metrics is not None:
            self._report(f"metrics at {self.metrics.url}")
        return self._info

    async def _leave_without_server(self, server: Server) -> None:
        """A device that nobody can call any more leaves, whether its process ends at once or not."""
        self.failure = await server.wait_failed()
        self._report(str(self.failure))
        await self._heartbeat_client.dismiss(1)

    async def wait_failed(self) -> None:
        """Waits until this device has no server any more, and raises why. The process must end then."""
        assert self._server is not None, "it was started"
        raise await self._server.wait_failed()

    async def _advertised(self, listening: Address) -> DeviceInfo:
        """The device's description, with addresses at which the coordinator and other devices reach it."""
        config = self.config
        host = config.advertised_host or config.host
        if config.advertised_host:
            pass  # the user knows how others reach it, and the check that follows the join tries it
        elif listening.is_wildcard and not (config.advertise and config.advertise_data):
            host = await host_towards(config.coordinator, listening, config.join_timeout_s)
        elif listening.is_loopback and config.advertise is None:
            remote = [one for one in config.coordinator.addresses if not one.is_loopback]
            with contextlib.suppress(OSError, UnicodeError):  # no such name, no such network: the join reports it
                check_reachable(listening, await routes_to(remote))
        return dataclasses.replace(
            self._info,
            address=config.advertise or Address(host, listening.port),
            data_address=config.advertise_data or Address(host, self._transport.address.port),
        )

    def _report(self, text: str) -> None:
        self._on_report(f"device {self._info.device_id}: {text}")

    async def hand_over(self) -> None:
        """Waits until its jobs continue without it, or cannot, and until what they have trained was read."""
        if self.failure is not None:
            return  # it has no server: nobody can take over from it, or read
        if self._tasks.describe():
            await self._heartbeat_client.hand_over(self._report)
        if unread := self._tasks.unread_results():
            jobs = ", ".join(map(str, unread))
            self._report(
                f"no client has read the weights that job {jobs} has trained: waits {UNREAD_RESULT_S:g} s for: "
                f"hoop attach {unread[0]} --out DIR"
            )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNREAD_RESULT_S):
                while self._tasks.unread_results():
                    self._tasks.result_read.clear()
                    await self._tasks.result_read.wait()

    async def stop(self) -> None:
        """Leaves the cluster, ends all tasks and transfers, and releases everything."""
        if self._watch is not None:
            self._watch.cancel()
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.stop)
        await self._heartbeat_client.leave()
        self._tasks.close()
        self._transport.close()
        if self._shared is not None:
            self._shared.close()
        await self._lab.close()
        if self._server is not None:
            await self._server.stop(grace=0.2)
        await asyncio.to_thread(self._ports.close)
        await asyncio.to_thread(self._runner.close)
        close_memory(self._memory, self.config)


def open_memory(config: DeviceConfig) -> DeviceMemory:
    """The device's arena, with memory on a GPU where ``config.accelerator`` says so."""
    gpu = open_gpu(config.accelerator)
    arena = open_arena(config)
    if gpu is None:
        return arena
    try:
        return GpuMemory(arena, gpu, config.memory)
    except BaseException:
        arena.close(delete=config.arena is None)
        raise


def close_memory(memory: DeviceMemory, config: DeviceConfig) -> None:
    """Close what ``open_memory`` opened; an arena that does not survive the device is removed."""
    arena = memory
    if isinstance(memory, GpuMemory):
        arena = memory.host
        memory.close()
    assert isinstance(arena, Arena)
    arena.close(delete=config.arena is None)


def _range(port: int | PortRange) -> PortRange:
    return port if isinstance(port, PortRange) else PortRange(port, port)


def _open_transport(config: DeviceConfig) -> TcpTransport:
    """Listens for the links of other devices on the first free one of the data ports."""
    ports = _range(config.data_port)
    for port in ports.ports:
        try:
            return TcpTransport(Address(config.host, port), config.checksums, config.credentials.link_key)
        except InvalidArgument as error:
            failure = error
    if len(ports.ports) == 1:
        raise failure
    raise FailedPrecondition(
        f"--data-port: no port of {ports} is free on {config.host} ({failure}); give a larger range"
    )


def open_arena(config: DeviceConfig) -> Arena:
    """The arena in the given file, else a new one: in /dev/shm, or where that fails in the temporary directory.

    Devices that start at the same time all see the same free space in /dev/shm, and it may not be enough for all.
    """
    if config.arena is not None:
        if not config.arena.exists():
            _check_memory(config.memory, config.arena.parent)
        return Arena.open_or_create(config.arena, config.memory)
    if not config.grows:
        _check_memory(config.memory, default_directory(config.memory))
    name = f"hoop-{os.getpid()}-{secrets.token_hex(8)}.arena"
    folder, other = default_directory(config.memory), Path(tempfile.gettempdir())
    try:
        arena = Arena.create(folder / name, config.memory, grows=config.grows)
    except (OutOfMemory, FailedPrecondition) as error:
        if folder == other:
            raise
        log.warning("%s. The arena is in %s instead", error, other)
        arena = Arena.create(other / name, config.memory, grows=config.grows)
    if sys.platform == "linux":
        arena.unlink()  # other systems can share it with peers only by its name
    return arena


def _check_memory(size: int, folder: Path) -> None:
    """Refuses an arena that would take more memory than there is: the kernel would end processes. Warns of a file
    on a disk that is larger than memory."""
    if shortage := arena_shortage(size, folder, available_memory()):
        if in_memory(folder):
            raise ResourceExhausted(f"{shortage}, or a file on a disk with --arena")
        log.warning("%s: training will read and write the disk all the time", shortage)
