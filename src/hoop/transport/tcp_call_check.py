"""How ranks that are linked by TCP detect that their collectives do not match.

    a message with a different stamp   the receiver asks the sender's listener which collective it runs       (1)
    a long wait in a collective        the rank asks the listener of the peer it waits for, from time to time (2)
    a mismatch was found               each rank that knows of it reports it to all listeners, then raises    (3)

A rank that no report reached learns of the mismatch from the closing frame on its links to the reporting rank.

(2) covers ranks that wait for each other, so that no message ever arrives. In a collective in which every rank needs
data from every other rank, no rank finishes while calls differ; so a rank that found no mismatch still gets (3).

Queries and reports use connections of their own, because a data link may be full of a message that its receiver does
not read. The listener's thread answers, whatever its rank is doing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from math import inf

from hoop.errors import CollectiveMismatch, HoopError, LinkCorrupted
from hoop.topology import Address
from hoop.transport.auth_handshake import greet, read_exactly
from hoop.transport.call_check import Call, length_mismatch_error, mismatch_error, operations_ahead
from hoop.transport.tcp_link import connect
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

FIRST_QUERY_S = 0.2
"""How long a rank waits in a collective before its first query; the interval doubles with each query."""
_MAX_QUERY_INTERVAL_S = 2.0
_ANSWER_TIMEOUT_S = 2.0
_CLOSED_PEER_TIMEOUT_S = 0.5
_BROADCAST_TIMEOUT_S = 5.0
"""How long a rank that has found a mismatch reports it to its peers, before it raises."""
_MAX_REPORT_BYTES = 8192
_LEFT_OPERATION = "another operation, which it has left"


class MismatchFrame:
    """Parses one MISMATCH frame from bytes as they arrive."""

    def __init__(self) -> None:
        self._received = bytearray()
        self.header: FrameHeader | None = None

    @property
    def missing(self) -> int:
        """How many bytes to read next: the rest of the header, then the rest of the text."""
        return HEADER_BYTES + (self.header.length if self.header else 0) - len(self._received)

    def feed(self, data: bytes) -> None:
        """Adds received bytes; raises LinkCorrupted if they are not a MISMATCH frame."""
        self._received += data
        if self.header is None and not self.missing:
            self.header = FrameHeader.unpack(self._received)
            if self.header.kind != FrameKind.MISMATCH or self.header.length > _MAX_REPORT_BYTES:
                raise LinkCorrupted(
                    f"a frame of kind {self.header.kind} and {self.header.length} bytes is no mismatch report"
                )

    @property
    def complete(self) -> bool:
        return self.header is not None and not self.missing

    @property
    def text(self) -> str:
        return _printable(self._received[HEADER_BYTES:])


class CallCheck:
    """Compares the collective that one rank runs with those of its TCP peers."""

    def __init__(
        self,
        communicator: int,
        generation: int,
        rank: int,
        peers: Sequence[Address],
        key: bytes,
        wakeup: socket.socket,
        abort: Callable[[HoopError], None],
    ) -> None:
        """``wakeup``: the endpoint's socket that interrupts a wait; ``abort``: the endpoint's method."""
        self._communicator, self._generation, self._rank = communicator, generation, rank
        self._peers, self._key, self._wakeup = peers, key, wakeup
        self._abort = abort
        self.on_mismatch: Callable[[CollectiveMismatch], None] = lambda error: None
        """Called by the listener's thread when another rank reports a mismatch of the current collective."""
        self.stamp = 0
        """The current collective's stamp, 0 between collectives."""
        self.sequence = 0
        """How many collectives have begun."""
        self.query_interval = inf
        """How many seconds a wait may take before the endpoint calls ``query_peer``."""
        self._current: tuple[int, Call] | None = None
        """The current collective's stamp and call."""
        self._mismatch: tuple[int, CollectiveMismatch] | None = None
        """A mismatch that this or another rank found, and the stamp of the collective in which it was found."""
        self._reported = threading.Event()
        """Set when another rank has reported a mismatch to this one."""
        self._next_query = 0.0

    # ---- from the rank's thread

    def begin_collective(self, call: Call, resumed: bool = False) -> None:
        self.sequence += not resumed
        self.stamp = call.stamp(self.sequence)
        self._current = self.stamp, call
        self.query_interval, self._next_query = FIRST_QUERY_S, 0.0
        if self._mismatch is not None:
            self._abort_if_concerned()

    def end_collective(self) -> None:
        self.stamp, self.query_interval, self._current = 0, inf, None

    def query_peer(self, peer: int, deadline: float) -> CollectiveMismatch | None:
        """(2) The mismatch, if ``peer`` runs a different collective under this rank's sequence number."""
        now = time.monotonic()
        if self._current is None or now < self._next_query:
            return None
        self.query_interval = min(2 * self.query_interval, _MAX_QUERY_INTERVAL_S)
        self._next_query = now + self.query_interval
        answer = self._query(peer, deadline)
        if isinstance(answer, CollectiveMismatch) or answer is None:
            return answer
        stamp, text = answer
        if stamp and stamp != self.stamp and not operations_ahead(stamp, self.sequence):
            return self._mismatch_with(peer, text)
        return None

    def mismatch_that_closed(self, peer: int) -> CollectiveMismatch | None:
        """The mismatch, if that is why ``peer`` closed its links; its closing frame may have been lost with them.

        If the peer's process has ended, the connection is refused and the query returns at once.
        """
        if self._current is None:
            return None
        answer = self._query(peer, time.monotonic() + _CLOSED_PEER_TIMEOUT_S)
        if self._mismatch is not None:
            return self._mismatch[1]
        return answer if isinstance(answer, CollectiveMismatch) else None

    def stamp_mismatch(self, peer: int, deadline: float) -> CollectiveMismatch:
        """(1) The error for a message of ``peer`` whose stamp is not that of this rank's collective."""
        answer = self._query(peer, deadline)
        if self._mismatch is None and isinstance(answer, CollectiveMismatch):
            return answer
        if self._mismatch is None and isinstance(answer, tuple) and answer[0] not in (0, self.stamp):
            return self._mismatch_with(peer, answer[1])
        # The peer has left its collective: a rank reported the mismatch to it, and reports it to this rank too.
        self._reported.wait(min(_ANSWER_TIMEOUT_S, max(0.0, deadline - time.monotonic())))
        return self._mismatch[1] if self._mismatch is not None else self._mismatch_with(peer, _LEFT_OPERATION)

    def length_mismatch(self, peer: int, expected: int, received: str) -> CollectiveMismatch:
        """The error for a message of the same collective that has the wrong length."""
        assert self._current is not None, "in a collective"
        return length_mismatch_error(self._current[1], self._rank, peer, expected, received)

    def _mismatch_with(self, peer: int, text: str) -> CollectiveMismatch:
        own_text = self._current[1].short_text if self._current is not None else "a message"
        return mismatch_error([(self._rank, own_text), (peer, text)])

    def _query(self, peer: int, deadline: float) -> tuple[int, str] | CollectiveMismatch | None:
        """Asks a peer's listener for its rank's collective: stamp and text, or a mismatch; None without an answer."""
        until = min(deadline, time.monotonic() + _ANSWER_TIMEOUT_S)
        with contextlib.suppress(OSError, ValueError, HoopError):
            with self._dial(peer, FrameKind.ASK, until) as sock:
                header = FrameHeader.unpack(read_exactly(sock, HEADER_BYTES, self._wakeup, until, _never))
                size = min(header.length, _MAX_REPORT_BYTES)
                text = _printable(read_exactly(sock, size, self._wakeup, until, _never))
            if header.kind == FrameKind.MISMATCH:
                return CollectiveMismatch(text)
            if header.kind == FrameKind.CALL:
                return header.call, text
        return None

    def broadcast_mismatch(self, error: CollectiveMismatch) -> None:
        """(3) Reports a mismatch to all peers; returns when every reachable rank has acknowledged it.

        A rank that received a report broadcasts it too: it may exit before the reporting rank has reached the others.
        """
        if self._mismatch is None or self._mismatch[1] is not error:
            self._mismatch = self.stamp or 1, error
        report = self._frame(FrameKind.MISMATCH, str(error), self._mismatch[0])
        until = time.monotonic() + _BROADCAST_TIMEOUT_S
        with contextlib.ExitStack() as opened:
            socks: list[socket.socket] = []
            for peer in range(len(self._peers)):
                if peer != self._rank:
                    with contextlib.suppress(OSError, ValueError, HoopError):
                        socks.append(opened.enter_context(self._dial(peer, FrameKind.MISMATCH, until)))
                        socks[-1].sendmsg([memoryview(report)])
            for sock in socks:
                with contextlib.suppress(OSError, ValueError, HoopError):
                    read_exactly(sock, HEADER_BYTES, self._wakeup, until, _never)

    def _dial(self, peer: int, kind: FrameKind, until: float) -> contextlib.closing[socket.socket]:
        """A connection of its own to a peer's listener, with a first frame of this kind sent."""
        hello = FrameHeader(kind, self._communicator, self._generation, self._rank, sequence=peer, length=0)
        sock = connect(self._peers[peer], self._wakeup, until, _never)
        greet(sock, hello, self._key, self._wakeup, until, _never)
        return contextlib.closing(sock)

    # ---- from the listener's thread

    def answer_query(self) -> bytes:
        """The answer to an ASK frame."""
        current, mismatch = self._current, self._mismatch
        if mismatch is not None and operations_ahead(mismatch[0], self.sequence) <= 0:
            return self._frame(FrameKind.MISMATCH, str(mismatch[1]), mismatch[0])
        if current is not None:
            return self._frame(FrameKind.CALL, current[1].short_text, current[0])
        return no_collective_answer()

    def receive_report(self, stamp: int, text: str) -> bytes:
        """Another rank has found a mismatch in the collective of this stamp; returns the answer."""
        # Race with the rank's thread: this stores the mismatch and then compares sequence numbers;
        # ``begin_collective`` increments the number and then looks for a mismatch. So one of the two sees it.
        self._mismatch = self._mismatch or (stamp, CollectiveMismatch(text))
        self._reported.set()
        self._abort_if_concerned()
        return self._frame(FrameKind.MISMATCH, "", stamp)

    def _abort_if_concerned(self) -> None:
        """Aborts if the known mismatch is in the current collective, or in an older one."""
        assert self._mismatch is not None, "a mismatch is known"
        stamp, error = self._mismatch
        if operations_ahead(stamp, self.sequence) <= 0:
            self._abort(error)
            self.on_mismatch(error)

    def _frame(self, kind: FrameKind, text: str, stamp: int) -> bytes:
        payload = text.encode()[:_MAX_REPORT_BYTES]
        header = FrameHeader(
            kind, self._communicator, self._generation, self._rank, sequence=0, length=len(payload), call=stamp
        )
        return header.pack() + payload


def no_collective_answer() -> bytes:
    """The answer to an ASK frame for a rank that runs no collective, or does not exist yet."""
    return FrameHeader(FrameKind.CALL, communicator=0, generation=0, source=0, sequence=0, length=0).pack()


def _printable(data: bytes | bytearray) -> str:
    """A text from another process, without control characters that a terminal would execute."""
    return "".join(char if char.isprintable() else "?" for char in data.decode(errors="replace"))


def _never() -> bool:
    return False
