"""A device: an arena, its data links, and the services that let others use them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from hoop.errors import HoopError
from hoop.memory import Arena
from hoop.memory.storage import default_directory
from hoop.servers import device_service, lab_service
from hoop.servers.grpc_server import check_exposure, serve
from hoop.servers.heartbeat import HeartbeatClient
from hoop.servers.lab_service import MAX_OPEN, StreamTable
from hoop.servers.operation_runner import OperationRunner
from hoop.servers.tasks import Tasks, Trainer
from hoop.texts import printable
from hoop.topology import Address, Addresses, DeviceInfo
from hoop.transport.shm_listener import share
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.auth import Credentials
from hoop.wire.channels import MAX_MESSAGE_BYTES
from hoop.wire.roles import Role
from hoop.wire.service import handlers

ID_LABEL = "device_id"
"""Under this label an arena remembers whose memory it is, so that a restarted device gets its id again."""


@dataclass(frozen=True)
class DeviceConfig:
    """How a device is set up."""

    coordinator: Address | Addresses
    memory: int = 256 * 1024 * 1024
    host: str = "127.0.0.1"
    port: int = 0
    data_port: int = 0
    arena: Path | None = None
    """A file that outlives the device; None: one that is deleted with it."""
    device_id: int = 0
    """0: what the arena remembers, else what the coordinator chooses."""
    advertise: Address | None = None
    """Where others reach its services, when that is not where it listens (a proxy, a NAT)."""
    advertise_data: Address | None = None
    checksums: bool = True
    """Messages over TCP carry a checksum, and are sent again if they do not come as they were sent."""
    patience_s: float = 30.0
    max_message: int = MAX_MESSAGE_BYTES
    max_streams: int = MAX_OPEN
    insecure: bool = False
    credentials: Credentials = field(default_factory=lambda: Credentials(Role.DEVICE))


class DeviceServer:
    """A running device."""

    def __init__(self, config: DeviceConfig, trainer: Trainer | None = None) -> None:
        check_exposure(Address(config.host, config.port), config.credentials, config.insecure)
        self.config = config
        self._keeps_arena = config.arena is not None
        incarnation = secrets.token_hex(8)
        path = config.arena or default_directory(config.memory) / f"hoop-{os.getpid()}-{incarnation}.arena"
        self._arena = Arena.open_or_create(path, config.memory)
        if not self._keeps_arena and sys.platform == "linux":
            self._arena.unname()  # elsewhere peers can only be given it by its name
        try:
            self._transport = TcpTransport(
                Address(config.host, config.data_port), config.checksums, config.credentials.link_key
            )
        except HoopError:
            self._arena.close(delete=not self._keeps_arena)
            raise
        self._shared = None if config.advertise_data else share(self._transport.address, self._arena)
        self._runner = OperationRunner(self._arena, self._transport, self._shared)
        self._streams = StreamTable(self._arena, self._runner.behind, config.max_streams)
        self._lab = lab_service.LabDevice(self._arena, self._runner, self._streams, config.credentials)
        self._tasks = Tasks(self._arena, self._runner, trainer, self._keeps_arena)
        self._transport.on_damage = self._tasks.damaged
        self._service = device_service.DeviceService(self._arena, self._runner, self._streams, self._tasks)
        self._attendance = HeartbeatClient(
            config.coordinator, self._service.memory, config.credentials, self._tasks.stalls
        )
        self._server: grpc.aio.Server | None = None
        self._info = DeviceInfo(
            device_id=config.device_id or int(self._arena.label(ID_LABEL) or 0),
            address=Address(config.host, config.port),
            data_address=config.advertise_data or self._transport.address,
            min_address=self._arena.min_address,
            max_address=self._arena.max_address,
            host=printable(socket.gethostname(), 256),
            pid=os.getpid(),
            incarnation=incarnation,
            shared_address=self._shared.address if self._shared else None,
            keeps_memory=self._keeps_arena,
        )

    @property
    def info(self) -> DeviceInfo:
        return self._info

    async def start(self) -> DeviceInfo:
        """Serves, joins, and sends heartbeats from then on; on failure nothing is left behind."""
        try:
            self._service.info = self._info
            services = (
                handlers(lab_service.DEVICE_SERVICE, self._lab),
                handlers(device_service.SERVICE, self._service),
            )
            self._server, address = await serve(
                self._info.address, services, self.config.max_message, self.config.credentials
            )
            info = dataclasses.replace(self._info, address=self.config.advertise or address)
            self._service.info = info
            self._info = await self._attendance.join(info, self.config.patience_s)
        except (HoopError, asyncio.CancelledError):
            await self.stop()
            raise
        self._service.info = self._info
        self._lab.device_id = self._info.device_id
        if self._keeps_arena:
            self._arena.set_label(ID_LABEL, str(self._info.device_id))
        self._attendance.attend()
        return self._info

    async def stop(self, hand_over: bool = False) -> None:
        """Leaves, ends what is under way, and gives everything back.

        With ``hand_over``, the jobs it takes part in go on without it before it leaves.
        """
        if hand_over and self._tasks.under_way():
            await self._attendance.hand_over()
        await self._attendance.leave()
        self._tasks.close()
        self._transport.close()
        if self._shared is not None:
            self._shared.close()
        await self._lab.close()
        if self._server is not None:
            await self._server.stop(grace=0.2)
        await asyncio.to_thread(self._runner.close)
        self._arena.close(delete=not self._keeps_arena)
