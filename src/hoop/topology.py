"""Addresses and ports of processes, the description of a device, and the number of devices of a job."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral

from hoop.errors import InvalidArgument

MAX_DEVICES = 4096
"""Maximum number of devices of a cluster."""
_HOST_PORT = re.compile(r"(?:\[(?P<v6>[\w:.%-]{1,80})\]|(?P<name>[\w.-]{1,253})):(?P<port>[0-9]{1,5})", re.ASCII)


def is_v6(text: str) -> bool:
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
        if match is None or int(match["port"]) > 65535 or (match["v6"] and not is_v6(match["v6"])):
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
class PortRange:
    """The ports on one of which a process listens: the first of them that is free."""

    low: int = 0
    """First port of the range; 0: any free port."""
    high: int = 0

    @classmethod
    def parse(cls, value: str | int, field: str = "port") -> PortRange:
        """From ``4022``, ``"4022"`` or ``"4022-4040"``; raises InvalidArgument."""
        match = re.fullmatch(r"\s*([0-9]{1,5})\s*(?:-\s*([0-9]{1,5})\s*)?", str(value), re.ASCII)
        low, high = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
        if not 0 <= low <= high <= 65535 or (low == 0 and high):
            raise InvalidArgument(
                f"{field}: {str(value)[:40]!r} is neither a port, 1 to 65535 (0: any free one), nor a range of ports, "
                "such as 4022-4040"
            )
        return cls(low, high)

    @property
    def ports(self) -> range:
        return range(self.low, self.high + 1)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class DeviceRange:
    """How many devices a job uses: it begins when ``first`` are there, and takes in more, up to ``most``."""

    first: int
    most: int = 0
    """Maximum number of devices; 0: none is stated (``--devices 4``). Processes of this machine are then ``first``, and
    a cluster has no limit."""

    @classmethod
    def parse(cls, value: object, field: str = "devices") -> DeviceRange:
        """From ``4``, ``"4"``, ``"4:16"`` or ``(4, 16)``; raises InvalidArgument."""
        parts: Sequence[object] = (value,)
        if isinstance(value, str):
            parts = value.split(":")
        elif isinstance(value, tuple | list):
            parts = value
        numbers = [_whole(one) for one in parts]
        if len(parts) not in (1, 2) or None in numbers:
            raise InvalidArgument(
                f"{field}: {value!r:.80} is not a whole number of at least 1, nor a range of two, such as 4:16"
            )
        first, *rest = (one for one in numbers if one is not None)
        if rest and rest[0] < first:
            raise InvalidArgument(f"{field}: {first}:{rest[0]} ends before it begins; write {rest[0]}:{first}")
        if max(first, *rest, 0) > MAX_DEVICES:
            raise InvalidArgument(f"{field}: {max(first, *rest, 0)} is more than {MAX_DEVICES}, the most of a cluster")
        return cls(first, *rest)

    @property
    def processes(self) -> int:
        """Devices to start, where they are processes of this machine."""
        return max(self.first, self.most)

    def __str__(self) -> str:
        return f"{self.first}:{self.most}" if self.most else str(self.first)


def _whole(value: object) -> int | None:
    """A whole number of at least 1, or the same as text; None: it is none."""
    if isinstance(value, str):
        text = value.strip()
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    whole = isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's integers too
    return int(value) if whole and value >= 1 else None  # type: ignore[call-overload, operator]


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
    """Id that is new for each process start. It distinguishes a restart from a lost connection."""
    shared_address: Address | None = None
    """Address at which devices of the same host set up shared memory; None: the device has only TCP links."""
    keeps_memory: bool = False
    """Whether the arena's file outlives the process, so that a restarted device has its state again."""
    hoop_version: str = ""
    torch_version: str = ""
    python_version: str = ""
    gpu: str = ""
    """Name of the GPU that has the memory from ``min_address`` on; empty: it is host memory."""
    processor: str = ""
    """Type of the device's processor; empty: unknown."""
    process: str = ""
    """Identity of the device's process (``host_processes.own_process``); empty: unknown."""

    @property
    def versions(self) -> dict[str, str]:
        """The versions that the device sent and its processor, by the keys of ``hoop.environment``."""
        found = {
            "hoop": self.hoop_version,
            "torch": self.torch_version,
            "python": self.python_version,
            "processor": self.processor,
        }
        return {key: version for key, version in found.items() if version}

    @property
    def capacity(self) -> int:
        return self.max_address - self.min_address

    def __str__(self) -> str:
        return f"device {self.device_id} (pid {self.pid}, {self.address})"
