"""TCP only: invalid and stale connections, unexpected frames, unresponsive and killed peers."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
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
from exchange import Pair, Waiter, connect, receive, send_and_flush, wait_until, wait_until_running
from ranks import COMMUNICATOR, LONG_S, PROMPT_S, deadline_in, endpoints_of

import hoop.transport.tcp_listener
import hoop.wire.frames
from hoop.errors import DeadlineExceeded, InvalidArgument, LinkCorrupted, MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport import Endpoint, Transport, open_transport
from hoop.transport.accepting import AcceptingSocket
from hoop.transport.tcp_endpoint import TcpEndpoint
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.frames import HEADER_BYTES, VERSION, FrameHeader, FrameKind

MIB = 1 << 20
Dial = Callable[..., socket.socket]


@pytest.fixture
def scheme() -> str:
    """This module tests one transport."""
    return "tcp"


@pytest.fixture
def dial() -> Iterator[Dial]:
    """Dials a transport with a plain socket and sends data; closes the sockets after the test."""
    with ExitStack() as opened:

        def dial(transport: Transport, *parts: bytes) -> socket.socket:
            address = (transport.address.host, transport.address.port)
            sock = opened.enter_context(socket.create_connection(address, timeout=LONG_S))
            for part in parts:
                sock.sendall(part)
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


def read_until_closed(sock: socket.socket) -> bytes:
    """Everything that the other side sends until it closes."""
    received = bytearray()
    with contextlib.suppress(ConnectionResetError):  # it closed before it had read all our data
        while data := sock.recv(4096):
            received += data
    return bytes(received)


def refusal(sock: socket.socket) -> str:
    """The text with which the other side closed the connection."""
    received = read_until_closed(sock)
    assert len(received) >= HEADER_BYTES, "it closed without a refusal"
    header = FrameHeader.unpack(received[:HEADER_BYTES])
    assert header.kind == FrameKind.REFUSAL
    assert header.length == len(received) - HEADER_BYTES
    return received[HEADER_BYTES:].decode()


def wait_for_listener(transport: Transport, dial: Dial) -> None:
    """Returns once the listener has handled every earlier HELLO: it handles connections in order."""
    assert refusal(dial(transport, bytes(HEADER_BYTES)))


# ---- generations and pending connections


def test_a_stale_generation_is_refused_with_the_reason(transports: list[Transport]) -> None:
    peers = [transport.address for transport in transports]
    newer = transports[0].endpoint(COMMUNICATOR, 9, 0, peers)
    older = transports[1].endpoint(COMMUNICATOR, 8, 1, peers)
    older.send(0, memoryview(b"from before"), deadline_in())
    reason = rf"rank 1: rank 0 at {peers[0]} refused the link: generation 8 is over, communicator 7 is at 9"
    with pytest.raises(MembershipChanged, match=reason):
        receive(older, 0, 1)
    newer.close()
    older.close()


def test_a_refusal_reaches_a_rank_that_is_still_sending(transports: list[Transport]) -> None:
    peers = [transport.address for transport in transports]
    newer = transports[0].endpoint(COMMUNICATOR, 9, 0, peers)
    older = transports[1].endpoint(COMMUNICATOR, 8, 1, peers)
    with pytest.raises(MembershipChanged, match="generation 8 is over"):
        send_and_flush(older, 0, bytes(64 * MIB))
    newer.close()
    older.close()


def test_a_pending_connection_is_refused_once_a_newer_generation_begins(
    transports: list[Transport], dial: Dial
) -> None:
    peers = [transport.address for transport in transports]
    older = transports[1].endpoint(COMMUNICATOR, 8, 1, peers)
    older.send(0, memoryview(b"from before"), deadline_in())
    wait_for_listener(transports[0], dial)
    newer = transports[0].endpoint(COMMUNICATOR, 9, 0, peers)
    with pytest.raises(MembershipChanged, match="generation 8 is over, communicator 7 is at 9"):
        receive(older, 0, 1)
    newer.close()
    older.close()


def test_an_early_connection_waits_for_its_endpoint(transports: list[Transport], dial: Dial) -> None:
    """A HELLO and a message for an endpoint that does not exist yet."""
    sock = dial(transports[0], hello() + frame(0))
    wait_for_listener(transports[0], dial)
    peers = [transport.address for transport in transports]
    endpoint = transports[0].endpoint(COMMUNICATOR, 1, 0, peers)
    assert receive(endpoint, 1, 8) == b"payload!"
    sock.sendall(frame(1))
    assert receive(endpoint, 1, 8) == b"payload!"
    endpoint.close()


def test_a_pending_connection_is_attached_only_to_its_own_endpoint(transports: list[Transport], dial: Dial) -> None:
    """Connections to other communicators, generations and ranks stay pending when an endpoint is created."""
    for other in (hello(communicator=6), hello(generation=2), hello(dialled=2)):
        dial(transports[0], other + frame(0, b"not this"))
    dial(transports[0], hello() + frame(0, b"this one"))
    wait_for_listener(transports[0], dial)
    peers = [transport.address for transport in transports]
    endpoint = transports[0].endpoint(COMMUNICATOR, 1, 0, peers)
    assert receive(endpoint, 1, 8) == b"this one"
    endpoint.close()


def test_the_number_of_pending_connections_is_limited(
    transports: list[Transport], dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hoop.transport.tcp_listener, "MAX_PENDING", 2)
    for communicator in (1, 2):
        dial(transports[0], hello(communicator=communicator))
        wait_for_listener(transports[0], dial)
    assert refusal(dial(transports[0], hello(communicator=3))) == "2 links wait here already"


def test_connections_that_say_nothing_do_not_keep_others_out(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of them makes room."""
    monkeypatch.setattr(hoop.transport.tcp_listener, "MAX_PENDING", 4)
    with contextlib.closing(TcpTransport(Address("127.0.0.1", 0))) as transport:
        silent = [dial(transport) for _ in range(6)]
        dial(transport, hello() + frame(0))
        endpoint = transport.endpoint(COMMUNICATOR, 1, 0, [transport.address] * 2)
        assert receive(endpoint, 1, 8) == b"payload!"
        assert silent[0].recv(1) == b"", "it was closed"
        endpoint.close()


