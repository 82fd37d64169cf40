"""Malformed messages for every kind of port, and a sender that counts them.

The generators yield connections: the bytes that are sent on one, and how many messages these are. Each is a mutation of
a valid beginning, or random; a seed gives the same ones again.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from hoop.transport.auth_handshake import NONCE_BYTES
from hoop.wire.frames import FrameHeader, FrameKind

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, SETTINGS = 1, 4
END_STREAM, END_HEADERS = 1, 4
CONNECT_S = 60.0
ANSWER_S = 0.5
"""Seconds for which the sender reads what a server answers before it closes the connection."""
READ_EVERY = 128
"""One of this number of connections waits for what the server answers."""
FRAMES = 24
"""Most HTTP/2 frames of a connection."""
MAX_BYTES = 1 << 16

Attack = Callable[[Random], tuple[bytes, int]]
"""Makes the bytes of one connection, and says how many messages they are."""


# ---- HTTP/2


def frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    """``length``: what the frame says, if not the truth."""
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes([kind & 255, flags & 255]) + struct.pack(">I", stream & 0xFFFFFFFF) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """One header, not indexed, not compressed (HPACK)."""
    return b"\x00" + _length(name) + name + _length(value) + value


def _length(text: bytes) -> bytes:
    if len(text) < 127:
        return bytes([len(text)])
    rest, encoded = len(text) - 127, bytearray([127])
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    return bytes(encoded) + bytes([rest])


def call_of(path: bytes, *more: tuple[bytes, bytes], stream: int = 1, end: bool = True) -> bytes:
    """The HEADERS frame of a gRPC call."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"x")]
    fields += [(b"te", b"trailers"), (b"content-type", b"application/grpc"), *more]
    block = b"".join(literal(*field) for field in fields)
    return frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), stream, block)


def opening() -> bytes:
    return PREFACE + frame(SETTINGS, 0, 0, b"")


PATHS = (b"/hoop.v1.Coordinator/GetStatus", b"/hoop.v1.Device/Write", b"/gpu_sim.GPUDevice/StreamSend", b"/", b"", b"*")
NAMES = (b":path", b":method", b"te", b"content-type", b"authorization", b"grpc-timeout", b"grpc-encoding", b"x-bin")


def mutated(random: Random, data: bytes) -> bytes:
    """``data`` with some bytes replaced, removed or inserted."""
    changed = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(changed))
        changed[at : at + random.randint(0, 4)] = random.randbytes(random.randint(0, 6))
    return bytes(changed)


def raw_path(random: Random) -> bytes:
    path = random.choice(PATHS)
    return random.choice([mutated(random, path), path + b"\xff", b"/\xff", b"/\x00", random.randbytes(20), path])


def http2(random: Random) -> tuple[bytes, int]:
    """Raw frames after a valid opening, mostly; seldom without it."""
    count, parts, stream = random.randint(1, FRAMES), [opening()], 1
    for _ in range(count):
        match random.randrange(6):
            case 0 | 1:
                more = [
                    (random.choice(NAMES), random.randbytes(random.randint(0, 40))) for _ in range(random.randrange(3))
                ]
                parts.append(call_of(raw_path(random), *more, stream=stream, end=random.random() < 0.5))
                stream += 2
            case 2:
                body = random.randbytes(random.randint(0, 30))
                size = random.choice([len(body), 0, 1 << 30, 0xFFFFFFFF])
                parts.append(
                    frame(0, random.randrange(2), max(1, stream - 2), b"\x00" + struct.pack(">I", size) + body)
                )
            case 3:
                parts.append(mutated(random, call_of(random.choice(PATHS), stream=stream)))
                stream += 2
            case 4:
                payload = random.randbytes(random.choice([0, 1, 4, 5, 6, 8, 100]))
                parts.append(frame(random.randrange(11), random.randrange(256), random.choice([0, 1, stream]), payload))
            case _:
                payload = random.randbytes(random.randint(0, 60))
                length = random.choice([None, 0, 1, 0xFFFFFF])
                parts.append(
                    frame(random.randrange(256), random.randrange(256), random.getrandbits(32), payload, length)
                )
    if random.random() < 0.05:
        parts[0] = random.choice([b"", PREFACE, random.randbytes(24), mutated(random, PREFACE)])
    return b"".join(parts), count


# ---- HTTP/1, lines, frames of links


