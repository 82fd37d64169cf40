"""Where things are: addresses of processes, and what a device is."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from hoop.errors import InvalidArgument


@dataclass(frozen=True, order=True)
class Address:
    """Where a process listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str = "address") -> Address:
        """``host:port`` or ``[v6]:port``."""
        host, colon, port = text.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise InvalidArgument(f"{field}: {text!r} is not host:port, e.g. 127.0.0.1:4021")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class DeviceInfo:
    """What a device says of itself when it joins."""

    device_id: int
    address: Address
    """Its gRPC services: control."""
    data_address: Address
    """Its links to other devices: data."""
    min_address: int
    max_address: int
    host: str
    pid: int
    incarnation: str
    """New each time the process starts, so that a restart is told from a hiccup."""

    @property
    def capacity(self) -> int:
        return self.max_address - self.min_address

    def __str__(self) -> str:
        return f"device {self.device_id} (pid {self.pid}, {self.address})"