def test_a_listener_without_descriptors_pauses_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = threading.Event()
    pause = AcceptingSocket.pause

    def note(accepting: AcceptingSocket) -> None:
        pause(accepting)
        paused.set()

    monkeypatch.setattr(AcceptingSocket, "pause", note)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    hoard: list[int] = []
    with contextlib.closing(TcpTransport(Address("127.0.0.1", 0))) as transport, socket.socket() as client:
        client.settimeout(LONG_S)
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 64, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    hoard.append(os.dup(client.fileno()))
            client.connect((transport.address.host, transport.address.port))
            assert paused.wait(LONG_S)
        finally:
            for descriptor in hoard:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.sendall(b"x" * HEADER_BYTES)
        assert refusal(client), "it was accepted after all"


def test_a_pending_connection_times_out(
    transports: list[Transport], dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hoop.transport.tcp_listener, "PENDING_TIMEOUT_S", 0.01)
    assert refusal(dial(transports[0], hello())) == "no endpoint for this link within 0.01 s"


def test_a_rank_that_is_not_in_the_communicator_is_refused(transports: list[Transport], pair: Pair, dial: Dial) -> None:
    assert refusal(dial(transports[0], hello(source=2))) == "rank 2 is not in communicator 7"
    connect(pair)


def test_a_second_link_from_the_same_rank_does_not_replace_the_first(
    transports: list[Transport], pair: Pair, dial: Dial
) -> None:
    zero, one = pair
    connect(pair)
    impostor = dial(transports[0], hello() + frame(0, b"impostor"))
    read_until_closed(impostor)
    send_and_flush(one, 0, b"the first")
    assert receive(zero, 1, 9) == b"the first"


