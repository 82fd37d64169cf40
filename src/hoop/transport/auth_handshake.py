"""Mutual authentication of the two ends of a link: each proves that it has the cluster's key, without sending it.

    dialling end                                   accepting end
    HELLO, 16 random bytes ─────────────────────▶                    (1)
           ◀──── CHALLENGE, 16 random bytes, HMAC over both          (2) proves that the accepting end has the key
    HMAC over both ─────────────────────────────▶                    (3) proves that the dialling end has it; then data

Both proofs cover the HELLO, so they hold for this communicator, generation and rank only. The random bytes of both ends
prevent replay. Without a key there is no handshake: the link starts with a plain HELLO.

A lane starts with LANE in place of HELLO, and its greeting ends with a LANE frame from the accepting end, so that a
lane that is never accepted carries nothing (``tcp_lanes``).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hoop.errors import LinkCorrupted, PeerLost
from hoop.transport.base import remaining
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind, check_start

NONCE_BYTES = 16
PROOF_BYTES = 32
_MAX_RANK = 2**32 - 1
"""Largest rank of the dialled end, which ``sequence`` of a greeting holds; ``source`` of the answer holds it."""
_MAX_ANSWER_BYTES = 2048
"""Longest payload that is read of the answer to a HELLO; a refusal has a text."""


def _proof(key: bytes, role: bytes, hello: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, b"hoop link v1 " + role + hello + nonces, hashlib.sha256).digest()


@dataclass
class Greeting:
    """The accepting end: parses what a new connection sends first, from bytes as they arrive.

    It never stores more than the longest greeting.
    """

    key: bytes
    hello: FrameHeader | None = None
    """The first frame, once the dialling end has authenticated itself."""
    parsed: bool = False
    """Whether the first frame had a correct header checksum; if not, it was damaged, or not a frame."""
    _received: bytearray = field(default_factory=bytearray)
    _expected: int = HEADER_BYTES
    _nonce: bytes = b""

    @property
    def missing(self) -> int:
        """How many bytes to read next; any further bytes on the connection belong to the endpoint."""
        return self._expected - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Adds received bytes and returns the answer to send; raises LinkCorrupted if this is no peer."""
        self._received += data
        check_start(self._received)
        if self.missing:
            return b""
        head = bytes(self._received[:HEADER_BYTES])
        hello = FrameHeader.unpack(head)
        self.parsed = True
        if self._expected == HEADER_BYTES:
            return self._begin(hello)
        nonces = bytes(self._received[HEADER_BYTES : HEADER_BYTES + NONCE_BYTES])
        if self._expected == HEADER_BYTES + NONCE_BYTES:  # (2)
            self._nonce = os.urandom(NONCE_BYTES)
            self._expected += PROOF_BYTES
            payload = self._nonce + _proof(self.key, b"dialled", head, nonces + self._nonce)
            challenge = FrameHeader(
                FrameKind.CHALLENGE, communicator=0, generation=0, source=0, sequence=0, length=len(payload)
            )
            return challenge.pack() + payload
        expected = _proof(self.key, b"dials", head, nonces + self._nonce)
        if not hmac.compare_digest(expected, bytes(self._received[-PROOF_BYTES:])):
            raise LinkCorrupted("this link could not prove itself: both devices need the same token or certificates")
        self.hello = hello
        return b""

    def _begin(self, hello: FrameHeader) -> bytes:
        if hello.kind not in (FrameKind.HELLO, FrameKind.LANE, FrameKind.ASK, FrameKind.MISMATCH):
            raise LinkCorrupted("the first frame on a link must be HELLO")
        if bool(hello.lane) != (hello.kind == FrameKind.LANE):
            raise LinkCorrupted(f"a first frame of kind {hello.kind} for lane {hello.lane}")
        if hello.sequence > _MAX_RANK:
            raise LinkCorrupted(f"a first frame for rank {hello.sequence}")
        if hello.length not in (0, NONCE_BYTES):
            raise LinkCorrupted(f"a HELLO of {hello.length} bytes")
        if bool(self.key) != bool(hello.length):
            raise LinkCorrupted(
                "this device wants links that prove themselves: start the other one with the same token or certificates"
                if self.key
                else "this device has no token and cannot prove itself: start it with the other one's"
            )
        if self.key:
            self._expected += NONCE_BYTES
        else:
            self.hello = hello
        return b""


