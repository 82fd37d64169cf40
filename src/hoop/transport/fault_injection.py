"""TCP connections with which something can be made to go wrong: for tests, and not there unless installed."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable
from typing import Any

from hoop.transport.tcp_socket import WRAPS


class FaultySocket:
    """A dialled connection whose bytes go through somebody's hands, after every checksum was made."""

    def __init__(self, sock: socket.socket, faults: FaultyLinks) -> None:
        self._sock, self._faults = sock, faults

    def sendmsg(self, parts: list[memoryview]) -> int:
        data = b"".join(parts)[: 64 * 1024]
        faults = self._faults
        if faults.partitioned:
            return len(data)
        if faults.drops:
            faults.drops -= 1
            faults.happened += 1
            self._sock.send(data[: len(data) // 2])
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._sock.close()  # which resets it
            raise ConnectionResetError(104, "Connection reset by peer")
        changed = faults.outward(data)
        if changed == data:
            return self._sock.send(data)
        self._sock.setblocking(True)  # what was changed must leave as it is now
        self._sock.sendall(changed)
        self._sock.setblocking(False)
        return len(changed)

    def recv(self, size: int) -> bytes:
        return self._faults.inward(self._sock.recv(size))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class FaultyLinks:
    """What goes wrong with the connections that this process dials."""

    def __init__(self) -> None:
        self.flips = 0
        """Bits still to be flipped, one a frame or piece of one."""
        self.drops = 0
        """Connections still to be reset."""
        self.partitioned = False
        self.happened = 0

    def outward(self, data: bytes) -> bytes:
        if not self.flips or not data:
            return data
        self.flips -= 1
        self.happened += 1
        changed = bytearray(data)
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
        return bytes(changed)

    def inward(self, data: bytes) -> bytes:
        """What comes back on a connection that was dialled: confirmations, last words."""
        return data

    def install(self) -> Callable[[], None]:
        """From now on connections are dialled through this; returns the way out."""

        def wrap(sock: socket.socket) -> FaultySocket:
            return FaultySocket(sock, self)

        WRAPS.append(wrap)
        return lambda: WRAPS.remove(wrap)