# ---- unexpected frames


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
def test_an_unexpected_frame_is_refused_and_named(
    transports: list[Transport], pair: Pair, dial: Dial, frames: list[bytes], complaint: str
) -> None:
    zero, _ = pair
    dial(transports[0], hello(), *frames)
    assert receive(zero, 1, 8) == b"payload!"
    with pytest.raises(LinkCorrupted, match=rf"link 1 -> 0 of communicator 7: {complaint}"):
        receive(zero, 1, 8)


@pytest.mark.parametrize(
    "stale", [frame(1, generation=2), frame(1, communicator=8)], ids=["generation", "communicator"]
)
def test_a_frame_of_another_generation_or_communicator_is_refused_as_stale(
    transports: list[Transport], pair: Pair, dial: Dial, stale: bytes
) -> None:
    dial(transports[0], hello(), frame(0), stale)
    assert receive(pair[0], 1, 8) == b"payload!"
    with pytest.raises(MembershipChanged, match=r"link 1 -> 0 of communicator 7: .* refused as stale"):
        receive(pair[0], 1, 8)


@pytest.mark.parametrize("cut", [1, 51, 52, 53, 4095, 4097])
def test_frames_may_arrive_in_any_portions(transports: list[Transport], pair: Pair, dial: Dial, cut: int) -> None:
    """Bytes that are read ahead of one message belong to the next."""
    payloads = [bytes([index % 251]) * size for index, size in enumerate([8, 0, 4000, 30, 1, 9000, 8] * 20)]
    stream = b"".join(frame(index, payload) for index, payload in enumerate(payloads))
    sock = dial(transports[0], hello())
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send() -> None:
        portions = range(0, len(stream), cut) if cut > 60 else [0, *range(cut, 8 * 60, 60)]
        for start, stop in itertools.pairwise([*portions, len(stream)]):
            sock.sendall(stream[start:stop])

    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send)
        for index, payload in enumerate(payloads):
            assert pair[0].wait_readable([1], deadline_in()) == [1], f"message {index}"
            assert receive(pair[0], 1, len(payload)) == payload, f"message {index}"
        sent.result(LONG_S)
    assert pair[0].wait_readable([1], deadline_in(0.01)) == []


def flipped(packed: bytes, byte: int) -> bytes:
    return packed[:byte] + bytes([packed[byte] ^ 1]) + packed[byte + 1 :]


def test_a_change_of_any_header_byte_is_detected(transports: list[Transport], pair: Pair, dial: Dial) -> None:
    """A damaged header is refused before its length is used."""
    good = frame(0)[:HEADER_BYTES]
    for byte in range(HEADER_BYTES):
        with pytest.raises(LinkCorrupted):
            FrameHeader.unpack(flipped(good, byte))
    dial(transports[0], hello(), frame(0), flipped(frame(1), HEADER_BYTES - 1))
    assert receive(pair[0], 1, 8) == b"payload!"
    with pytest.raises(LinkCorrupted, match="a frame header's checksum does not hold"):
        receive(pair[0], 1, 8)


def test_the_error_for_a_damaged_header_names_the_link(transports: list[Transport], pair: Pair, dial: Dial) -> None:
    dial(transports[0], hello(), flipped(frame(0), 20))
    with pytest.raises(LinkCorrupted, match=r"link 1 -> 0 of communicator 7|rank 0: rank 1 at"):
        receive(pair[0], 1, 8)


def test_a_link_that_changes_a_payload_byte_is_named() -> None:
    """With checksums. Here the sender computes the checksum of other bytes, as if a proxy had changed one."""
    with (
        TcpTransport(Address("127.0.0.1", 0), checksums=True) as left,
        TcpTransport(Address("127.0.0.1", 0), checksums=True) as right,
    ):
        zero, one = endpoints_of([left, right])
        send_and_flush(one, 0, b"as it was")
        send_and_flush(one, 0, b"")
        assert receive(zero, 1, 9) == b"as it was"
        assert receive(zero, 1, 0) == b""
        assert isinstance(right, TcpTransport)
        assert isinstance(one, TcpEndpoint)
        correct = right.options.checksum
        assert correct is not None
        one._checksum = lambda data: correct(memoryview(bytes(data)[:-1] + b"?"))
        send_and_flush(one, 0, b"and is no more")
        with pytest.raises(LinkCorrupted, match="link 1 -> 0 of communicator 7: message 2 of 14 bytes is not what"):
            receive(zero, 1, 14)
        zero.close()
        one.close()


