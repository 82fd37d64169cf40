"""A TCP link: the dialling end, the accepting end, and the closing frame between them.

With checksums the dialling end copies each frame and stores the copy until the receiver acknowledges it
(``RetransmitBuffer``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import termios
import threading
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

from hoop.errors import LinkCorrupted
from hoop.topology import Address
from hoop.transport.base import PendingBuffers, remaining
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

PIECE_BYTES = 256 * 1024
"""Bytes moved in one direction before the other direction gets a turn. A piece that one core wrote is then read by the
other core while it is in the cache, and both directions of a link flow at the same time. Measured in benchmarks/tcp."""
CHECKED_BYTES = 1 << 20
"""The largest payload of a frame with a checksum. Smaller frames cost more headers, larger ones leave the cache."""
SPARE_BYTES = 32 << 20
"""Limit of the memory that is reused for copies; fresh memory costs more than the copy."""
_READ_AHEAD_BYTES = 4096
"""Read in one call, to get a header and all of a small message. This part of a large message is copied twice."""
_MAX_REASON_BYTES = 2048
SOCKET_WRAPPERS: list[Callable[[Any], Any]] = []
"""Applied to every dialled connection; empty unless ``fault_injection`` is installed."""
HELLO_DAMAGED = 1
"""The ``sequence`` of a REFUSAL of a damaged first frame, which may have been a HELLO when it was sent."""
GAVE_UP = "it gave up: "
"""Prefix of the closing frame's text if the endpoint was aborted before it closed; the abort reason follows."""


class CheckedFrame(PendingBuffers):
    """A frame with its own copy of the payload, which may be sent more than once."""

    def __init__(self, sequence: int, header: bytes, payload: bytearray) -> None:
        self.sequence, self.header, self.payload = sequence, header, payload
        super().__init__([])
        self.rewind()

    def rewind(self) -> None:
        """Makes all of the frame unsent again."""
        self.parts = [memoryview(self.header), memoryview(self.payload)][: 2 if self.payload else 1]


class CheckedMessage(PendingBuffers):
    """A message that is sent as several frames; each frame is copied and checksummed when the link is ready for it."""

    def __init__(
        self, payload: memoryview, make_frame: Callable[[memoryview, bool], CheckedFrame], busy: threading.RLock
    ) -> None:
        """``make_frame``: called with a payload and whether more frames follow. ``busy``: the endpoint's lock; the
        thread that sends holds it, which need not be the rank's own thread."""
        super().__init__([])
        self._busy = busy
        self._unframed: memoryview | None = payload
        self._make_frame = make_frame

    @property
    def done(self) -> bool:
        return not self.parts and self._unframed is None

    def detach(self) -> None:
        with self._busy:
            if self._unframed is not None:
                self._unframed = memoryview(bytes(self._unframed))

    def prepare(self) -> None:
        if not self.parts and self._unframed is not None:
            piece, rest = self._unframed[:CHECKED_BYTES], self._unframed[CHECKED_BYTES:]
            self._unframed = rest if rest.nbytes else None
            self.parts = self._make_frame(piece, self._unframed is not None).parts

    def drop_current_frame(self) -> bool:
        """Drops the frame in progress, which the retransmit buffer sends again; whether unframed bytes remain."""
        self.parts = []
        return not self.done


class RetransmitBuffer:
    """The frames of one link that its receiver has not acknowledged."""

    def __init__(self) -> None:
        self._frames: deque[CheckedFrame] = deque()
        self._spare: dict[int, list[bytearray]] = {}
        self._spare_bytes = 0
        self.retransmits = 0
        """How often the oldest frame has been sent again."""

    def __len__(self) -> int:
        return len(self._frames)

    def copy(self, payload: memoryview) -> bytearray:
        """A copy of the payload, in reused memory if there is a spare buffer of its size."""
        spare = self._spare.get(payload.nbytes)
        if not spare:
            return bytearray(payload)
        self._spare_bytes -= payload.nbytes
        reused = spare.pop()
        memoryview(reused)[:] = payload  # assigning to a slice of the bytearray itself would copy twice
        return reused

    def add(self, frame: CheckedFrame) -> CheckedFrame:
        self._frames.append(frame)
        return frame

    def acknowledge(self, sequence: int) -> None:
        """Drops every frame before ``sequence``: the receiver has them, with correct checksums."""
        while self._frames and self._frames[0].sequence < sequence:
            payload = self._frames.popleft().payload
            self.retransmits = 0
            if self._spare_bytes + len(payload) > SPARE_BYTES:  # the spare sizes may be out of use
                self._spare, self._spare_bytes = {}, 0
            if 0 < len(payload) <= SPARE_BYTES:
                self._spare.setdefault(len(payload), []).append(payload)
                self._spare_bytes += len(payload)

    def rewind_all(self) -> list[CheckedFrame]:
        """All frames, rewound to be sent once more."""
        for frame in self._frames:
            frame.rewind()
        return list(self._frames)


