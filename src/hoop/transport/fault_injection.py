"""Fault injection into TCP connections, for tests and chaos runs; no effect unless installed."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from hoop.transport.tcp_link import SOCKET_WRAPPERS


class FaultySocket:
    """A dialled connection whose bytes are changed after the sender has computed every checksum."""

    def __init__(self, sock: socket.socket, faults: FaultyLinks) -> None:
        self._sock, self._faults = sock, faults

    def sendmsg(self, parts: list[memoryview]) -> int:
        data = b"".join(parts)[: 64 * 1024]
        faults = self._faults
        if faults.partitioned:
            return len(data)
        with faults.lock:
            is_dropped = faults.drops > 0
            faults.drops -= is_dropped
            faults.injected += is_dropped
            changed = data if is_dropped else faults.on_send(data)
        if is_dropped:
            self._sock.send(data[: len(data) // 2])
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._sock.close()  # resets the connection, because it lingers for 0 seconds
            raise ConnectionResetError(104, "Connection reset by peer")
        if changed == data:
            return self._sock.send(data)
        self._sock.setblocking(True)  # send all of it now: the caller would send an unsent rest unchanged
        self._sock.sendall(changed)
        self._sock.setblocking(False)
        return len(changed)

    def recv(self, size: int) -> bytes:
        data = self._sock.recv(size)
        with self._faults.lock:
            return self._faults.on_recv(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class FaultyLinks:
    """The faults to inject into the connections that this process dials."""

    def __init__(self) -> None:
        self.flips = 0
        """Bits still to flip, at most one per call of ``sendmsg``."""
        self.drops = 0
        """Connections still to reset."""
        self.partitioned = False
        """Whether all bytes sent are dropped."""
        self.injected = 0
        """Faults injected so far."""
        self.lock = threading.Lock()
        """Held while a fault is chosen: several connections send and receive at once."""

    def on_send(self, data: bytes) -> bytes:
        """The bytes to send instead of ``data``; called with ``lock`` held."""
        if not self.flips or not data:
            return data
        self.flips -= 1
        self.injected += 1
        changed = bytearray(data)
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        return bytes(changed)

    def on_recv(self, data: bytes) -> bytes:
        """The bytes to return instead of ``data``: acknowledgements and closing frames. Called with ``lock`` held."""
        return data

    def install(self) -> Callable[[], None]:
        """Wraps every connection dialled from now on; returns a function that stops this."""

        def wrap(sock: socket.socket) -> FaultySocket:
            return FaultySocket(sock, self)

        SOCKET_WRAPPERS.append(wrap)
        return lambda: SOCKET_WRAPPERS.remove(wrap)
