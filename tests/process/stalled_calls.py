"""Calls that stop in the middle of their request, over plain HTTP/2: no gRPC library can be made to do that."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Iterator

from hoop.topology import Address

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_HEADERS, ACK = 4, 1
FRAME_BYTES = 16384
INITIAL_WINDOW = 65535


class StalledCall:
    """A call that announces a request of ``announced`` bytes and sends only some of them."""

    def __init__(self, address: Address, method: str, announced: int) -> None:
        self._sock = socket.create_connection((address.host, address.port), timeout=60.0)
        self._windows = {0: INITIAL_WINDOW, 1: INITIAL_WINDOW}
        """Bytes that the server accepts now, on the connection and on the stream."""
        self.ended = False
        """The server has ended the call."""
        self.sent = 0
        self._sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, b""))
        headers = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": str(address),
            "te": "trailers",
            "content-type": "application/grpc",
        }
        block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers.items())
        self._sock.sendall(_frame(HEADERS, END_HEADERS, 1, block))
        self._left = announced
        self._prefix = struct.pack(">BI", 0, announced)

    def send(self, size: int, go_on: Callable[[], bool]) -> None:
        """Sends ``size`` bytes of the request, as far as the server's flow control lets it.

        ``go_on``: called when it has let nothing through for a second.
        """
        data = memoryview(self._prefix + bytes(size))
        self._prefix = b""
        while data and not self.ended:
            room = min(self._windows[0], self._windows[1], FRAME_BYTES, len(data))
            if room <= 0:
                if not self.read(1.0) and not go_on():
                    return
                continue
            self._sock.sendall(_frame(DATA, 0, 1, bytes(data[:room])))
            self._windows[0] -= room
            self._windows[1] -= room
            self.sent += room
            data = data[room:]

    def wait_ended(self, timeout: float) -> bool:
        while not self.ended and self.read(timeout):
            pass
        return self.ended

    def read(self, timeout: float) -> bool:
        """Reads one frame; False if none came."""
        self._sock.settimeout(timeout)
        try:
            header = self._exactly(9)
        except TimeoutError:
            return False
        self._sock.settimeout(60.0)
        length, kind, flags = int.from_bytes(header[:3], "big"), header[3], header[4]
        stream = int.from_bytes(header[5:], "big") & 0x7FFFFFFF
        payload = self._exactly(length)
        if kind == WINDOW_UPDATE:
            self._windows[stream] = self._windows.get(stream, 0) + int.from_bytes(payload, "big")
        elif kind == SETTINGS and not flags & ACK:
            for at in range(0, length, 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                if name == 4:  # SETTINGS_INITIAL_WINDOW_SIZE
                    self._windows[1] += value - INITIAL_WINDOW
            self._sock.sendall(_frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._sock.sendall(_frame(PING, ACK, 0, payload))
        elif kind in (RST_STREAM, GOAWAY) or (kind == HEADERS and flags & 1):
            self.ended = True
        return True

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._sock.recv(size - len(data))
            if not more:
                self.ended = True
                raise TimeoutError
            data += more
        return data

    def close(self) -> None:
        self._sock.close()


@contextlib.contextmanager
def stalled_calls(address: Address, method: str, announced: int, count: int) -> Iterator[list[StalledCall]]:
    calls: list[StalledCall] = []
    try:
        for _ in range(count):
            calls.append(StalledCall(address, method, announced))
        yield calls
    finally:
        for call in calls:
            call.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _literal(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127, "one byte holds the length"
    return bytes([len(data)]) + data
