"""What only TCP has to withstand: strangers, stale peers, frames that are out of place, and kill -9."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from exchange import Pair, Waiter, meet, receive, say, until, until_started
from ranks import COMMUNICATOR, LONG_S, PROMPT_S, endpoints_of, soon

import hoop.transport.tcp_listener
import hoop.wire.frames
from hoop.errors import DeadlineExceeded, InvalidArgument, LinkCorrupted, MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport import Endpoint, Transport, open_transport
from hoop.transport.tcp_endpoint import TcpEndpoint
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.frames import HEADER_BYTES, VERSION, FrameHeader, FrameKind

MIB = 1 << 20
Dial = Callable[..., socket.socket]


@pytest.fixture
def scheme() -> str:
    """These tests are about one transport."""
    return "tcp"


@pytest.fixture
def raw() -> Iterator[Dial]:
    """Dials a transport by hand, says something, and hangs up after the test."""
    with ExitStack() as ended:

        def dial(transport: Transport, *words: bytes) -> socket.socket:
            address = (transport.address.host, transport.address.port)
            sock = ended.enter_context(socket.create_connection(address, timeout=LONG_S))
            for word in words:
                sock.sendall(word)
            return sock

        yield dial


def hello(source: int = 1, dialled: int = 0, communicator: int = COMMUNICATOR, generation: int = 1) -> bytes:
    return FrameHeader(FrameKind.HELLO, communicator, generation, source, dialled, 0).pack()


def frame(
    sequence: int,
    payload: bytes = b"payload!",
    source: int = 1,
    communicator: int = COMMUNICATOR,
    generation: int = 1,
    kind: int = FrameKind.DATA,
) -> bytes:
    return FrameHeader(kind, communicator, generation, source, sequence, len(payload)).pack() + payload


def heard(sock: socket.socket) -> bytes:
    """Everything that the other side says until it hangs up."""
    said = bytearray()
    with contextlib.suppress(ConnectionResetError):  # it hung up with something of ours unread
        while data := sock.recv(4096):
            said += data
    return bytes(said)


def refusal(sock: socket.socket) -> str:
    """The sentence with which the other side hung up."""
    said = heard(sock)
    assert len(said) >= HEADER_BYTES, "it hung up without a word"
    header = FrameHeader.unpack(said[:HEADER_BYTES])
    assert header.kind == FrameKind.REFUSAL
    assert header.length == len(said) - HEADER_BYTES
    return said[HEADER_BYTES:].decode()


def settle(transport: Transport, dial: Dial) -> None:
    """After this the listener has dealt with every HELLO that was said before: visitors are met in order."""
    assert refusal(dial(transport, bytes(HEADER_BYTES)))


# ---- generations and the lobby


def test_a_stale_generation_is_refused_with_the_reason(transports: list[Transport]) -> None:
    peers = [transport.address for transport in transports]
    newer = transports[0].endpoint(COMMUNICATOR, 9, 0, peers)
    older = transports[1].endpoint(COMMUNICATOR, 8, 1, peers)
    older.send(0, memoryview(b"from before"), soon())
    reason = rf"rank 1: rank 0 at {peers[0]} refused the link: generation 8 is over, communicator 7 is at 9"
    with pytest.raises(MembershipChanged, match=reason):
        receive(older, 0, 1)
    newer.close()
    older.close()


def test_a_refusal_reaches_whoever_is_still_sending(transports: list[Transport]) -> None:
    peers = [transport.address for transport in transports]
    newer = transports[0].endpoint(COMMUNICATOR, 9, 0, peers)
    older = transports[1].endpoint(COMMUNICATOR, 8, 1, peers)
    with pytest.raises(MembershipChanged, match="generation 8 is over"):
        say(older, 0, bytes(64 * MIB))
    newer.close()
    older.close()


def test_who_waits_in_the_lobby_is_refused_once_a_newer_generation_begins(
    transports: list[Transport], raw: Dial
) -> None:
    peers = [transport.address for transport in transports]
    older = transports[1].endpoint(COMMUNICATOR, 8, 1, peers)
    older.send(0, memoryview(b"from before"), soon())
    settle(transports[0], raw)
    newer = transports[0].endpoint(COMMUNICATOR, 9, 0, peers)
    with pytest.raises(MembershipChanged, match="generation 8 is over, communicator 7 is at 9"):
        receive(older, 0, 1, soon(2))
    newer.close()
    older.close()


def test_who_comes_early_waits_in_the_lobby(transports: list[Transport], raw: Dial) -> None:
    """A HELLO, and a message with it, for an endpoint that does not exist yet."""
    sock = raw(transports[0], hello() + frame(0))
    settle(transports[0], raw)
    peers = [transport.address for transport in transports]
    endpoint = transports[0].endpoint(COMMUNICATOR, 1, 0, peers)
    assert receive(endpoint, 1, 8) == b"payload!"
    sock.sendall(frame(1))
    assert receive(endpoint, 1, 8) == b"payload!"
    endpoint.close()


def test_the_lobby_keeps_apart_who_waits_for_whom(transports: list[Transport], raw: Dial) -> None:
    """Other communicators, generations and ranks stay in the lobby when an endpoint appears."""
    for other in (hello(communicator=6), hello(generation=2), hello(dialled=2)):
        raw(transports[0], other + frame(0, b"not this"))
    raw(transports[0], hello() + frame(0, b"this one"))
    settle(transports[0], raw)
    peers = [transport.address for transport in transports]
    endpoint = transports[0].endpoint(COMMUNICATOR, 1, 0, peers)
    assert receive(endpoint, 1, 8) == b"this one"
    endpoint.close()


def test_the_lobby_has_a_limit(transports: list[Transport], raw: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoop.transport.tcp_listener, "MAX_PENDING", 2)
    for communicator in (1, 2):
        raw(transports[0], hello(communicator=communicator))
        settle(transports[0], raw)
    assert refusal(raw(transports[0], hello(communicator=3))) == "2 links wait here already"


def test_nobody_waits_in_the_lobby_for_ever(
    transports: list[Transport], raw: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hoop.transport.tcp_listener, "PENDING_TIMEOUT_S", 0.01)
    assert refusal(raw(transports[0], hello())) == "no endpoint for this link within 0.01 s"


def test_a_rank_that_is_not_in_the_communicator_is_refused(transports: list[Transport], pair: Pair, raw: Dial) -> None:
    assert refusal(raw(transports[0], hello(source=2))) == "rank 2 is not in communicator 7"
    meet(pair)


def test_a_second_link_from_the_same_rank_does_not_replace_the_first(
    transports: list[Transport], pair: Pair, raw: Dial
) -> None:
    zero, one = pair
    meet(pair)
    impostor = raw(transports[0], hello() + frame(0, b"impostor"))
    heard(impostor)
    say(one, 0, b"the first")
    assert receive(zero, 1, 9) == b"the first"


# ---- frames out of place


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([frame(0), frame(0)], r"message 0 came where 1 was due \(duplicated\)"),
        ([frame(0), frame(2), frame(1)], r"message 2 came where 1 was due \(lost or reordered\)"),
        ([frame(0), frame(2)], r"message 2 came where 1 was due \(lost or reordered\)"),
        ([frame(0), frame(1, source=0)], r"a frame of kind 2 from rank 0 is out of place"),
        ([frame(0), frame(1, kind=FrameKind.HELLO)], r"a frame of kind 1 from rank 1 is out of place"),
        ([frame(0), frame(1, b"payload")], r"message 1 has 7 bytes, expected 8"),
    ],
    ids=["duplicated", "reordered", "lost", "of another rank", "of another kind", "too short"],
)
def test_a_frame_out_of_place_is_refused_and_named(
    transports: list[Transport], pair: Pair, raw: Dial, frames: list[bytes], complaint: str
) -> None:
    zero, _ = pair
    raw(transports[0], hello(), *frames)
    assert receive(zero, 1, 8) == b"payload!"
    with pytest.raises(LinkCorrupted, match=rf"link 1 -> 0 of communicator 7: {complaint}"):
        receive(zero, 1, 8)


@pytest.mark.parametrize(
    "stale", [frame(1, generation=2), frame(1, communicator=8)], ids=["generation", "communicator"]
)
def test_a_frame_of_another_generation_is_stale(
    transports: list[Transport], pair: Pair, raw: Dial, stale: bytes
) -> None:
    raw(transports[0], hello(), frame(0), stale)
    assert receive(pair[0], 1, 8) == b"payload!"
    with pytest.raises(MembershipChanged, match=r"link 1 -> 0 of communicator 7: .* refused as stale"):
        receive(pair[0], 1, 8)


@pytest.mark.parametrize("cut", [1, 51, 52, 53, 4095, 4097])
def test_frames_may_arrive_in_any_portions(transports: list[Transport], pair: Pair, raw: Dial, cut: int) -> None:
    """However the stream is cut: what is read ahead of one message belongs to the next."""
    payloads = [bytes([index % 251]) * size for index, size in enumerate([8, 0, 4000, 30, 1, 9000, 8] * 20)]
    stream = b"".join(frame(index, payload) for index, payload in enumerate(payloads))
    sock = raw(transports[0], hello())
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send() -> None:
        portions = range(0, len(stream), cut) if cut > 60 else [0, *range(cut, 8 * 60, 60)]
        for start, stop in itertools.pairwise([*portions, len(stream)]):
            sock.sendall(stream[start:stop])

    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send)
        for index, payload in enumerate(payloads):
            assert pair[0].wait_readable([1], soon()) == [1], f"message {index}"
            assert receive(pair[0], 1, len(payload)) == payload, f"message {index}"
        sent.result(LONG_S)
    assert pair[0].wait_readable([1], soon(0.01)) == []


def flipped(packed: bytes, byte: int) -> bytes:
    return packed[:byte] + bytes([packed[byte] ^ 1]) + packed[byte + 1 :]


def test_every_bit_of_a_header_counts(transports: list[Transport], pair: Pair, raw: Dial) -> None:
    """One that is damaged on the way is refused before its length is believed."""
    good = frame(0)[:HEADER_BYTES]
    for byte in range(HEADER_BYTES):
        with pytest.raises(LinkCorrupted):
            FrameHeader.unpack(flipped(good, byte))
    raw(transports[0], hello(), frame(0), flipped(frame(1), HEADER_BYTES - 1))
    assert receive(pair[0], 1, 8) == b"payload!"
    with pytest.raises(LinkCorrupted, match="a frame header's checksum does not hold"):
        receive(pair[0], 1, 8)


def test_a_damaged_header_names_its_link(transports: list[Transport], pair: Pair, raw: Dial) -> None:
    raw(transports[0], hello(), flipped(frame(0), 20))
    with pytest.raises(LinkCorrupted, match=r"link 1 -> 0 of communicator 7|rank 0: rank 1 at"):
        receive(pair[0], 1, 8)


def test_a_link_that_changes_a_byte_is_named() -> None:
    """With checksums; a proxy of our own could do it, here the sender's checksum is simply of other bytes."""
    with (
        TcpTransport(Address("127.0.0.1", 0), checksums=True) as left,
        TcpTransport(Address("127.0.0.1", 0), checksums=True) as right,
    ):
        zero, one = endpoints_of([left, right])
        say(one, 0, b"as it was")
        say(one, 0, b"")
        assert receive(zero, 1, 9) == b"as it was"
        assert receive(zero, 1, 0) == b""
        assert isinstance(right, TcpTransport)
        assert isinstance(one, TcpEndpoint)
        honest = right.checksum
        assert honest is not None
        one._checksum = lambda data: honest(memoryview(bytes(data)[:-1] + b"?"))
        say(one, 0, b"and is no more")
        with pytest.raises(LinkCorrupted, match="link 1 -> 0 of communicator 7: message 2 of 14 bytes is not what"):
            receive(zero, 1, 14)
        zero.close()
        one.close()