def greet(
    sock: socket.socket,
    hello: FrameHeader,
    key: bytes,
    wakeup: socket.socket,
    deadline: float,
    stop: Callable[[], bool],
) -> None:
    """The dialling end: sends the first frame of a connection, and authenticates both ends if there is a key.

    For a lane it then waits until the other end has accepted it. Closes the socket on failure, and raises what
    ``authenticate`` raises.
    """
    if key:
        authenticate(sock, hello, key, wakeup, deadline, stop)
    with _closed_on_failure(sock, "it did not accept the lane"):
        if not key:
            sock.sendmsg([memoryview(hello.pack())])  # small enough that a new socket accepts it at once
        if hello.kind == FrameKind.LANE:
            answer, _ = _read_answer(sock, wakeup, deadline, stop)
            if answer.kind != FrameKind.LANE:
                raise LinkCorrupted(f"it answered with a frame of kind {answer.kind}")


def authenticate(
    sock: socket.socket,
    hello: FrameHeader,
    key: bytes,
    wakeup: socket.socket,
    deadline: float,
    stop: Callable[[], bool],
) -> None:
    """The dialling end, on a connected non-blocking socket; closes the socket on failure.

    Raises TimeoutError at the deadline, InterruptedError once ``stop`` is true, PeerLost if the other end refuses the
    link or does not have the key.
    """
    with _closed_on_failure(sock, "it did not prove itself"):
        head, nonce = replace(hello, length=NONCE_BYTES).pack(), os.urandom(NONCE_BYTES)
        sock.send(head + nonce)  # (1): small enough that a new socket accepts it at once
        answer, payload = _read_answer(sock, wakeup, deadline, stop)
        peer_nonce, proof = payload[:NONCE_BYTES], payload[NONCE_BYTES:]
        if answer.kind != FrameKind.CHALLENGE or not hmac.compare_digest(
            proof, _proof(key, b"dialled", head, nonce + peer_nonce)
        ):
            raise PeerLost("it could not prove that it belongs to this cluster: have both the same token?")
        sock.send(_proof(key, b"dials", head, nonce + peer_nonce))  # (3)


@contextmanager
def _closed_on_failure(sock: socket.socket, problem: str) -> Iterator[None]:
    """Closes the socket if the block raises; a damaged answer is raised as PeerLost, which begins with ``problem``."""
    try:
        yield
    except LinkCorrupted as error:
        sock.close()
        raise PeerLost(f"{problem}: {error}") from None
    except BaseException:
        sock.close()
        raise


def _read_answer(
    sock: socket.socket, wakeup: socket.socket, deadline: float, stop: Callable[[], bool]
) -> tuple[FrameHeader, bytes]:
    """The frame that answers the first one; raises PeerLost if it is a refusal, and what ``read_exactly`` raises."""
    answer = FrameHeader.unpack(read_exactly(sock, HEADER_BYTES, wakeup, deadline, stop))
    payload = read_exactly(sock, min(answer.length, _MAX_ANSWER_BYTES), wakeup, deadline, stop)
    if answer.kind in (FrameKind.REFUSAL, FrameKind.GOODBYE):
        raise PeerLost(f"it refused the link: {payload.decode(errors='replace')}")
    return answer, payload


def read_exactly(
    sock: socket.socket, size: int, wakeup: socket.socket, deadline: float, stop: Callable[[], bool]
) -> bytes:
    """Reads ``size`` bytes from a non-blocking socket.

    Raises TimeoutError at the deadline, InterruptedError once ``stop`` is true, PeerLost if the connection ends.
    """
    data = b""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(wakeup, select.POLLIN)
    while len(data) < size:
        ready = dict(poll.poll(remaining(deadline) * 1000))
        if stop():
            raise InterruptedError
        if sock.fileno() in ready:
            more = sock.recv(size - len(data))
            if not more:
                raise PeerLost("it closed the connection before it had answered")
            data += more
        elif not ready:
            raise TimeoutError
        else:
            wakeup.recv(64)  # a new incoming link, or a wake-up: not for this wait
    return data