# ---- invalid connections


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n", "not a Hoop frame"),
        (flipped(hello(), 10), "a frame header's checksum does not hold"),
        (frame(0), "the first frame on a link must be HELLO"),
        (FrameHeader(9, 7, 1, 1, 0, 0).pack(), "unknown frame kind 9"),
        (FrameHeader(FrameKind.DATA, 7, 1, 1, 0, 1 << 62).pack(), "over the limit"),
    ],
    ids=["a browser", "damaged", "not a HELLO", "unknown kind", "absurd length"],
)
def test_a_connection_that_does_not_start_with_hello_is_refused_with_the_reason(
    transports: list[Transport], dial: Dial, data: bytes, answer: str
) -> None:
    assert answer in refusal(dial(transports[0], data))


def test_a_connection_without_a_complete_hello_times_out(
    transports: list[Transport], dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hoop.transport.tcp_listener, "HELLO_TIMEOUT_S", 0.01)
    connections = [dial(transports[0], data) for data in (b"", hello()[:20])]
    assert [refusal(connection) for connection in connections] == ["no HELLO within 0.01 s"] * 2


def test_another_protocol_version_is_refused_with_the_reason(
    transports: list[Transport], dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(hoop.wire.frames, "VERSION", VERSION + 1)
        data = hello()
    expected = f"frame version {VERSION + 1}, this side speaks {VERSION}: update the older one"
    assert refusal(dial(transports[0], data)) == expected


def test_invalid_connections_do_not_disturb_an_exchange(transports: list[Transport], pair: Pair, dial: Dial) -> None:
    zero, one = pair

    def send_all() -> None:
        for index in range(10):
            send_and_flush(one, 0, bytes([index]) * MIB)

    for data in (b"", b"garbage" * 100, hello()[:20], hello(source=9), hello(generation=0)):
        for transport in transports:
            dial(transport, data)
    for _ in range(20):
        connection = dial(transports[0])
        connection.close()
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send_all)
        for index in range(10):
            dial(transports[0], b"more garbage" * 10)
            assert receive(zero, 1, MIB) == bytes([index]) * MIB
        sent.result(LONG_S)
    connect(pair)


def test_a_message_before_close_arrives_though_the_listener_is_slow(
    transports: list[Transport], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 answers and closes before rank 0's listener has read its HELLO."""
    zero, one = pair
    may_continue = threading.Event()

    def unpack(data: bytes) -> FrameHeader:
        header = FrameHeader.unpack(data)
        if header.source == 1:
            may_continue.wait(LONG_S)
        return header

    monkeypatch.setattr(hoop.transport.tcp_listener, "FrameHeader", SimpleNamespace(unpack=unpack))
    send_and_flush(zero, 1, b"question")
    assert receive(one, 0, 8) == b"question"
    send_and_flush(one, 0, b"answer")
    one.close()
    waiter = Waiter(zero, peer=1, size=6)
    with contextlib.suppress(TimeoutError):
        waiter.outcome.exception(0.1)  # time in which it could fail too early
    may_continue.set()
    error = waiter.error()
    assert error is None, repr(error)
    assert waiter.into == b"answer"


# ---- peers that do not answer


def test_send_fails_if_no_process_listens(transports: list[Transport], pair: Pair) -> None:
    transports[1].close()
    with pytest.raises(PeerLost, match=rf"rank 0: rank 1 at {pair[0].peers[1]} does not answer: .*refused"):
        pair[0].send(1, memoryview(b"anyone?"), deadline_in())


@pytest.fixture
def unresponsive() -> Iterator[Address]:
    """The address of a socket that never accepts and whose queue is full, so that dialling it hangs."""
    with ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            sock = opened.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        yield Address(*listener.getsockname())


def test_a_deadline_passes_while_connecting(transports: list[Transport], unresponsive: Address) -> None:
    endpoint = transports[0].endpoint(COMMUNICATOR, 1, 0, [transports[0].address, unresponsive])
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=rf"rank 0: connecting to rank 1 at {unresponsive} passed its dead"):
        endpoint.send(1, memoryview(b"anyone?"), deadline_in(0.1))
    assert time.monotonic() - started < PROMPT_S
    endpoint.close()