def http1(random: Random) -> tuple[bytes, int]:
    """Requests of the dashboard and of /metrics."""
    path = random.choice(
        ["/", "/metrics", "/ws", "/static/js/bokeh.min.js", "/autoload.js", "/%ff%00", "/../../etc/passwd"]
    )
    lines = [f"{random.choice(['GET', 'POST', 'HEAD', 'BREW'])} {path} HTTP/1.1", "Host: 127.0.0.1"]
    if random.random() < 0.4:
        token = random.choice(["x", "bokeh, ", "bokeh, x.y.z", "bokeh, " + random.randbytes(9).hex()])
        lines += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
        lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", f"Sec-WebSocket-Protocol: {token}"]
        lines.append("Origin: http://127.0.0.1")
    if random.random() < 0.3:
        lines.append(f"Content-Length: {random.choice(['-1', '5', 'x', '99999999999999999999'])}")
    if random.random() < 0.2:
        lines.append("Authorization: Bearer " + random.randbytes(6).hex())
    request = ("\r\n".join(lines) + "\r\n\r\n").encode()
    return (request if random.random() < 0.4 else mutated(random, request)), 1


VALUES: tuple[Any, ...] = (None, -1, 0, 2**70, 1e400, "", "\x00", [], {}, [[]], True, "x" * 2000)


def rendezvous_lines(random: Random) -> tuple[bytes, int]:
    """Messages of ``launch.rendezvous_server``: none has the token."""
    kinds = ("register", "ready", "store", "finished", "other", 7, None)
    count, lines = random.randint(1, 8), []
    for _ in range(count):
        fields = {"type": random.choice(kinds)} | {
            name: random.choice(VALUES) for name in ("token", "slot", "has_state", "port") if random.random() < 0.6
        }
        line = json.dumps(fields).encode()
        lines.append(line if random.random() < 0.6 else mutated(random, line))
    return b"\n".join(lines) + random.choice([b"\n", b""]), count


def link_frames(random: Random) -> tuple[bytes, int]:
    """First bytes at a data port."""
    kind = random.choice([*FrameKind, 0, 99, 255])
    numbers = {name: random.choice([0, 1, 2, 7, 2**31, 2**32 - 1]) for name in ("communicator", "generation", "source")}
    length = random.choice([0, NONCE_BYTES, 48, 2**20, 2**40])
    lane = random.choice([0, 1, 2, 255])
    data = FrameHeader(kind, **numbers, sequence=random.choice([0, 1, 2**63]), length=length, lane=lane).pack()
    data += random.randbytes(random.choice([0, NONCE_BYTES, 48, 80]))
    return (data if random.random() < 0.5 else mutated(random, data)), 1


# ---- sending


@dataclass(frozen=True)
class Port:
    """Where malformed messages go."""

    connect: Callable[[], socket.socket]
    attack: Attack


def tcp(host: str, port: int, tls: ssl.SSLContext | None = None) -> Callable[[], socket.socket]:
    """Connects; with ``tls`` as a process that has a certificate."""

    def connect() -> socket.socket:
        plain = socket.create_connection((host, port), CONNECT_S)
        return plain if tls is None else tls.wrap_socket(plain, server_hostname="localhost")

    return connect


def unix(name: str) -> Callable[[], socket.socket]:
    def connect() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_S)
        sock.connect(name)
        return sock

    return connect


def deliver(sock: socket.socket, data: bytes, wait: bool) -> bytes:
    """Sends ``data``; with ``wait`` until the server has answered, closed, or said nothing for a while."""
    answer = b""
    with contextlib.suppress(OSError):
        sock.sendall(data)
        until = time.monotonic() + (ANSWER_S if wait else 0.0)
        while len(answer) < MAX_BYTES and select.select([sock], [], [], max(0.0, until - time.monotonic()))[0]:
            if not (more := sock.recv(MAX_BYTES)):
                break
            answer += more
    return answer


def send_malformed(port: Port, messages: int, seed: int = 0) -> Iterator[int]:
    """Sends as many messages; yields the number so far after each connection. It reads what answers some of them.

    A port that refuses connections for ``CONNECT_S`` seconds is an error.
    """
    random, sent, connections, answered = Random(seed), 0, 0, time.monotonic()
    while sent < messages:
        data, count = port.attack(random)
        try:
            with port.connect() as sock:
                deliver(sock, data, wait=connections % READ_EVERY == 0)
        except (ConnectionError, ssl.SSLError):
            if time.monotonic() > answered + CONNECT_S:
                raise
            continue
        answered = time.monotonic()
        sent, connections = sent + count, connections + 1
        yield sent
