"""A lane: an additional socket of a TCP link, and the thread that drives one end of it.

A lane carries stripes one way, from the rank that dialled it: each is a header and a part of a large message
(``tcp_lanes``). The calls that move bytes release Python's interpreter lock, so the lanes of a link work at the same
time, on several cores.

The sending thread never blocks in a call that reads the message: ``Stripe.detach`` and ``Lanes.pause`` wait for a call
that copies at most ``_PIECE_BYTES``. The receiving thread blocks in the socket until a piece is complete, which spares
it a wake-up for every packet; ``cancel`` and ``shut_down`` shut the socket down and thereby end that call.

A thread without work waits for work or for ``shut_down``, which every endpoint calls when it closes.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from hoop.errors import LinkCorrupted
from hoop.transport.base import PendingBuffers
from hoop.transport.tcp_link import unread_bytes
from hoop.wire.frames import HEADER_BYTES

log = logging.getLogger("hoop.transport")
_PIECE_BYTES = 512 * 1024
"""Bytes moved in one call: few calls, and counters that show whether a slow link makes progress."""
_THREAD_END_S = 10.0
"""Limit of the wait for a thread whose socket was shut down, which ends its call at once."""


class Stripe(PendingBuffers):
    """The part of a message that one lane sends: its header, then its bytes."""

    def __init__(self, header: bytes, payload: memoryview, lane: OutgoingLane) -> None:
        super().__init__([memoryview(header), payload])
        self._lane = lane

    def detach(self) -> None:
        with self._lane.changed:  # its thread sends nothing meanwhile
            super().detach()


class _Lane(ABC):
    """What both ends have: a thread that is started for the first stripe."""

    def __init__(self, name: str, sock: socket.socket | None) -> None:
        """``name``: of the thread. ``sock``: None at the receiving end until the listener has accepted it."""
        self.sock = sock
        self.changed = threading.Condition()
        """Guards the stripes; held while bytes of a stripe are sent."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _run(self) -> None: ...

    def _notify_thread(self) -> None:
        """There is something to do; called with ``changed``."""
        if self._thread.ident is None:
            self._thread.start()
        self.changed.notify_all()

    def shut_down(self) -> None:
        """Ends the thread's current call; ``close`` follows."""
        with self.changed:
            self._closing = True
            self.changed.notify_all()
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        if self.sock is not None:
            with contextlib.suppress(OSError):  # the connection may have ended
                self.sock.shutdown(how)

    def close(self) -> None:
        """Called after ``shut_down``: waits for the thread and closes the socket."""
        if self._thread.ident is not None:
            self._thread.join(_THREAD_END_S)
            if self._thread.is_alive():
                log.warning("%s did not end within %g s", self._thread.name, _THREAD_END_S)
        if self.sock is not None:
            self.sock.close()


class OutgoingLane(_Lane):
    """The dialling end: it sends stripes in order."""

    def __init__(
        self, name: str, sock: socket.socket, may_send: Callable[[], bool], on_change: Callable[[], None]
    ) -> None:
        """``sock``: non-blocking. ``may_send``: whether bytes may be sent now. ``on_change``: called by the thread when
        a stripe was sent, or sending failed."""
        super().__init__(name, sock)
        self._outgoing = sock
        self._may_send, self._on_change = may_send, on_change
        self._stripes: deque[Stripe] = deque()
        self.bytes_sent = 0
        """Bytes that the socket has accepted, without the greeting."""
        self.error: OSError | None = None
        """Why the lane can send no more."""
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    @property
    def sending(self) -> bool:
        """Whether a stripe is not sent completely."""
        return bool(self._stripes)

    def send(self, header: bytes, payload: memoryview) -> Stripe:
        stripe = Stripe(header, payload, self)
        with self.changed:
            self._stripes.append(stripe)
            self._notify_thread()
        return stripe

    def gate_changed(self) -> None:
        """Called after a change of ``may_send``; once it returns the thread follows it."""
        with self.changed:
            self.changed.notify_all()

    def _run(self) -> None:
        try:
            while (stripe := self._next_stripe()) is not None:
                if not self._send_piece(stripe):
                    self._writable.poll()  # also returns when the socket is shut down
        except OSError as error:
            self.error = error.with_traceback(None)
            self._on_change()

    def _next_stripe(self) -> Stripe | None:
        """Waits for a stripe that may be sent; None: the lane closes."""
        with self.changed:
            self.changed.wait_for(lambda: self._closing or (self._stripes and self._may_send()))
            return None if self._closing else self._stripes[0]

    def _send_piece(self, stripe: Stripe) -> bool:
        """Sends what the socket accepts now, up to a limit; false if it accepts nothing."""
        with self.changed:
            if self._closing or not self._may_send():
                return True
            try:
                sent = self._outgoing.sendmsg([part[:_PIECE_BYTES] for part in stripe.parts])
            except (BlockingIOError, InterruptedError):
                return False
            self.bytes_sent += sent
            stripe.advance(sent)
            if not stripe.done:
                return True
            self._stripes.popleft()
        self._on_change()
        return True