def test_abort_ends_a_connection_attempt(transports: list[Transport], unresponsive: Address) -> None:
    endpoint = transports[0].endpoint(COMMUNICATOR, 1, 0, [transports[0].address, unresponsive])
    reason = MembershipChanged("generation 2 begins")
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(endpoint.send, 1, memoryview(b"anyone?"), deadline_in())
        wait_until_running(sending)
        endpoint.abort(reason)
        assert sending.exception(PROMPT_S) is reason
    endpoint.close()


@pytest.mark.parametrize("moment", ["before it watches", "after it woke"])
def test_a_close_just_before_or_after_a_wait_is_noticed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Another thread may close the endpoint at either moment."""
    zero, _ = pair
    connect(pair)
    assert isinstance(zero, TcpEndpoint)
    poll = zero._poll
    closer = threading.Thread(target=zero.close)

    def close() -> None:
        """Waits briefly; ``close`` may itself wait for the receiving thread."""
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
        receive(zero, 1, 8)
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
    pending = endpoint.send(0, memoryview(b"x" * (64 << 20)), time.monotonic() + 240)
    print("pending" if pending is not None else "done", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Rank 1 in its own process: it sends the beginning of 64 MiB and then waits."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PYTHONPATH": str(Path(hoop.transport.__file__).parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        yield started
        started.kill()


def endpoint_connected_to(child: subprocess.Popen[str], transport: Transport) -> Endpoint:
    """The endpoint of rank 0, once the child has sent its beginning."""
    assert child.stdin is not None
    assert child.stdout is not None
    peers = [transport.address, Address.parse(child.stdout.readline())]
    endpoint = transport.endpoint(COMMUNICATOR, 1, 0, peers)
    print(transport.address, file=child.stdin, flush=True)
    assert child.stdout.readline() == "pending\n"
    return endpoint


def test_a_peer_killed_in_the_middle_of_its_message_is_lost(child: subprocess.Popen[str]) -> None:
    with open_transport("tcp://127.0.0.1:0") as transport:
        endpoint = endpoint_connected_to(child, transport)
        waiter = Waiter(endpoint, peer=1, size=64 * MIB)
        wait_until(lambda: waiter.into[0], "the beginning of the message")
        child.send_signal(signal.SIGKILL)
        error = waiter.error()
        assert isinstance(error, PeerLost), repr(error)
        assert f"rank 0: rank 1 at {endpoint.peers[1]} closed its link" in str(error)
        assert waiter.into[-1] == 0, "only a part had come"


def test_a_peer_killed_in_the_middle_of_our_message_is_lost(child: subprocess.Popen[str]) -> None:
    with open_transport("tcp://127.0.0.1:0") as transport:
        endpoint = endpoint_connected_to(child, transport)
        assert endpoint.send(1, memoryview(bytes(64 * MIB)), deadline_in()) is not None
        with ThreadPoolExecutor(1) as thread:
            flushing = thread.submit(endpoint.flush, deadline_in())
            child.send_signal(signal.SIGKILL)
            error = flushing.exception(PROMPT_S)
        assert isinstance(error, PeerLost), repr(error)
        assert f"rank 0: rank 1 at {endpoint.peers[1]} closed its link" in str(error)


# ---- the listener


def test_the_error_names_a_port_that_is_in_use(transports: list[Transport]) -> None:
    taken = transports[0].address
    with pytest.raises(InvalidArgument, match=rf"data address {taken}: cannot listen there: Address already"):
        open_transport(f"tcp://{taken}")


def test_a_transport_can_be_closed_twice(transports: list[Transport], pair: Pair) -> None:
    transports[0].close()
    transports[0].close()
    with pytest.raises(PeerLost, match="rank 0: this endpoint is closed"):
        receive(pair[0], 1, 1)
