"""Where things are: addresses of processes, and what a device is."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from hoop.errors import InvalidArgument

_HOST_PORT = re.compile(
    r"(?:\[(?P<v6>[\w:.%-]{1,80})\]|(?P<name>[\w.-]{1,253})):(?P<port>[0-9]{1,5})", re.ASCII
)


def _is_v6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


@dataclass(frozen=True, order=True)
class Address:
    """Where a process listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str = "address") -> Address:
        """``host:port`` or ``[v6]:port``."""
        match = _HOST_PORT.fullmatch(text.strip())
        if match is None or int(match["port"]) > 65535 or (match["v6"] and not _is_v6(match["v6"])):
            raise InvalidArgument(
                f"{field}: {text[:80]!r} is not host:port, e.g. 127.0.0.1:4021 or [::1]:4021"
            )
        return cls(match["v6"] or match["name"], int(match["port"]))

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
class Addresses:
    """Where one server may be: of several places, one answers at a time."""

    each: tuple[Address, ...]

    @classmethod
    def parse(cls, text: str, field: str = "address") -> Addresses:
        """``host:port``, or several with commas between them."""
        return cls(tuple(Address.parse(one, field) for one in text.split(",")))

    def __str__(self) -> str:
        return ",".join(map(str, self.each))


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
    shared_address: Address | None = None
    """Where devices with the same host part share their memory with it; None: only links."""
    keeps_memory: bool = False
    """In a file that outlives the process: it may come back with what it held."""

    @property
    def capacity(self) -> int:
        return self.max_address - self.min_address

    def __str__(self) -> str:
        return f"device {self.device_id} (pid {self.pid}, {self.address})"
