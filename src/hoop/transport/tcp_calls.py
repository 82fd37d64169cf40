"""How ranks that are linked by TCP find out that their collectives do not match.

    a message with another stamp    the receiver asks the sender's listener what it runs there       (1)
    a long wait in a collective     the rank asks the listener of the rank it waits for, now and then (2)
    a mismatch was found            each rank that knows tells the listeners of all others, then raises (3)

A rank that could not be told learns it from the last words on the links between the two, when they close.

(2) is for ranks that wait for each other, so that no message ever comes. In a collective in which every rank needs
something of every other, no rank ends while calls differ; so a rank that misses it is still there for (3).

A question and a verdict go over connections of their own: a data link may be full of a message that nobody reads. The
listener's thread answers whatever its rank is doing.
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
from hoop.transport.auth_handshake import prove, read_exactly
from hoop.transport.calls import Call, distance, mismatch, wrong_length
from hoop.transport.tcp_socket import connect
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

FIRST_QUESTION_S = 0.2
"""How long a rank waits in a collective before it asks for the first time; twice as long before each further time."""
_LAST_QUESTION_S = 2.0
_ANSWER_S = 2.0
_LOST_S = 0.5
_TOLD_S = 5.0
"""How long a rank that has found a mismatch stays to tell the others, before it raises."""
_VERDICT_BYTES = 8192
_ENDED = "another operation, which it has left"


class MismatchFrame:
    """One frame with a text, read as it comes."""

    def __init__(self) -> None:
        self._heard = bytearray()
        self.header: FrameHeader | None = None

    @property
    def missing(self) -> int:
        """How many bytes are still to come, as far as is known."""
        return HEADER_BYTES + (self.header.length if self.header else 0) - len(self._heard)

    def hear(self, data: bytes) -> None:
        """Takes in what came; LinkCorrupted if it is no such frame."""
        self._heard += data
        if self.header is None and not self.missing:
            self.header = FrameHeader.unpack(self._heard)
            if self.header.kind != FrameKind.MISMATCH or self.header.length > _VERDICT_BYTES:
                raise LinkCorrupted(
                    f"a frame of kind {self.header.kind} and {self.header.length} bytes is no verdict"
                )

    @property
    def complete(self) -> bool:
        return self.header is not None and not self.missing

    @property
    def text(self) -> str:
        return _readable(self._heard[HEADER_BYTES:])


class CallCheck:
    """The collective under way at one rank, compared with those of the ranks it is linked with."""

    def __init__(
        self,
        place: tuple[int, int, int],
        peers: Sequence[Address],
        key: bytes,
        bell: socket.socket,
        abort: Callable[[HoopError], None],
    ) -> None:
        """``place``: communicator, generation, rank; ``abort``: the endpoint's."""
        self._place, self._peers, self._key, self._bell = place, peers, key, bell
        self._abort = abort
        self.on_mismatch: Callable[[CollectiveMismatch], None] = lambda error: None
        """Called by the listener's thread when another rank has found a mismatch of the collective under way."""
        self.stamp = 0
        """Of the collective under way, 0 between collectives."""
        self.sequence = 0
        """How many have begun."""
        self.patience = inf
        """How long a wait may take before ``ask`` is to be called."""
        self._call: tuple[int, Call] | None = None
        self._verdict: tuple[int, CollectiveMismatch] | None = None
        """What another rank has found, and the stamp of the collective that it was in."""
        self._told = threading.Event()
        """Set when another rank has told this one."""
        self._ask_at = 0.0

    # ---- from the rank's thread

    def begin(self, call: Call, resumed: bool = False) -> None:
        self.sequence += not resumed
        self.stamp = call.stamp(self.sequence)
        self._call = self.stamp, call
        self.patience, self._ask_at = FIRST_QUESTION_S, 0.0
        if self._verdict is not None:
            self._heed()

    def end(self) -> None:
        self.stamp, self.patience, self._call = 0, inf, None

    def ask(self, peer: int, deadline: float) -> CollectiveMismatch | None:
        """(2) A mismatch, if ``peer`` runs another collective in the place of this rank's."""
        now = time.monotonic()
        if self._call is None or now < self._ask_at:
            return None
        self.patience = min(2 * self.patience, _LAST_QUESTION_S)
        self._ask_at = now + self.patience
        answer = self._answer_of(peer, deadline)
        if isinstance(answer, CollectiveMismatch) or answer is None:
            return answer
        stamp, text = answer
        if stamp and stamp != self.stamp and not distance(stamp, self.sequence):
            return self._mismatch_with(peer, text)
        return None

    def ended_by(self, peer: int) -> CollectiveMismatch | None:
        """The mismatch, if that is why ``peer`` closed its links: its last words may have been lost with them.

        Where its process has ended nobody listens, and the answer is there at once.
        """
        if self._call is None:
            return None
        answer = self._answer_of(peer, time.monotonic() + _LOST_S)
        if self._verdict is not None:
            return self._verdict[1]
        return answer if isinstance(answer, CollectiveMismatch) else None

    def conflict(self, peer: int, deadline: float) -> CollectiveMismatch:
        """(1) The mismatch behind a message of ``peer`` that is not part of this rank's collective."""
        answer = self._answer_of(peer, deadline)
        if self._verdict is None and isinstance(answer, CollectiveMismatch):
            return answer
        if self._verdict is None and isinstance(answer, tuple) and answer[0] not in (0, self.stamp):
            return self._mismatch_with(peer, answer[1])
        # The peer is not there any more: somebody told it why, and tells this rank.
        self._told.wait(min(_ANSWER_S, max(0.0, deadline - time.monotonic())))
        return self._verdict[1] if self._verdict is not None else self._mismatch_with(peer, _ENDED)

    def wrong_length(self, peer: int, expected: int, came: str) -> CollectiveMismatch:
        """For a message of the same collective that is not as long as it should be."""
        assert self._call is not None, "in a collective"
        return wrong_length(self._call[1], self._place[2], peer, expected, came)

    def _mismatch_with(self, peer: int, text: str) -> CollectiveMismatch:
        mine = self._call[1].short if self._call is not None else "a message"
        return mismatch([(self._place[2], mine), (peer, text)])

    def _answer_of(self, peer: int, deadline: float) -> tuple[int, str] | CollectiveMismatch | None:
        """What a peer's listener says is under way there: stamp and text; None if it does not answer."""
        until = min(deadline, time.monotonic() + _ANSWER_S)
        with contextlib.suppress(OSError, ValueError, HoopError):
            with self._dialled(peer, FrameKind.ASK, until) as sock:
                header = FrameHeader.unpack(read_exactly(sock, HEADER_BYTES, self._bell, until, _never))
                size = min(header.length, _VERDICT_BYTES)
                text = _readable(read_exactly(sock, size, self._bell, until, _never))
            if header.kind == FrameKind.MISMATCH:
                return CollectiveMismatch(text)
            if header.kind == FrameKind.CALL:
                return header.call, text
        return None

    def tell(self, error: CollectiveMismatch) -> None:
        """(3) Returns when every rank that can be reached knows.

        A rank that was told tells the others too: it may end before the one that told it has come to them.
        """
        if self._verdict is None or self._verdict[1] is not error:
            self._verdict = self.stamp or 1, error
        stamp = self._verdict[0]
        text = str(error).encode()[:_VERDICT_BYTES]
        letter = FrameHeader(FrameKind.MISMATCH, *self._place, 0, len(text), call=stamp).pack() + text
        until = time.monotonic() + _TOLD_S
        with contextlib.ExitStack() as opened:
            told: list[socket.socket] = []
            for peer in range(len(self._peers)):
                if peer != self._place[2]:
                    with contextlib.suppress(OSError, ValueError, HoopError):
                        told.append(opened.enter_context(self._dialled(peer, FrameKind.MISMATCH, until)))
                        told[-1].sendmsg([memoryview(letter)])
            for sock in told:
                with contextlib.suppress(OSError, ValueError, HoopError):
                    read_exactly(sock, HEADER_BYTES, self._bell, until, _never)

    def _dialled(self, peer: int, kind: FrameKind, until: float) -> contextlib.closing[socket.socket]:
        """A connection of its own to a peer's listener, with the greeting sent."""
        hello = FrameHeader(kind, *self._place, peer, 0)
        sock = connect(self._peers[peer], self._bell, until, _never)
        if self._key:
            prove(sock, hello, self._key, self._bell, until, _never)
        else:
            sock.sendmsg([memoryview(hello.pack())])
        return contextlib.closing(sock)

    # ---- from the listener's thread

    def answer(self) -> bytes:
        """To ASK."""
        call, verdict = self._call, self._verdict
        if verdict is not None and distance(verdict[0], self.sequence) <= 0:
            return self._frame(FrameKind.MISMATCH, str(verdict[1]), verdict[0])
        return (
            self._frame(FrameKind.CALL, call[1].short, call[0]) if call is not None else nothing_under_way()
        )

    def hear(self, stamp: int, text: str) -> bytes:
        """Another rank has found a mismatch in the collective of this stamp; what is answered."""
        # Noted first, compared then; ``begin`` counts first and looks then: one of the two sees it.
        self._verdict = self._verdict or (stamp, CollectiveMismatch(text))
        self._told.set()
        self._heed()
        return self._frame(FrameKind.MISMATCH, "", stamp)

    def _heed(self) -> None:
        """Gives up if the verdict is on the collective under way, or an older one."""
        assert self._verdict is not None, "there is something to heed"
        stamp, error = self._verdict
        if distance(stamp, self.sequence) <= 0:
            self._abort(error)
            self.on_mismatch(error)

    def _frame(self, kind: FrameKind, text: str, stamp: int) -> bytes:
        words = text.encode()[:_VERDICT_BYTES]
        return FrameHeader(kind, *self._place, 0, len(words), call=stamp).pack() + words


def nothing_under_way() -> bytes:
    """The answer to ASK of a rank that is in no collective, or not there yet."""
    return FrameHeader(FrameKind.CALL, 0, 0, 0, 0, 0).pack()


def _readable(data: bytes | bytearray) -> str:
    """A text from another process, without anything that a terminal would act on."""
    return "".join(one if one.isprintable() else "?" for one in data.decode(errors="replace"))


def _never() -> bool:
    return False
