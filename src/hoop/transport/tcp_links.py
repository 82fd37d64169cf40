"""One rank's TCP links: frames out, frames in.

    rank r                                   rank p
    outgoing[p] ── HELLO, DATA, DATA … ──▶   incoming[r]        (1) dialled on the first send
    incoming[p] ◀── HELLO, DATA, DATA … ──   outgoing[r]        (2) handed in by p's own dialling

A link is one way. A large message is sent and received in pieces, so that both directions flow at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import time
from collections.abc import Callable
from functools import partial

from hoop.errors import (
    CollectiveMismatch,
    HoopError,
    InvalidArgument,
    LinkCorrupted,
    MembershipChanged,
    PeerLost,
)
from hoop.transport.base import Pending
from hoop.transport.kept import CHECKED_BYTES, PIECE_BYTES, Kept
from hoop.transport.parcel import Parcel
from hoop.transport.proving import prove
from hoop.transport.tcp_repeating import Damaged, TcpRepeating
from hoop.transport.tcp_sockets import GAVE_UP, Incoming, Outgoing, connect, last_words
from hoop.wire.frames import HEADER_BYTES, Header, Kind, packed

_PATIENCE_S = 0.05
"""How long a rank waits for a peer to dial before it dials itself, to learn whether there is anybody."""
_AT_ONCE_BYTES = 4 << 20
"""Up to here the socket gets what it takes at once, and has it should this rank compute next; of a larger message
only the beginning, because what is under way should fit into the caches."""


@functools.lru_cache(maxsize=64)
def _whole_message(size: int) -> Header:
    """What is needed of the header of an expected message; to make a new one takes longer than to compare its bytes."""
    return Header(Kind.DATA, 0, 0, 0, 0, size)


class TcpEndpoint(TcpRepeating):
    """One rank's TCP links."""

    # ---- sending

    def send(self, peer: int, data: memoryview, deadline: float) -> Pending | None:
        with self._busy:
            return self._send(peer, data, deadline)

    def _send(self, peer: int, data: memoryview, deadline: float) -> Pending | None:
        if self._error is not None:
            raise self._error
        link = self._outgoing.get(peer) or self._dial(peer, deadline)
        payload = data.cast("B") if data.nbytes else data
        parcel = self._checked(link, payload) if self._checksum else self._plain(link, payload)
        link.queue.append(parcel)
        self._push(peer, link, PIECE_BYTES if payload.nbytes > _AT_ONCE_BYTES else None)
        self.messages_sent += 1
        self.bytes_sent += payload.nbytes
        return None if parcel.done else parcel

    def _plain(self, link: Outgoing, payload: memoryview) -> Parcel:
        place = (self.communicator, self.generation, self.rank, link.sequence)
        header = packed(Kind.DATA, *place, payload.nbytes, 0, self.calls.stamp)
        link.sequence += 1
        return Parcel([memoryview(header), payload][: 2 if payload.nbytes else 1])

    def _dial(self, peer: int, deadline: float) -> Outgoing:  # (1)
        if peer == self.rank:
            raise InvalidArgument(f"rank {self.rank}: a message to oneself is a copy")
        hello = Header(Kind.HELLO, self.communicator, self.generation, self.rank, peer, 0)
        self.watch.waits_for, self.watch.connecting = (peer,), True
        try:
            sock = connect(self.peers[peer], self._bell, deadline, lambda: self._error is not None)
            if self._key:
                prove(sock, hello, self._key, self._bell, deadline, lambda: self._error is not None)
        except InterruptedError:
            assert self._error is not None, "only an error stops it"
            raise self._error from None
        except TimeoutError:
            self.watch.failed = peer
            raise self.overdue(peer, "connecting to") from None
        except PeerLost as error:
            raise self._error or PeerLost(f"rank {self.rank}: {self.describe(peer)}: {error}") from None
        except (OSError, ValueError) as error:
            self.watch.failed = peer
            raise self._error or PeerLost(
                f"rank {self.rank}: {self.describe(peer)} does not answer: {error}"
            ) from None
        finally:
            self.watch.waits_for, self.watch.connecting = (), False
        link = Outgoing(sock, Kept() if self._checksum else None)
        if not self._key:
            link.queue.append(Parcel([memoryview(hello.pack())]))
            link.taken = -HEADER_BYTES
        with self._lock:
            if self._error is None:
                self._outgoing[peer] = link
                return link
        sock.close()
        raise self._error

    def _push(self, peer: int, link: Outgoing, most: int | None = None) -> None:
        try:
            link.push(most)
        except OSError as error:
            if not self._mended(peer):
                raise self._lost(peer, error) from None
            return
        if link.queue:
            self._pending[peer] = link

    def flush(self, deadline: float) -> None:
        if self._error is not None:
            raise self._error
        with self._busy:
            for peer in list(self._outgoing):
                while self._outgoing[peer].queue:
                    self._wait(peer, None, deadline, "handing over to")

    # ---- receiving

    def attach(self, peer: int, sock: socket.socket) -> None:  # (2)
        """A link that ``peer`` dialled; from the transport's thread."""
        with self._lock:
            if self._error is None and peer not in self._incoming:
                self._incoming[peer] = Incoming(sock, self._bell)
                sock = None  # type: ignore[assignment]
        if sock is not None:
            sock.close()
        self._ring()

    def recv_into(self, peer: int, into: memoryview, deadline: float) -> None:
        payload = into.cast("B") if into.nbytes else into

        def land(start: int, header: Header) -> None:
            self._land(peer, header, payload[start : start + header.length], deadline)

        with self._busy:
            self._receive(peer, into.nbytes, land, deadline)

    def _receive(self, peer: int, size: int, land: Callable[[int, Header], None], deadline: float) -> None:
        """The frames of the next message, each told where it starts; a damaged one comes once more."""
        start, kind = 0, Kind.PART
        while kind == Kind.PART:
            try:
                header = self._begin(peer, start, size, deadline)
                land(start, header)
            except Damaged as damage:
                self._ask_again(peer, damage)
                continue
            start, kind = start + header.length, Kind(header.kind)

    def _land(self, peer: int, header: Header, payload: memoryview, deadline: float) -> None:
        link = self._incoming[peer]
        if payload.nbytes:
            self._fill(peer, link, payload, deadline)
        if header.kind == Kind.DATA:
            link.plain = True
        else:
            self._verify(peer, link, header, payload)

    def _begin(self, peer: int, start: int, size: int, deadline: float) -> Header:
        """Waits for the header of the next frame, and checks it."""
        while (link := self._incoming.get(peer)) is None:
            self._await_link(peer, deadline)
        self._resume(peer, link)
        expected = b""
        if self._checksum is None:  # made before the wait, in which there is time for it
            place = (self.communicator, self.generation, peer, link.sequence)
            expected = packed(Kind.DATA, *place, size, 0, self.calls.stamp)
        while link.ahead < HEADER_BYTES:
            self._read(peer, link, link.read_ahead, deadline)
        came = link.take(HEADER_BYTES)
        if came == expected:
            due = _whole_message(size)
        else:
            try:
                due = Header.unpack(came)
            except LinkCorrupted as error:
                raise Damaged(f"{self._link_from(peer)}: {error}") from None
            if due.kind in (Kind.GOODBYE, Kind.MISMATCH):
                why = bytes(link.take(due.length)).decode(errors="replace")
                if due.kind == Kind.MISMATCH:
                    raise self._error or CollectiveMismatch(why)
                raise self._error or PeerLost(
                    f"rank {self.rank}: {self.describe(peer)} closed its link, {why}"
                )
            self._check(peer, link, due)
            if due.call != self.calls.stamp:
                raise self.calls.conflict(peer, deadline)
            self._check_length(peer, due, size, start)
        link.sequence += 1
        return due

    def _await_link(self, peer: int, deadline: float) -> None:
        """Waits for ``peer`` to dial; where nothing links the two, dials it to see whether it is there."""
        if peer in self._outgoing:
            self._wait(peer, None, deadline, "waiting for")
            return
        slept = self._sleep({}, min(deadline, time.monotonic() + _PATIENCE_S), (peer,))
        if not slept.happened and peer not in self._incoming:
            if time.monotonic() >= deadline:
                raise self.overdue(peer, "waiting for")
            self._push(peer, self._dial(peer, deadline))

    def _fill(self, peer: int, link: Incoming, view: memoryview, deadline: float) -> None:
        taken = link.take(view.nbytes)
        view[: taken.nbytes] = taken
        view = view[taken.nbytes :]
        while view.nbytes:
            # Where something is to be sent as well, both ways have a turn.
            part = view[:PIECE_BYTES] if self._pending else view
            view = view[self._read(peer, link, partial(link.sock.recv_into, part), deadline) :]

    def _read(self, peer: int, link: Incoming, read: Callable[[], int], deadline: float) -> int:
        """Reads at least a byte, handing over pending messages meanwhile."""
        while True:
            if self._error is not None:
                raise self._error
            try:
                got = read()
            except (BlockingIOError, InterruptedError):
                got = -1
            except OSError as error:
                raise self._lost(peer, error) from None
            if got == 0:
                raise self._lost(peer, None)
            moved = self._hand_over() if self._pending else False
            if got > 0:
                link.came += got
                return got
            if not moved:
                self._await_bytes(peer, link, deadline)

    def _check(self, peer: int, link: Incoming, header: Header) -> None:
        link_name = self._link_from(peer)
        if (header.communicator, header.generation) != (self.communicator, self.generation):
            raise MembershipChanged(
                f"{link_name}: a frame of communicator {header.communicator}, generation {header.generation} "
                f"came at generation {self.generation}; refused as stale"
            )
        if header.kind not in (Kind.DATA, Kind.CHECKED, Kind.PART) or header.source != peer:
            raise LinkCorrupted(
                f"{link_name}: a frame of kind {header.kind} from rank {header.source} is out of place"
            )
        if header.sequence != link.sequence:
            what = "duplicated" if header.sequence < link.sequence else "lost or reordered"
            raise LinkCorrupted(
                f"{link_name}: message {header.sequence} came where {link.sequence} was due ({what})"
            )
        if header.kind != Kind.DATA and header.length > CHECKED_BYTES:
            raise LinkCorrupted(f"{link_name}: a checked frame of {header.length} bytes is too long")

    def _check_length(self, peer: int, header: Header, expected: int, start: int) -> None:
        length, part = start + header.length, header.kind == Kind.PART
        if length >= expected if part else length != expected:
            if self.calls.stamp:
                raise self.calls.wrong_length(peer, expected, f"{length}{' or more' * part}")
            raise LinkCorrupted(
                f"{self._link_from(peer)}: message {header.sequence} has {length}{' or more' * part} bytes, "
                f"expected {expected}; do all ranks run the same operation?"
            )

    # ---- ending

    def abort(self, error: HoopError) -> None:
        self._error = self._error or error
        self._ring()

    def close(self) -> None:
        if self._error is None and self._busy.acquire(
            blocking=False
        ):  # else somebody waits here, and is told
            with contextlib.suppress(HoopError):
                self._linger()
            self._busy.release()
        words = f"{GAVE_UP}{self._error}" if self._error is not None else "it closed its links"
        kind = Kind.GOODBYE
        if isinstance(self._error, CollectiveMismatch):
            kind, words = Kind.MISMATCH, str(self._error)
        gave_up = self._error is not None
        self.abort(PeerLost(f"rank {self.rank}: this endpoint is closed"))
        with self._busy, self._lock:
            for peer, incoming in self._incoming.items():
                sent = self._outgoing[peer].sequence if peer in self._outgoing else 0
                with contextlib.suppress(OSError):
                    incoming.sock.send(last_words(kind, words, sent))
            for link in self._outgoing.values():
                if gave_up and not link.queue:
                    with contextlib.suppress(OSError):
                        link.sock.send(last_words(kind, words))
            socks = [link.sock for links in (self._outgoing, self._incoming) for link in links.values()]
            socks += self._given_up.values()
            self._incoming.clear()
            self._outgoing.clear()
            self._given_up.clear()
        for sock in socks:
            sock.close()
        self._ringer.close()
        self._bell.close()