class IncomingLane(_Lane):
    """The accepting end: it receives one stripe at a time, into the memory of its message.

    It may be created before the listener has accepted its connection: the rank's thread may be faster.
    """

    def __init__(self, name: str, on_change: Callable[[], None]) -> None:
        """``on_change``: called by the thread when a stripe was received, or receiving failed."""
        super().__init__(name, None)
        self._on_change = on_change
        self._expected: tuple[bytes, memoryview] | None = None
        """The stripe to receive: its header, and the memory for its payload."""
        self._bytes_read = 0
        self._cancelled = False
        self.failure: OSError | EOFError | LinkCorrupted | None = None
        """Why a stripe was not received; EOFError: the peer closed the lane."""

    @property
    def receiving(self) -> bool:
        return self._expected is not None

    @property
    def bytes_received(self) -> int:
        """Bytes that have arrived, including those still unread in the socket."""
        return self._bytes_read + (unread_bytes(self.sock) if self.sock is not None else 0)

    def attach(self, sock: socket.socket) -> bool:
        """Takes the connection; false if the lane has one already."""
        with self.changed:
            if self.sock is not None or self._closing:
                return False
            sock.setblocking(True)
            self.sock = sock
            self.changed.notify_all()
            return True

    def receive(self, header: bytes, into: memoryview) -> None:
        """Starts to receive a stripe, which must have exactly this header."""
        with self.changed:
            self._expected = header, into
            self._notify_thread()

    def cancel(self) -> None:
        """Gives up the current stripe, and with it the lane; afterwards the thread does not write to its memory."""
        with self.changed:
            if self._expected is None:
                return
            self._cancelled = True
            if self.sock is None:
                self._expected = None
                return
            self._shut(socket.SHUT_RD)  # the peer does not notice: it learns the reason from the link
            if not self.changed.wait_for(lambda: self._expected is None, _THREAD_END_S):
                log.warning("%s did not stop within %g s", self._thread.name, _THREAD_END_S)

    def _run(self) -> None:
        while self._receive_stripe():
            self._on_change()

    def _receive_stripe(self) -> bool:
        """Waits for a stripe to receive, and receives it; false: the lane closes."""
        with self.changed:
            self.changed.wait_for(lambda: self._closing or (self._expected is not None and self.sock is not None))
            if self._closing or self._expected is None or self.sock is None:
                self._expected = None
                self.changed.notify_all()
                return False
            sock, (header, into) = self.sock, self._expected
        try:
            received = bytearray(HEADER_BYTES)
            self._fill(sock, memoryview(received))
            if received != header:
                raise LinkCorrupted("a stripe came that is not part of this message")
            self._fill(sock, into)
        except (OSError, EOFError, LinkCorrupted) as error:
            self.failure = error.with_traceback(None)  # which would keep the memory of the message in use
        with self.changed:
            self._expected = None
            self.changed.notify_all()
        return True

    def _fill(self, sock: socket.socket, view: memoryview) -> None:
        while view.nbytes:
            if self._cancelled:
                raise EOFError
            count = sock.recv_into(view[:_PIECE_BYTES], 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError
            self._bytes_read += count
            view = view[count:]
