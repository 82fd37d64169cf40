"""How processes of one host hand each other their memory: a local socket, a HELLO, descriptors.

Descriptors are passed, never paths. The socket's name follows from an address; only processes of the same user are
let in.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import socket
import struct
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hoop.errors import FailedPrecondition, LinkCorrupted
from hoop.topology import Address
from hoop.wire.frames import HEADER_BYTES, Header, Kind

_OFFER = struct.Struct("<32sQQ")  # token, where the arena's bytes start in its file, how many they are
_HELLO_BYTES = HEADER_BYTES + _OFFER.size
_TRIES = 100
_HELLO_S = 1.0

Seat = tuple[int, int, int]
"""Which endpoint: communicator, generation, rank."""


@dataclass
class Guest:
    """A peer that dialled."""

    sock: socket.socket
    seat: Seat
    source: int
    token: str
    descriptors: list[int]
    span: tuple[int, int]


ABSTRACT = sys.platform == "linux"
"""Linux has socket names that are no files and end with the process; elsewhere it is a file."""


def name_of(address: Address) -> str:
    name = f"hoop-{os.getuid()}-{address.port}"
    return f"\0{name}" if ABSTRACT else str(Path(tempfile.gettempdir()) / name)


def listen(address: Address) -> tuple[socket.socket, Address]:
    for _ in range(_TRIES):
        chosen = address if address.port else Address(address.host, random.randrange(1024, 65536))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(name_of(chosen))
            if not ABSTRACT:
                os.chmod(name_of(chosen), 0o600)  # before anybody can connect
            sock.listen(512)
            return sock, chosen
        except OSError:
            sock.close()
            if address.port:
                break
    raise FailedPrecondition(f"shared memory at {address}: another process of this user has that name")


def listen_to(sock: socket.socket) -> Guest:
    """A peer's HELLO, with the descriptors of its memory."""
    sock.settimeout(_HELLO_S)
    check_user(sock)
    until = time.monotonic() + _HELLO_S
    data, descriptors, _, _ = socket.recv_fds(sock, _HELLO_BYTES, 2)
    try:
        while 0 < len(data) < _HELLO_BYTES:
            more = sock.recv(_HELLO_BYTES - len(data))
            if not more or time.monotonic() > until:  # it hung up in the middle, or takes all day
                raise LinkCorrupted(f"a HELLO ended after {len(data)} of {_HELLO_BYTES} bytes")
            data += more
        header = Header.unpack(data[:HEADER_BYTES])
        token, start, size = _OFFER.unpack(data[HEADER_BYTES:])
        if header.kind != Kind.HELLO or not descriptors or not re.fullmatch(rb"[0-9a-f]{32}", token):
            raise LinkCorrupted("not a HELLO with memory")
    except Exception:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    seat = (header.communicator, header.generation, header.sequence)
    return Guest(sock, seat, header.source, token.decode(), list(descriptors), (start, size))


def check_user(sock: socket.socket) -> None:
    """Raises unless the process at the other end is this user's: anybody can take, or dial, a name that is no file."""
    if ABSTRACT:
        _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise LinkCorrupted(f"user {user} may not share memory with this one")


def check_memory(descriptor: int, start: int, size: int) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.getuid() or found.st_size < start + size:
        raise ValueError(f"{found.st_size} bytes of user {found.st_uid} where {start + size} are needed")


def send_away(guest: Guest) -> None:
    guest.sock.close()
    for descriptor in guest.descriptors:
        os.close(descriptor)


def host_identity() -> str:
    """The same for all processes that can share memory, and for no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/ipc").st_ino, os.stat("/proc/self/ns/net").st_ino
        identity = f"{boot} {namespace} {os.getuid()}"
    except OSError:
        identity = f"{socket.gethostname()} {os.getuid()}"
    return "shm-" + hashlib.sha256(identity.encode()).hexdigest()[:12]


def offer(token: str, start: int, size: int) -> bytes:
    """What follows a HELLO: the name of one's bells, and where in its file an arena's bytes are."""
    return _OFFER.pack(token.encode(), start, size)
