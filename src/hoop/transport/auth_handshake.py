"""How the two ends of a link prove to each other that they have the cluster's key, without sending it.

    dials                                          is dialled
    HELLO, 16 random bytes ─────────────────────▶                    (1)
           ◀──── CHALLENGE, 16 random bytes, HMAC over both          (2) the dialled one has the key
    HMAC over both ─────────────────────────────▶                    (3) so has the one that dials; then data

Both proofs cover the HELLO, so the link is the one that was asked for: this communicator, generation and rank. Nothing
that was overheard is of use again. Without a key none of this happens, and a link begins as it always did.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hoop.errors import LinkCorrupted, PeerLost
from hoop.transport.base import remaining
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind, check_start

NONCE_BYTES = 16
PROOF_BYTES = 32
_LONGEST = 2048
"""Bytes of a sentence with which a link is refused."""


def _proof(key: bytes, who: bytes, hello: bytes, nonces: bytes) -> bytes:
    return hmac.new(key, b"hoop link v1 " + who + hello + nonces, hashlib.sha256).digest()


@dataclass
class Greeting:
    """What a stranger says, read as it comes; there is never more of it here than its longest form."""

    key: bytes
    hello: FrameHeader | None = None
    """Whom it wants, once it has proved itself."""
    legible: bool = False
    """Whether what came is a frame as somebody made it; else it was damaged on the way, or never one."""
    _heard: bytearray = field(default_factory=bytearray)
    _wanted: int = HEADER_BYTES
    _nonce: bytes = b""

    @property
    def missing(self) -> int:
        """How many bytes come before anything can be said: what follows is for the endpoint."""
        return self._wanted - len(self._heard)

    def hear(self, data: bytes) -> bytes:
        """Takes in what came, and returns what is to be answered; LinkCorrupted if this is no peer."""
        self._heard += data
        check_start(self._heard)
        if self.missing:
            return b""
        head = bytes(self._heard[:HEADER_BYTES])
        hello = FrameHeader.unpack(head)
        self.legible = True
        if self._wanted == HEADER_BYTES:
            return self._begin(hello)
        nonces = bytes(self._heard[HEADER_BYTES : HEADER_BYTES + NONCE_BYTES])
        if self._wanted == HEADER_BYTES + NONCE_BYTES:  # (2)
            self._nonce = os.urandom(NONCE_BYTES)
            self._wanted += PROOF_BYTES
            payload = self._nonce + _proof(self.key, b"dialled", head, nonces + self._nonce)
            return FrameHeader(FrameKind.CHALLENGE, 0, 0, 0, 0, len(payload)).pack() + payload
        expected = _proof(self.key, b"dials", head, nonces + self._nonce)
        if not hmac.compare_digest(expected, bytes(self._heard[-PROOF_BYTES:])):
            raise LinkCorrupted(
                "this link could not prove itself: both devices need the same token or certificates"
            )
        self.hello = hello
        return b""

    def _begin(self, hello: FrameHeader) -> bytes:
        if hello.kind not in (FrameKind.HELLO, FrameKind.ASK, FrameKind.MISMATCH):
            raise LinkCorrupted("the first frame on a link must be HELLO")
        if hello.length not in (0, NONCE_BYTES):
            raise LinkCorrupted(f"a HELLO of {hello.length} bytes")
        if bool(self.key) != bool(hello.length):
            raise LinkCorrupted(
                "this device wants links that prove themselves: start the other one with the same token or certificates"
                if self.key
                else "this device has no token and cannot prove itself: start it with the other one's"
            )
        if self.key:
            self._wanted += NONCE_BYTES
        else:
            self.hello = hello
        return b""


def prove(
    sock: socket.socket,
    hello: FrameHeader,
    key: bytes,
    bell: socket.socket,
    deadline: float,
    stop: Callable[[], bool],
) -> None:
    """The dialling side, on a connected socket that does not block; on failure the socket is closed.

    TimeoutError at the deadline, InterruptedError when told to stop, PeerLost if the other side refuses or has not
    the key.
    """
    try:
        head, nonce = replace(hello, length=NONCE_BYTES).pack(), os.urandom(NONCE_BYTES)
        sock.send(head + nonce)  # (1): a fresh socket takes so little at once
        answer = FrameHeader.unpack(read_exactly(sock, HEADER_BYTES, bell, deadline, stop))
        said = read_exactly(sock, min(answer.length, _LONGEST), bell, deadline, stop)
        if answer.kind in (FrameKind.REFUSAL, FrameKind.GOODBYE):
            raise PeerLost(f"it refused the link: {said.decode(errors='replace')}")
        theirs, proof = said[:NONCE_BYTES], said[NONCE_BYTES:]
        if answer.kind != FrameKind.CHALLENGE or not hmac.compare_digest(
            proof, _proof(key, b"dialled", head, nonce + theirs)
        ):
            raise PeerLost("it could not prove that it belongs to this cluster: have both the same token?")
        sock.send(_proof(key, b"dials", head, nonce + theirs))  # (3)
    except LinkCorrupted as error:
        sock.close()
        raise PeerLost(f"it did not prove itself: {error}") from None
    except BaseException:
        sock.close()
        raise


def read_exactly(
    sock: socket.socket, size: int, bell: socket.socket, deadline: float, stop: Callable[[], bool]
) -> bytes:
    """The next ``size`` bytes of a socket that does not block; TimeoutError at the deadline, InterruptedError when told
    to stop, PeerLost at the connection's end."""
    data = b""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    poll.register(bell, select.POLLIN)
    while len(data) < size:
        ready = dict(poll.poll(remaining(deadline) * 1000))
        if stop():
            raise InterruptedError
        if sock.fileno() in ready:
            more = sock.recv(size - len(data))
            if not more:
                raise PeerLost("it hung up before it had proved itself")
            data += more
        elif not ready:
            raise TimeoutError
        else:
            bell.recv(64)  # a new link, or a wake-up: not for this wait
    return data