class OutgoingLink:
    """The dialling end of a link: it sends frames, and reads acknowledgements and the peer's closing frame."""

    def __init__(self, sock: socket.socket, retransmit_buffer: RetransmitBuffer | None = None) -> None:
        self.sock = sock
        self.sequence = 0
        self.queue: deque[PendingBuffers] = deque()
        self.bytes_sent = 0
        """Bytes that the socket has accepted, without the HELLO."""
        self.retransmit_buffer = retransmit_buffer
        """Unacknowledged frames; None without checksums, when nothing is retransmitted."""
        self.retransmit_requested = False
        self.eof = False
        self._received = bytearray()
        self._closing_frame: tuple[FrameHeader, str] | None = None

    def push(self, limit: int | None = None) -> bool:
        """Sends as many bytes as the socket accepts now, or about ``limit`` of them; whether it accepted any."""
        moved = 0
        while self.queue and (limit is None or moved < limit):
            message = self.queue[0]
            message.prepare()
            if message.parts:
                try:
                    sent = self.sock.sendmsg([part[:limit] for part in message.parts])
                except (BlockingIOError, InterruptedError):
                    break
                moved += sent
                self.bytes_sent += sent
                message.advance(sent)
            if message.done:
                self.queue.popleft()
        return moved > 0

    def closing_frame(self) -> tuple[FrameHeader, str] | None:
        """The peer's REFUSAL, GOODBYE or MISMATCH with its text, if the peer sent one."""
        self.read_replies()
        return self._closing_frame

    def wait_for_reply(self, timeout: float) -> None:
        """Waits until the peer has sent something back, or closed the connection."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        poll.poll(timeout * 1000)

    @property
    def closed_by_peer(self) -> bool:
        """Whether the peer has closed the connection, or sent its closing frame."""
        return self.eof or self._closing_frame is not None

    def read_replies(self) -> None:
        """Reads and handles the frames that the peer has sent back so far; damaged frames are skipped."""
        while not self.closed_by_peer:
            try:
                data = self.sock.recv(HEADER_BYTES + _MAX_REASON_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                data = b""
            self.eof = not data
            self._received += data
            while len(self._received) >= HEADER_BYTES and self._closing_frame is None:
                self._handle_reply(bytes(self._received[:HEADER_BYTES]))
                del self._received[:HEADER_BYTES]

    def _handle_reply(self, frame: bytes) -> None:
        try:
            header = FrameHeader.unpack(frame)
        except LinkCorrupted:
            return
        if header.kind in (FrameKind.REFUSAL, FrameKind.GOODBYE, FrameKind.MISMATCH):
            self._closing_frame = header, self._received[HEADER_BYTES:].decode(errors="replace")
        elif self.retransmit_buffer is not None and header.kind in (FrameKind.ACK, FrameKind.RETRANSMIT):
            self.retransmit_buffer.acknowledge(header.sequence)
        hello_damaged = header.kind == FrameKind.REFUSAL and header.sequence == HELLO_DAMAGED
        self.retransmit_requested = self.retransmit_requested or header.kind == FrameKind.RETRANSMIT or hello_damaged


class IncomingLink:
    """The accepting end of a link: it receives frames."""

    def __init__(self, sock: socket.socket, wakeup: socket.socket) -> None:
        self.sock = sock
        self.sequence = 0
        self.unchecked = False
        """Whether the sender uses no checksums, and so has nothing to retransmit."""
        self.bytes_read = 0
        self.acknowledged = 0
        """How many frames arrived with a correct checksum."""
        self._buffer = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._start = 0
        self._stop = 0
        self.poll = select.poll()
        """For a wait for this link alone: its socket and the endpoint's wakeup socket."""
        self.poll.register(sock, select.POLLIN)
        self.poll.register(wakeup, select.POLLIN)

    @property
    def buffered(self) -> int:
        """Bytes that were read ahead and not taken yet."""
        return self._stop - self._start

    @property
    def bytes_received(self) -> int:
        """Bytes that have arrived, including those still unread in the socket."""
        return self.bytes_read + unread_bytes(self.sock)

    def read_ahead(self) -> int:
        """Reads the available bytes, up to a limit; returns how many, 0 at the end of the link."""
        if self._start:  # the rest is at most the beginning of a header
            rest = bytes(self._buffer[self._start : self._stop])
            self._buffer[: len(rest)] = rest
            self._start, self._stop = 0, len(rest)
        got = self.sock.recv_into(self._buffer[self._stop :])
        self._stop += got
        return got

    def at_end(self) -> bool:
        """Whether the peer has closed the connection and every byte was read; reads none, and does not wait."""
        if self.buffered:
            return False
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def take(self, limit: int) -> memoryview:
        """At most ``limit`` bytes that were read ahead, valid until the next ``read_ahead``."""
        taken = self._buffer[self._start : min(self._start + limit, self._stop)]
        self._start += taken.nbytes
        return taken


def unread_bytes(sock: socket.socket) -> int:
    """Bytes that have arrived at a socket and were not read yet."""
    unread = array("i", [0])
    with contextlib.suppress(OSError, ValueError):  # another thread may close the socket
        fcntl.ioctl(sock, termios.FIONREAD, unread)
    return unread[0]


def closing_frame(kind: FrameKind, text: str, messages: int = 0) -> bytes:
    """The last frame before a link closes; ``messages``: how many messages the closing rank sent on its own link."""
    payload = text.encode()[:_MAX_REASON_BYTES]
    header = FrameHeader(kind, communicator=0, generation=0, source=0, sequence=messages, length=len(payload))
    return header.pack() + payload


def connect(address: Address, wakeup: socket.socket, deadline: float, stop: Callable[[], bool]) -> socket.socket:
    """A connected, non-blocking socket. Raises TimeoutError at the deadline, InterruptedError once ``stop`` is true.

    ``wakeup``: a socket whose input interrupts the wait, so that ``stop`` is called again.
    """
    family, kind, protocol, _, sockaddr = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(sockaddr)
        poll = select.poll()
        poll.register(sock, select.POLLOUT)
        poll.register(wakeup, select.POLLIN)
        while code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
            ready = dict(poll.poll(remaining(deadline) * 1000))
            if stop():
                raise InterruptedError
            if sock.fileno() in ready:
                code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            elif not ready:
                raise TimeoutError
            else:
                wakeup.recv(64)  # a new incoming link, or a wake-up: not for this wait
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    for wrap in SOCKET_WRAPPERS:
        sock = wrap(sock)
    return sock
