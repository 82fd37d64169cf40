"""The address that a device advertises: the one at which its coordinator and other devices reach it.

A device that listens on all addresses asks the kernel from which one it would reach its coordinator. Nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from hoop.errors import InvalidArgument
from hoop.topology import Address, Addresses
from hoop.wire.channels import Backoff


@dataclass(frozen=True)
class Route:
    """A connection as the kernel would open it: from a local address to a remote one."""

    local: str
    remote: str

    @property
    def version(self) -> int:
        """The version of IP: 4 or 6."""
        return 6 if ":" in self.local else 4

    @property
    def leaves_machine(self) -> bool:
        """Whether the remote address is of another machine: the kernel reaches its own addresses from themselves."""
        return self.local != self.remote and not Address(self.local, 0).is_loopback


SIOCGIFADDR = 0x8915
"""Number of Linux's request for the address of an interface."""
GLOBAL_SCOPE, HOST_SCOPE = "00", "10"
"""Scopes in /proc/net/if_inet6: also unique local addresses are global; loopback is of the host."""
OUTSIDE = (Address("192.0.2.1", 9), Address("2001:db8::1", 9))
"""Addresses that no machine has (RFC 5737, RFC 3849). The route to them starts at this machine's main address."""


async def host_towards(coordinator: Address | Addresses, listening: Address, timeout_s: float) -> str:
    """The local address from which the coordinator is reached; waits for a name or network that is not up yet."""
    backoff = Backoff("the coordinator", coordinator, timeout_s)
    for delay in backoff.delays():
        try:
            routes = await routes_to(coordinator.addresses)
        except (OSError, UnicodeError) as error:
            backoff.record_failure(str(error))
            await asyncio.sleep(delay)
            continue
        outside: list[Route] = []
        with contextlib.suppress(OSError):  # this machine has no network
            outside = await routes_to(OUTSIDE)
        return advertised_host(listening, routes, outside)
    raise backoff.timeout_error()


def wildcard_towards(host: str) -> str:
    """The address that listens on all addresses of this machine, of the version of IP that leads to ``host``."""
    try:
        found = {family for family, *_ in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):  # a name that is not known yet, as of a pod that has not started
        found = set()
    return str(IPv6Address(0) if found == {socket.AF_INET6} else IPv4Address(0))


def interface_address(name: str, field: str = "--interface") -> str:
    """The address of a network interface of this machine: its IPv4 address, else a global IPv6 address.

    Raises InvalidArgument with the interfaces that there are.
    """
    try:
        index = socket.if_nametoindex(name)
    except (OSError, UnicodeError, ValueError):
        known = ", ".join(found for _, found in socket.if_nameindex())
        raise InvalidArgument(
            f"{field}: {name[:40]!r} is no network interface of this machine; it has {known}"
        ) from None
    found = _ipv4_of(name) or _ipv6_of(index)
    if not found:
        raise InvalidArgument(
            f"{field}: {name} has no IPv4 address and no IPv6 address that other machines reach; give it one (ip "
            f"address add), or name an address of this machine with --host"
        )
    return found


def _ipv4_of(interface: str) -> str:
    """The IPv4 address of an interface; empty if it has none, or the system has another call for it."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
    except (ImportError, OSError):
        return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6_of(index: int, table: Path = Path("/proc/net/if_inet6")) -> str:
    """An IPv6 address of the interface with this index that is not link-local; empty if it has none."""
    try:
        lines = table.read_text().splitlines()
    except OSError:
        return ""
    for digits, number, _, scope, *_ in map(str.split, lines):
        if int(number, 16) == index and scope in (GLOBAL_SCOPE, HOST_SCOPE):
            return str(IPv6Address(int(digits, 16)))
    return ""


async def routes_to(addresses: Sequence[Address]) -> list[Route]:
    """The routes to these addresses, in their order. If there is none, raises the reason. It sends nothing."""
    found: list[Route] = []
    failure: OSError | UnicodeError | None = None
    for one in addresses:
        try:
            resolved = await asyncio.get_running_loop().getaddrinfo(one.host, one.port, type=socket.SOCK_DGRAM)
        except (OSError, UnicodeError) as error:
            failure = error
            continue
        for family, kind, protocol, _, remote in resolved:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(remote)  # of a datagram socket: it only chooses the local address
                    found.append(Route(str(probe.getsockname()[0]), str(remote[0])))
            except OSError as error:
                failure = error
    if failure is not None and not found:
        raise failure
    return found


def advertised_host(listening: Address, routes: Sequence[Route], outside: Sequence[Route]) -> str:
    """The host that a device which listens on all addresses advertises.

    It is the local address of the ``routes`` to its coordinator. If that is loopback, devices and clients of other
    machines may join the coordinator too, so it is that of the routes to the ``outside``, where there are any. Raises
    InvalidArgument if the device listens on the wrong version of IP.
    """
    version = 6 if ":" in listening.host else 4
    usable = [route.local for route in routes if route.version == version]
    if not usable:
        raise InvalidArgument(
            f"host: {listening.host} listens on IPv{version} only, which does not lead to the coordinator; "
            f"use --host {IPv6Address(0) if version == 4 else IPv4Address(0)}, or an address of this machine"
        )
    usable += [route.local for route in outside if route.version == version]
    return next((local for local in usable if not Address(local, 0).is_loopback), usable[0])


def check_reachable(listening: Address, routes: Sequence[Route]) -> None:
    """Raises InvalidArgument if a coordinator on another machine had to call a loopback address: it never could."""
    for route in routes:
        if route.leaves_machine:
            raise InvalidArgument(
                f"host: the coordinator at {route.remote} is on another machine and cannot call {listening.host} here; "
                f"listen on an address that it reaches, e.g. --host {route.local}"
            )
