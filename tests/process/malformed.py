"""Malformed messages for every kind of port, and a sender that counts them.

The generators yield connections: the bytes that are sent on one, and how many messages these are. Each is a mutation of
a valid beginning, or random; a seed gives the same ones again.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import resource
import select
import socket
import ssl
import struct
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
"""Most frames of a connection, of HTTP/2 or of a websocket."""
SLOW = 32
SLOW_SHARE, RESET_SHARE = 0.01, 0.1
"""Of the connections: those that send slowly, and those that end with a reset."""
MAX_BYTES = 1 << 16
OPEN_FILES = 256

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


# ---- HTTP/1 and websockets

TOKEN_S = 120.0
"""Seconds for which the token of a page is used; Bokeh's are valid for 300."""
KEY = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
TLS_HELLO = bytes.fromhex("16030100f1010000ed0303") + bytes(200)
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
HEADER_NAMES = ("Cookie", "Authorization", "X", "Expect", "Transfer-Encoding", "Range", "If-None-Match", "Content-Type")


@dataclass
class Site:
    """What a valid request to an HTTP/1 server has, so that malformed ones pass its first checks."""

    host: str
    """Its address, with the port."""
    paths: tuple[str, ...]
    page: str = ""
    """The path of a page with a websocket (Bokeh's); empty: there is none."""
    cookie: str = ""
    """A header's value of a user who has logged in."""
    _token: tuple[str, float] = field(default=("", 0.0), repr=False)

    def token(self) -> str:
        """A token that the server has signed: forged frames come after a valid handshake."""
        token, until = self._token
        if time.monotonic() > until:
            request = urllib.request.Request(f"http://{self.host}{self.page}", headers={"Cookie": self.cookie})
            with urllib.request.urlopen(request, timeout=CONNECT_S) as answer:
                token = re.findall(r'"token":"([\w.-]+)"', answer.read().decode())[0]
            self._token = (token, time.monotonic() + TOKEN_S)
        return token


def http1(random: Random, site: Site) -> tuple[bytes, int]:
    """Some requests in a row, mutated, cut, with too long headers, wrong lengths or paths that are no text; or frames
    of a websocket; or the beginning of another protocol."""
    kind = random.random()
    if kind < 0.25 and site.page:
        return websocket(random, site)
    if kind < 0.30:
        return http2(random)
    if kind < 0.34:
        return random.choice([TLS_HELLO, random.randbytes(random.randint(0, 2000)), b"\r\n" * 50, b""]), 1
    count = random.choice([1, 1, 2, 8])
    return b"".join(request_of(random, site) for _ in range(count)), count


def request_of(random: Random, site: Site) -> bytes:
    """One request: of half of them some bytes are changed or the end is missing."""
    path = random.choice(site.paths).encode()
    if random.random() < 0.4:
        path = random.choice(
            [mutated(random, path), path + b"\xff", b"/\x00", b"/%ff%00", b"/..%2f../etc/passwd", b"*"]
        )
    method = random.choice([b"GET", b"GET", b"POST", b"HEAD", b"BREW", b"CONNECT", b"\xff", b"OPTIONS"])
    version = random.choice([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"http", b""])
    lines = [b"%s %s %s" % (method, path, version)]
    host = site.host if random.random() < 0.9 else random.choice(["", "x", "[", "127.0.0.1:99999", "evil.example"])
    lines.append(b"Host: " + host.encode())
    if site.cookie and random.random() < 0.5:
        lines.append(f"Cookie: {site.cookie}".encode())
    lines += [wrong_header(random) for _ in range(random.choice([0, 0, 1, 2]))]
    if random.random() < 0.02:
        lines.append(random.choice([b"X: " + b"x" * 100_000, b"\r\n".join([b"X: y"] * 5000), b"x" * 70_000]))
    body = random.choice([b"", b"", b"token=x&_xsrf=y", random.randbytes(30), b"5\r\nhello\r\nzz\r\n", b"0\r\n\r\n"])
    request = b"\r\n".join(lines) + b"\r\n\r\n" + body
    match random.randrange(4):
        case 0:
            return mutated(random, request)
        case 1:
            return request[: random.randint(0, len(request))]
        case _:
            return request


