"""The sockets under a TCP link: the end that dialled, the end that was dialled, and how one ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import termios
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from hoop.errors import LinkCorrupted
from hoop.topology import Address
from hoop.transport.base import PendingBuffers, remaining
from hoop.transport.retransmit import RetransmitBuffer
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

_AHEAD_BYTES = 4096
"""Read at once in the hope of a header and all of a small message; of a large one so much is copied twice."""
_SENTENCE_BYTES = 2048
WRAPS: list[Callable[[Any], Any]] = []
"""What every connection that is dialled is wrapped in: nothing, unless something is to go wrong (``faulty``)."""
DAMAGED = 1
"""The ``sequence`` of a REFUSAL of what was no HELLO: it may have been one when it was sent."""
GAVE_UP = "it gave up: "
"""How a sentence begins that tells why an endpoint was aborted before it closed."""


class OutgoingLink:
    """The end that dialled: it sends frames, and hears what came of them, and the other end's last words."""

    def __init__(self, sock: socket.socket, kept: RetransmitBuffer | None = None) -> None:
        self.sock = sock
        self.sequence = 0
        self.queue: deque[PendingBuffers] = deque()
        self.taken = 0
        """Bytes that the socket has taken, but for the greeting."""
        self.kept = kept
        """What may have to be sent again; None: nothing is."""
        self.again = False
        """Whether it has to be."""
        self.ended = False
        self._said = bytearray()
        self._heard: tuple[FrameHeader, str] | None = None

    def push(self, most: int | None = None) -> bool:
        """Hands over what the socket takes now, or about ``most`` bytes of it; whether it took any."""
        moved = 0
        while self.queue and (most is None or moved < most):
            parcel = self.queue[0]
            parcel.prepare()
            if parcel.parts:
                try:
                    sent = self.sock.sendmsg([part[:most] for part in parcel.parts])
                except (BlockingIOError, InterruptedError):
                    break
                moved += sent
                self.taken += sent
                parcel.advance(sent)
            if parcel.done:
                self.queue.popleft()
        return moved > 0

    def last_words(self) -> tuple[FrameHeader, str] | None:
        """A REFUSAL, GOODBYE or MISMATCH with its sentence, if the other end said one."""
        self.hear()
        return self._heard

    @property
    def over(self) -> bool:
        """Whether the other end has gone, or said its last words."""
        return self.ended or self._heard is not None

    def hear(self) -> None:
        """Takes in what the other end has said so far. What was damaged on the way is passed over."""
        while not self.over:
            try:
                data = self.sock.recv(HEADER_BYTES + _SENTENCE_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            self.ended = not data
            self._said += data
            while len(self._said) >= HEADER_BYTES and self._heard is None:
                self._understand(bytes(self._said[:HEADER_BYTES]))
                del self._said[:HEADER_BYTES]

    def _understand(self, said: bytes) -> None:
        try:
            header = FrameHeader.unpack(said)
        except LinkCorrupted:
            return
        if header.kind in (FrameKind.REFUSAL, FrameKind.GOODBYE, FrameKind.MISMATCH):
            self._heard = header, self._said[HEADER_BYTES:].decode(errors="replace")
        elif self.kept is not None and header.kind in (FrameKind.RECEIVED, FrameKind.AGAIN):
            self.kept.confirm(header.sequence)
        damaged_hello = header.kind == FrameKind.REFUSAL and header.sequence == DAMAGED
        self.again = self.again or header.kind == FrameKind.AGAIN or damaged_hello


class IncomingLink:
    """The end that was dialled: it receives frames."""

    def __init__(self, sock: socket.socket, bell: socket.socket) -> None:
        self.sock = sock
        self.sequence = 0
        self.plain = False
        """Whether its sender checks nothing, and so keeps nothing either."""
        self.came = 0
        """Bytes that were read."""
        self.confirmed = 0
        """Messages that came as they were sent."""
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._start = 0
        self._stop = 0
        self.readable = select.poll()
        """For whoever waits for this link alone."""
        self.readable.register(sock, select.POLLIN)
        self.readable.register(bell, select.POLLIN)

    @property
    def ahead(self) -> int:
        """Bytes that were read and not taken yet."""
        return self._stop - self._start

    @property
    def arrived(self) -> int:
        """Bytes that have come, those included that nobody has read yet."""
        waiting = array("i", [0])
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            fcntl.ioctl(self.sock, termios.FIONREAD, waiting)
        return self.came + waiting[0]

    def read_ahead(self) -> int:
        """Reads what is there, up to a limit; 0 at the end of the link."""
        if self._start:  # the beginning of a header, at most
            rest = bytes(self._ahead[self._start : self._stop])
            self._ahead[: len(rest)] = rest
            self._start, self._stop = 0, len(rest)
        got = self.sock.recv_into(self._ahead[self._stop :])
        self._stop += got
        return got

    def take(self, most: int) -> memoryview:
        """Bytes that were read ahead, good until the next ``read_ahead``."""
        taken = self._ahead[self._start : min(self._start + most, self._stop)]
        self._start += taken.nbytes
        return taken


def last_words(kind: FrameKind, sentence: str, messages: int = 0) -> bytes:
    """What the dialled end says before it closes; ``messages``: how many it has sent on a link of its own."""
    words = sentence.encode()[:_SENTENCE_BYTES]
    return FrameHeader(kind, 0, 0, 0, messages, len(words)).pack() + words


def connect(
    address: Address, bell: socket.socket, deadline: float, stop: Callable[[], bool]
) -> socket.socket:
    """A connected, non-blocking socket; TimeoutError at the deadline, InterruptedError when told to stop."""
    family, kind, protocol, _, place = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(place)
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        poll.register(bell, select.POLLIN)
        while code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
            ready = dict(poll.poll(remaining(deadline) * 1000))
            if stop():
                raise InterruptedError
            if sock.fileno() in ready:
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            elif not ready:
                raise TimeoutError
            else:
                bell.recv(64)  # a new link, or a wake-up: not for this wait
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    for wrap in WRAPS:
        sock = wrap(sock)
    return sock
