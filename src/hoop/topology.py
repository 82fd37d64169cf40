"""Addresses of processes, and the description of a device."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from hoop.errors import InvalidArgument

MAX_DEVICES = 4096
"""Devices of the largest cluster."""
_HOST_PORT = re.compile(r"(?:\[(?P<v6>[\w:.%-]{1,80})\]|(?P<name>[\w.-]{1,253})):(?P<port>[0-9]{1,5})", re.ASCII)


def _is_v6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


@dataclass(frozen=True, order=True)
class Address:
    """Host and port of a listening process."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, field: str = "address") -> Address:
        """Parse ``host:port`` or ``[v6]:port``; raises InvalidArgument."""
        match = _HOST_PORT.fullmatch(text.strip())
        if match is None or int(match["port"]) > 65535 or (match["v6"] and not _is_v6(match["v6"])):
            raise InvalidArgument(f"{field}: {text[:80]!r} is not host:port, e.g. 127.0.0.1:4021 or [::1]:4021")
        return cls(match["v6"] or match["name"], int(match["port"]))

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Itself, as ``Addresses`` has them."""
        return (self,)

    @property
    def is_loopback(self) -> bool:
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def is_wildcard(self) -> bool:
        """Whether it means all addresses of this machine (``0.0.0.0``, ``::``): to listen on, not to connect to."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class Addresses:
    """The possible addresses of one server. One of them answers at a time (a coordinator and its standby)."""

    addresses: tuple[Address, ...]

    @classmethod
    def parse(cls, text: str, field: str = "address") -> Addresses:
        """Parse one or more comma-separated ``host:port``; raises InvalidArgument."""
        return cls(tuple(Address.parse(one, field) for one in text.split(",")))

    def __str__(self) -> str:
        return ",".join(map(str, self.addresses))


@dataclass(frozen=True)
class DeviceInfo:
    """The description that a device sends when it joins."""

    device_id: int
    address: Address
    """Address of the gRPC services (control plane)."""
    data_address: Address
    """Address for links from other devices (data plane)."""
    min_address: int
    max_address: int
    host: str
    pid: int
    incarnation: str
    """A new id for each process start. It distinguishes a restart from a lost connection."""
    shared_address: Address | None = None
    """Address at which devices of the same host set up shared memory; None: the device has only TCP links."""
    keeps_memory: bool = False
    """Whether the arena's file outlives the process, so that a restarted device has its state again."""
    hoop_version: str = ""
    torch_version: str = ""
    python_version: str = ""
    gpu: str = ""
    """The GPU that has the memory from ``min_address`` on; empty: it is host memory."""

    @property
    def versions(self) -> dict[str, str]:
        """The versions that the device sent, by the keys of ``hoop.environment``."""
        found = {"hoop": self.hoop_version, "torch": self.torch_version, "python": self.python_version}
        return {key: version for key, version in found.items() if version}

    @property
    def capacity(self) -> int:
        return self.max_address - self.min_address

    def __str__(self) -> str:
        return f"device {self.device_id} (pid {self.pid}, {self.address})"
