"""Looks after the processes of devices, for the coordinator: has a process ended, and does a silent one run?

    device on the coordinator's host    the kernel says when its process ends (a pidfd), and whether it runs
    device on another host              its server is asked: a connection that it refuses proves that it has ended, and
                                        one that it answers proves that it runs; other devices ask it, too, if the
                                        coordinator learns nothing (``ServerProbe`` in the device)

gRPC answers a connection by itself, without Python: also while other code holds the interpreter's lock. A stopped
process does not answer, although its kernel accepts the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import Callable

from hoop.host_processes import ProcessState, state_of
from hoop.membership import events as m
from hoop.topology import Address, DeviceInfo
from hoop.wire.channels import LEASE_S

PROBE_S = LEASE_S / 2
"""Seconds that a device's server may take to answer a connection: a slow network takes two round trips for that, and
the answer to the next probe has to come within a lease of this one."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The beginning of an HTTP/2 connection, with empty settings. The server answers with its own settings."""
_FRAME_HEADER_BYTES = 9


class ServerProbe:
    """Asks whether the servers of devices answer a connection."""

    def __init__(self, tls: bool) -> None:
        """``tls``: devices listen with certificates."""
        self._tls = _any_certificate() if tls else None

    async def answers(self, address: Address) -> bool:
        """Whether a server answers within ``PROBE_S``. Raises ConnectionError if the connection is refused."""
        try:
            async with asyncio.timeout(PROBE_S):
                return await self._connect(address)
        except ConnectionError:
            raise
        except (OSError, UnicodeError, asyncio.IncompleteReadError):
            return False  # too slow, or a local fault: no evidence against the device

    async def _connect(self, address: Address) -> bool:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        try:
            with contextlib.suppress(ConnectionError, ssl.SSLError):  # it was accepted: not refused
                if self._tls is not None:
                    await writer.start_tls(self._tls)
                    return True  # the handshake is an answer; for more this would need a certificate of the cluster
                writer.write(_HELLO)
                await reader.readexactly(_FRAME_HEADER_BYTES)
                return True
            return False
        finally:
            writer.transport.abort()  # a stopped process does not take part in an orderly end


class DeviceProcesses:
    """The processes of a coordinator's devices."""

    def __init__(self, on_ended: Callable[[m.Probed], None], tls: bool) -> None:
        """``on_ended`` is called when a process of this host has ended. ``tls``: devices listen with certificates."""
        self._on_ended = on_ended
        self._servers = ServerProbe(tls)
        self._watched: dict[str, int] = {}
        """Descriptors of processes of this host, by incarnation of the device."""

    def watch(self, info: DeviceInfo) -> None:
        """Reports the end of a device's process, if it is one of this host."""
        if info.incarnation in self._watched or not hasattr(os, "pidfd_open"):
            return
        if state_of(info.pid, info.process) not in (ProcessState.RUNS, ProcessState.STOPPED):
            return
        try:
            descriptor = os.pidfd_open(info.pid)
        except OSError:  # no descriptor is free, or the process has just ended: probes find out
            return
        if state_of(info.pid, info.process) is ProcessState.ENDED:  # the id may be another process's by now
            os.close(descriptor)
            return
        self._watched[info.incarnation] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._ended, info)

    def _ended(self, info: DeviceInfo) -> None:
        self._forget(info.incarnation)
        self._on_ended(m.Probed(info.device_id, info.incarnation, _has_ended(info)))

    def _forget(self, incarnation: str) -> None:
        descriptor = self._watched.pop(incarnation)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def keep_only(self, incarnations: set[str]) -> None:
        """Stops watching the processes of all other devices."""
        for incarnation in self._watched.keys() - incarnations:
            self._forget(incarnation)

    def sees(self, info: DeviceInfo) -> bool:
        """Whether a device's process is one of this host: no other device knows more about it."""
        return state_of(info.pid, info.process) is not ProcessState.UNKNOWN

    async def probe(self, info: DeviceInfo) -> m.Probed:
        """Finds out whether a device's process has ended, or runs."""
        begun = time.monotonic()
        match state_of(info.pid, info.process):
            case ProcessState.ENDED:
                return m.Probed(info.device_id, info.incarnation, _has_ended(info))
            case ProcessState.RUNS:
                return m.Probed(info.device_id, info.incarnation, "", begun)
            case ProcessState.STOPPED:
                return m.Probed(info.device_id, info.incarnation, "")
        answers, failure = False, ""
        try:
            answers = await self._servers.answers(info.address)
        except (ConnectionRefusedError, ConnectionResetError) as error:
            failure = f"{info.address} refuses connections ({error.strerror or error})"
        except ConnectionError:
            pass  # a local fault: no evidence against the device
        return m.Probed(info.device_id, info.incarnation, failure, begun if answers else 0.0, answers)


def _has_ended(info: DeviceInfo) -> str:
    return f"its process {info.pid} has ended"


def _any_certificate() -> ssl.SSLContext:
    """A context that accepts any certificate: the connection carries no data and only shows that somebody answers."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context
