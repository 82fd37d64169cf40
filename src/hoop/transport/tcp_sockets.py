"""The sockets under a TCP link: the end that dialled, the end that was dialled, and how one ends."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections import deque
from collections.abc import Callable

from hoop.errors import LinkCorrupted
from hoop.topology import Address
from hoop.transport.base import remaining
from hoop.transport.parcel import Parcel
from hoop.wire.frames import HEADER_BYTES, Header, Kind

_SENTENCE_BYTES = 4096


class Outgoing:
    """The end that dialled: it sends frames, and hears at most one, the last words of the other end."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sequence = 0
        self.queue: deque[Parcel] = deque()
        self._heard: tuple[Header, str] | None = None

    def push(self) -> None:
        """Hands over what the socket takes now."""
        while self.queue:
            parcel = self.queue[0]
            if parcel.parts:
                try:
                    sent = self.sock.sendmsg(parcel.parts)
                except (BlockingIOError, InterruptedError):
                    return
                parcel.advance(sent)
            if parcel.done:
                self.queue.popleft()

    def last_words(self) -> tuple[Header, str] | None:
        """A REFUSAL or GOODBYE with its sentence, if the other end said one."""
        if self._heard is None:
            try:
                data = self.sock.recv(HEADER_BYTES + _SENTENCE_BYTES)
                self._heard = Header.unpack(data[:HEADER_BYTES]), data[HEADER_BYTES:].decode(errors="replace")
            except (OSError, LinkCorrupted):
                return None
        return self._heard


class Incoming:
    """The end that was dialled: it receives frames."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sequence = 0
        self.header = bytearray(HEADER_BYTES)


def last_words(kind: Kind, sentence: str, messages: int = 0) -> bytes:
    """What the dialled end says before it closes; ``messages``: how many it has sent on a link of its own."""
    words = sentence.encode()[:_SENTENCE_BYTES]
    return Header(kind, 0, 0, 0, messages, len(words)).pack() + words


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
    return sock