# ---- strangers


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n", "not a Hoop frame"),
        (flipped(hello(), 10), "a frame header's checksum does not hold"),
        (frame(0), "the first frame on a link must be HELLO"),
        (FrameHeader(9, 7, 1, 1, 0, 0).pack(), "unknown frame kind 9"),
        (FrameHeader(FrameKind.DATA, 7, 1, 1, 0, 1 << 62).pack(), "over the limit"),
    ],
    ids=["a browser", "damaged", "not a HELLO", "unknown kind", "absurd length"],
)
def test_who_does_not_say_hello_is_told_so(transports: list[Transport], raw: Dial, words: bytes, answer: str) -> None:
    assert answer in refusal(raw(transports[0], words))


def test_who_says_nothing_is_sent_away(transports: list[Transport], raw: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoop.transport.tcp_listener, "HELLO_TIMEOUT_S", 0.01)
    visitors = [raw(transports[0], words) for words in (b"", hello()[:20])]
    assert [refusal(visitor) for visitor in visitors] == ["no HELLO within 0.01 s"] * 2


def test_who_speaks_another_version_is_told_so(
    transports: list[Transport], raw: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(hoop.wire.frames, "VERSION", VERSION + 1)
        words = hello()
    expected = f"frame version {VERSION + 1}, this side speaks {VERSION}: update the older one"
    assert refusal(raw(transports[0], words)) == expected


def test_strangers_do_not_disturb_an_exchange(transports: list[Transport], pair: Pair, raw: Dial) -> None:
    zero, one = pair

    def say_all() -> None:
        for index in range(10):
            say(one, 0, bytes([index]) * MIB)

    for stranger in (b"", b"garbage" * 100, hello()[:20], hello(source=9), hello(generation=0)):
        for transport in transports:
            raw(transport, stranger)
    for _ in range(20):
        gone = raw(transports[0])
        gone.close()
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(say_all)
        for index in range(10):
            raw(transports[0], b"more garbage" * 10)
            assert receive(zero, 1, MIB) == bytes([index]) * MIB
        sent.result(LONG_S)
    meet(pair)


def test_last_words_are_heard_though_the_listener_is_slow(
    transports: list[Transport], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 answers and closes before rank 0's listener has looked at its HELLO: the answer was sent."""
    zero, one = pair
    looks = threading.Event()

    def unpack(data: bytes) -> FrameHeader:
        header = FrameHeader.unpack(data)
        if header.source == 1:
            looks.wait(LONG_S)
        return header

    monkeypatch.setattr(hoop.transport.tcp_listener, "FrameHeader", SimpleNamespace(unpack=unpack))
    say(zero, 1, b"question")
    assert receive(one, 0, 8) == b"question"
    say(one, 0, b"answer")
    one.close()
    waiter = Waiter(zero, peer=1, size=6)
    with contextlib.suppress(TimeoutError):
        waiter.outcome.exception(0.1)  # the time in which it may give up too early
    looks.set()
    error = waiter.error()
    assert error is None, repr(error)
    assert waiter.into == b"answer"


# ---- peers that do not answer


def test_nobody_listens_there(transports: list[Transport], pair: Pair) -> None:
    transports[1].close()
    with pytest.raises(PeerLost, match=rf"rank 0: rank 1 at {pair[0].peers[1]} does not answer: .*refused"):
        pair[0].send(1, memoryview(b"anyone?"), soon())


@pytest.fixture
def deaf() -> Iterator[Address]:
    """Where something listens that never accepts, with a queue that is full: whoever dials hangs."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            sock = opened.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield Address(*listener.getsockname())


def test_a_deadline_passes_while_connecting(transports: list[Transport], deaf: Address) -> None:
    endpoint = transports[0].endpoint(COMMUNICATOR, 1, 0, [transports[0].address, deaf])
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=rf"rank 0: connecting to rank 1 at {deaf} passed its dead"):
        endpoint.send(1, memoryview(b"anyone?"), soon(0.1))
    assert time.monotonic() - started < PROMPT_S
    endpoint.close()


def test_abort_wakes_who_is_connecting(transports: list[Transport], deaf: Address) -> None:
    endpoint = transports[0].endpoint(COMMUNICATOR, 1, 0, [transports[0].address, deaf])
    reason = MembershipChanged("generation 2 begins")
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(endpoint.send, 1, memoryview(b"anyone?"), soon(PROMPT_S / 2))
        until_started(sending)
        endpoint.abort(reason)
        assert sending.exception(PROMPT_S) is reason
    endpoint.close()


@pytest.mark.parametrize("moment", ["before it watches", "after it woke"])
def test_a_close_at_the_worst_moment_is_still_a_close(pair: Pair, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Another thread may close while this one is about to wait, or has just stopped waiting."""
    zero, _ = pair
    meet(pair)
    assert isinstance(zero, TcpEndpoint)
    poll = zero._poll
    closer = threading.Thread(target=zero.close)

    def close() -> None:
        """Gives it a moment; it may also let the other thread out first."""
        if closer.ident is None:
            closer.start()
        closer.join(0.2)

    def interrupted(poller: select.poll, deadline: float, looks: int = 0) -> list[tuple[int, int]]:
        if moment == "before it watches":
            close()
            return poll(poller, deadline, looks)
        ready = poller.poll(0)
        close()
        return ready

    monkeypatch.setattr(zero, "_poll", interrupted)
    with pytest.raises(PeerLost, match="rank 0: this endpoint is closed"):
        receive(zero, 1, 8, soon(2))
    closer.join()


# ---- a peer that is killed


CHILD = """
import sys, time
from hoop.topology import Address
from hoop.transport import open_transport
with open_transport("tcp://127.0.0.1:0") as transport:
    print(transport.address, flush=True)
    peers = [Address.parse(sys.stdin.readline()), transport.address]
    endpoint = transport.endpoint(7, 1, 1, peers)
    pending = endpoint.send(0, memoryview(b"x" * (64 << 20)), time.monotonic() + 60)
    print("pending" if pending is not None else "done", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Rank 1 in a process of its own: it sends the beginning of 64 MiB, and then does nothing more."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PYTHONPATH": str(Path(hoop.transport.__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        yield started
        started.kill()


def seated_with(child: subprocess.Popen[str], transport: Transport) -> Endpoint:
    """Rank 0, once the child has sent its beginning."""
    assert child.stdin is not None
    assert child.stdout is not None
    peers = [transport.address, Address.parse(child.stdout.readline())]
    endpoint = transport.endpoint(COMMUNICATOR, 1, 0, peers)
    print(transport.address, file=child.stdin, flush=True)
    assert child.stdout.readline() == "pending\n"
    return endpoint


def test_a_peer_killed_in_the_middle_of_its_message_is_lost(child: subprocess.Popen[str]) -> None:
    with open_transport("tcp://127.0.0.1:0") as transport:
        endpoint = seated_with(child, transport)
        waiter = Waiter(endpoint, peer=1, size=64 * MIB)
        until(lambda: waiter.into[0], "the beginning of the message")
        child.send_signal(signal.SIGKILL)
        error = waiter.error()
        assert isinstance(error, PeerLost), repr(error)
        assert f"rank 0: rank 1 at {endpoint.peers[1]} closed its link" in str(error)
        assert waiter.into[-1] == 0, "only a part had come"


def test_a_peer_killed_in_the_middle_of_our_message_is_lost(child: subprocess.Popen[str]) -> None:
    with open_transport("tcp://127.0.0.1:0") as transport:
        endpoint = seated_with(child, transport)
        assert endpoint.send(1, memoryview(bytes(64 * MIB)), soon()) is not None
        with ThreadPoolExecutor(1) as thread:
            flushing = thread.submit(endpoint.flush, soon())
            child.send_signal(signal.SIGKILL)
            error = flushing.exception(PROMPT_S)
        assert isinstance(error, PeerLost), repr(error)
        assert f"rank 0: rank 1 at {endpoint.peers[1]} closed its link" in str(error)


# ---- the listener


def test_a_port_that_is_taken_is_named(transports: list[Transport]) -> None:
    taken = transports[0].address
    with pytest.raises(InvalidArgument, match=rf"data address {taken}: cannot listen there: Address already"):
        open_transport(f"tcp://{taken}")


def test_closing_a_transport_twice_is_closing_it_once(transports: list[Transport], pair: Pair) -> None:
    transports[0].close()
    transports[0].close()
    with pytest.raises(PeerLost, match="rank 0: this endpoint is closed"):
        receive(pair[0], 1, 1)