def wrong_header(random: Random) -> bytes:
    """A header of which most servers accept no value like this."""
    length = random.choice(["-1", "5", "x", "99999999999999999999", "0x5", "5, 5", "1" * 5000, "\u0665", "+5", "1_0"])
    choices = [
        f"Content-Length: {length}".encode(),
        b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: chunked, gzip",
        b"Expect: 100-continue",
        b"Connection: Upgrade, close",
        b"Upgrade: h2c",
        b"Authorization: Bearer " + random.randbytes(6),
        b"Authorization: Bearer " + random.randbytes(6).hex().encode(),
        b"Cookie: " + random.randbytes(20).replace(b"\n", b""),
        b"no colon",
        b" folded: line",
        b": no name",
        random.choice(HEADER_NAMES).encode() + b": " + random.randbytes(random.randint(0, 40)),
        b"Content-Type: multipart/form-data; boundary=" + random.choice([b"x", b"", b"\xff"]),
    ]
    return random.choice(choices)


def websocket(random: Random, site: Site) -> tuple[bytes, int]:
    """A handshake, mostly valid, and forged frames behind it."""
    valid = random.random() < 0.7
    token = site.token() if valid else random.choice(["x", "x.y.z", "é", random.randbytes(9).hex(), ""])
    forged = base64.urlsafe_b64encode(json.dumps({"session_id": random.choice(VALUES)}).encode()).decode().rstrip("=")
    if not valid and random.random() < 0.3:
        token = random.choice([forged, f"{forged}.x", f"{site.token()[:-3]}AAA"])
    lines = handshake(site, token).split(b"\r\n")[:-2]
    if random.random() < 0.3:
        lines[random.randrange(1, len(lines))] = random.choice(
            [b"Origin: null", b"Sec-WebSocket-Version: 99", b"Sec-WebSocket-Protocol: x", b"Upgrade: x", b"X: y"]
        )
    lines += [b"Sec-WebSocket-Extensions: permessage-deflate"] if random.random() < 0.2 else []
    count = random.randint(1, FRAMES)
    frames = b"".join(websocket_frame(random) for _ in range(count))
    return b"\r\n".join([*lines, b"", b""]) + frames, count


