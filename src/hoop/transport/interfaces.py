"""Finds the network interface that has an address, for libraries that take an interface by name (NCCL)."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
from ipaddress import IPv6Address
from pathlib import Path

SIOCGIFCONF = 0x8912
"""Linux's number of the request for the IPv4 addresses of all interfaces."""
_ENTRY_BYTES, _NAME_BYTES, _ADDRESS_AT = 40, 16, 20
"""Layout of an entry of its answer, on 64-bit Linux: name, family, port, address."""
_MAX_BYTES = 1024 * _ENTRY_BYTES


def interface_of(host: str) -> str:
    """The name of the interface that has the address of ``host``; empty if none has it."""
    found = interface_addresses()
    with contextlib.suppress(OSError, UnicodeError):
        for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            if (name := found.get(str(address[0]).partition("%")[0])) is not None:
                return name
    return ""


def interface_addresses() -> dict[str, str]:
    """The interface of each address of this machine; empty where the system has other calls for it."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        entries = array.array("B", bytes(_MAX_BYTES))
        address, _ = entries.buffer_info()
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFCONF, struct.pack("iL", _MAX_BYTES, address))
        (used,) = struct.unpack_from("i", answer)
        for start in range(0, used, _ENTRY_BYTES):
            entry = entries[start : start + _ENTRY_BYTES].tobytes()
            name = entry[:_NAME_BYTES].partition(b"\0")[0].decode(errors="replace").partition(":")[0]
            found[socket.inet_ntoa(entry[_ADDRESS_AT : _ADDRESS_AT + 4])] = name
    with contextlib.suppress(OSError):
        for digits, *_, name in map(str.split, Path("/proc/net/if_inet6").read_text().splitlines()):
            found[str(IPv6Address(int(digits, 16)))] = name
    return found