def handshake(site: Site, token: str) -> bytes:
    """The request that opens a websocket."""
    lines = [f"GET {site.page.rstrip('/')}/ws HTTP/1.1", f"Host: {site.host}", "Upgrade: websocket", KEY]
    lines += ["Connection: Upgrade", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Protocol: bokeh, {token}"]
    lines += [f"Origin: http://{site.host}", *([f"Cookie: {site.cookie}"] if site.cookie else []), "", ""]
    return "\r\n".join(lines).encode()


BOKEH_MESSAGES = ("PATCH-DOC", "PULL-DOC-REQ", "SERVER-INFO-REQ", "PUSH-DOC", "OK", "ERROR", "ACK", "PATCH-DOC-X", None)
EVENTS = ("ModelChanged", "MessageSent", "ColumnsStreamed", "RootAdded", "RootRemoved", "TitleChanged", "x", None)


def websocket_frame(random: Random) -> bytes:
    """A frame with a wrong mask, length, bits or text, or a valid one with a message that is not one of Bokeh's."""
    if random.random() < 0.5:
        return b"".join(masked(TEXT, part) for part in bokeh_message(random))
    opcode = random.choice([0, TEXT, BINARY, 3, 7, CLOSE, PING, PONG, 11, 15])
    payload = random.choice([b"", b"\xff\xfe", random.randbytes(random.randint(0, 125)), b"{}", b"[" * 60_000])
    length = random.choice([None, None, None, 0, 126, 65535, 1 << 21, 1 << 62, (1 << 64) - 1])
    data = masked(opcode, payload, length, fin=random.random() < 0.7, reserved=random.choice([0, 0, 0, 4, 7]))
    return data if random.random() < 0.6 else mutated(random, data)


def masked(opcode: int, payload: bytes, length: int | None = None, fin: bool = True, reserved: int = 0) -> bytes:
    """A frame of a client. ``length``: what it says, if not the truth. The mask is zero."""
    size = len(payload) if length is None else length
    start = bytes([fin << 7 | reserved << 4 | opcode])
    if size < 126:
        return start + bytes([0x80 | size]) + bytes(4) + payload
    if size < 1 << 16:
        return start + b"\xfe" + struct.pack(">H", size) + bytes(4) + payload
    return start + b"\xff" + struct.pack(">Q", size) + bytes(4) + payload


def bokeh_message(random: Random) -> list[bytes]:
    """Header, metadata and content of a message to the page's document."""
    kind = random.choice(BOKEH_MESSAGES)
    header = random.choice(
        [{"msgid": "1", "msgtype": kind}] * 6 + [{}, [], {"msgid": 1}, {"msgtype": kind, "num_buffers": 9}]
    )
    event = {"kind": random.choice(EVENTS), "model": {"id": random.choice(["p1001", "p1005", "x", 7])}}
    event |= {"attr": random.choice(["value", "data", "active", "x"]), "new": random.choice(VALUES)}
    event |= {"msg_type": "bokeh_event", "msg_data": random.choice(VALUES)} if random.random() < 0.3 else {}
    content: Any = random.choice([{"events": [event]}] * 6 + [{}, [], {"events": 7}, {"doc": {"roots": [7]}}, None])
    parts = [json.dumps(header).encode(), b"{}", json.dumps(content).encode()]
    if random.random() < 0.3:
        at = random.randrange(3)
        parts[at] = mutated(random, parts[at])
    return parts[: random.choice([3, 3, 3, 1, 2])]


# ---- lines and frames of links


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
    slow: int = SLOW
    """Most connections at a time that send a byte now and then."""


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


class SlowSenders:
    """Connections that send a byte each time another connection is made. The oldest ones are closed."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: deque[tuple[socket.socket, Iterator[int]]] = deque()

    def add(self, sock: socket.socket, data: bytes) -> None:
        sock.setblocking(False)
        self._open.append((sock, iter(data)))
        if len(self._open) > self._most:
            self._open.popleft()[0].close()

    def step(self) -> None:
        for sock, rest in self._open:
            with contextlib.suppress(OSError):
                sock.send(bytes([next(rest, 0)]))

    def close(self) -> None:
        for sock, _ in self._open:
            sock.close()


def send_malformed(port: Port, messages: int, seed: int = 0) -> Iterator[int]:
    """Sends as many messages; yields the number so far after each connection. It reads what answers some of them.

    A port that refuses connections for ``CONNECT_S`` seconds is an error.
    """
    random, sent, connections, answered = Random(seed), 0, 0, time.monotonic()
    with contextlib.closing(SlowSenders(port.slow)) as slow:
        while sent < messages:
            data, count = port.attack(random)
            is_slow, is_reset = (random.random() < share for share in (SLOW_SHARE, RESET_SHARE))
            slow.step()
            try:
                sock = port.connect()
                if is_slow and port.slow:
                    slow.add(sock, data)
                else:
                    with sock:
                        deliver(sock, data, wait=connections % READ_EVERY == 0)
                        if is_reset:
                            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            except (ConnectionError, ssl.SSLError):
                if time.monotonic() > answered + CONNECT_S:
                    raise
                continue
            answered = time.monotonic()
            sent, connections = sent + count, connections + 1
            yield sent


@contextlib.contextmanager
def few_open_files() -> Iterator[None]:
    """This process may open ``OPEN_FILES`` files meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
