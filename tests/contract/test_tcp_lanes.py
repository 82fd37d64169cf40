"""TCP with several sockets a link: the contract of every transport, and lanes that fail, lie, come late or never come.

Every message from 64 bytes on is cut into stripes here, so that small and large ones use lanes.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from exchange import Pair, Waiter, connect, receive, send_and_flush, wait_until
from ranks import COMMUNICATOR, LONG_S, PROMPT_S, Ranks, deadline_in, endpoints_of
from test_collectives import ALGORITHMS, check_large_vectors, for_algorithms
from test_link_authentication import KEY, OTHER
from test_link_authentication import pair as authenticated_pair
from test_tcp import Dial, child, dial, endpoint_connected_to, hello, refusal, wait_for_listener  # noqa: F401 fixtures
from test_transport import (  # noqa: F401 collected here again, over several sockets
    message,
    test_a_peer_that_closed_before_the_first_send_is_lost,
    test_a_pending_send_reports_when_it_is_done,
    test_a_wrong_length_is_refused_and_named,
    test_abort_wakes_a_waiting_thread,
    test_after_detach_the_sender_may_overwrite,
    test_an_endpoint_can_be_closed_twice,
    test_close_wakes_a_waiting_thread,
    test_closing_a_transport_closes_its_endpoints,
    test_generations_do_not_mix,
    test_messages_and_bytes_are_counted,
    test_messages_arrive_in_order_and_whole,
    test_messages_flushed_before_close_arrive,
    test_pending_messages_progress_during_wait_readable,
    test_send_never_waits_for_the_receiver,
    test_wait_readable_reports_a_lost_peer_with_pending_messages,
    test_wait_readable_reports_messages_and_lost_peers,
)

import hoop.transport.tcp_endpoint
import hoop.transport.tcp_lanes
from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.errors import DeadlineExceeded, HoopError, InvalidArgument, LinkCorrupted, MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport import Endpoint, Transport, open_transport
from hoop.transport.fault_injection import FaultyLinks
from hoop.transport.tcp_endpoint import TcpEndpoint
from hoop.transport.tcp_lanes import VARIABLE, default_sockets, stripes_of
from hoop.transport.tcp_link import OutgoingLink
from hoop.transport.tcp_link import connect as real_connect
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

MIB = 1 << 20
SOCKETS, THRESHOLD = 3, 64
STRIPED = FrameHeader(FrameKind.STRIPED, COMMUNICATOR, 1, 1, sequence=0, length=1000, lane=1)
"""A message of rank 1 to rank 0 over one lane, as a test sends it through plain sockets."""
PARTS = [bytes(part) for part in stripes_of(memoryview(bytes(range(200)) * 5), 1)]
STRIPE = FrameHeader(FrameKind.STRIPE, COMMUNICATOR, 1, 1, sequence=0, length=len(PARTS[1]), lane=1)
ACCEPTED = FrameHeader(FrameKind.LANE, COMMUNICATOR, 1, source=0, sequence=1, length=0, lane=1)
"""The answer of rank 0 to the greeting of lane 1 from rank 1."""


@pytest.fixture
def scheme() -> str:
    """This module tests one transport."""
    return "tcp"


@pytest.fixture(autouse=True)
def lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(SOCKETS))
    monkeypatch.setattr(hoop.transport.tcp_lanes, "STRIPED_FROM_BYTES", THRESHOLD)
    monkeypatch.setattr(hoop.transport.tcp_lanes, "_DIAL_TIMEOUT_S", LONG_S)  # tests expect lanes at any load


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def lane_bytes(endpoint: Endpoint, peer: int) -> tuple[int, int]:
    """Bytes sent and received over lanes alone."""
    assert isinstance(endpoint, TcpEndpoint)
    return endpoint._lanes.byte_counts(peer)


def lane_hello(lane: int = 1, source: int = 1, communicator: int = COMMUNICATOR, generation: int = 1) -> bytes:
    return FrameHeader(FrameKind.LANE, communicator, generation, source, sequence=0, length=0, lane=lane).pack()


# ---- what travels over lanes


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000, 1_000_003])
@pytest.mark.parametrize("lanes", [1, 2, 7, 15])
def test_the_parts_of_a_message_are_the_message(size: int, lanes: int) -> None:
    data = message(size)
    parts = stripes_of(memoryview(data), lanes)
    assert b"".join(parts) == data
    assert len(parts) == lanes + 1
    assert all(abs(part.nbytes - 2 * size / (2 * lanes + 1)) <= 1 for part in parts[1:])


def test_striped_and_small_messages_alternate_in_order(pair: Pair) -> None:
    zero, one = pair
    sizes = [1, THRESHOLD, THRESHOLD - 1, 100_003, 0, 100_000, THRESHOLD + 1, 5, 3 * MIB + 7, 8]
    for size in sizes:
        zero.send(1, memoryview(message(size)), deadline_in())
    with_lane = [size for size in sizes if size >= THRESHOLD]
    for size in sizes:
        assert receive(one, 0, size) == message(size), f"{size} bytes"
    zero.flush(deadline_in())
    assert (zero.messages_sent, zero.bytes_sent) == (len(sizes), sum(sizes))
    headers = HEADER_BYTES * (len(sizes) + (SOCKETS - 1) * len(with_lane))
    assert zero.link_stats.byte_counts(1) == (sum(sizes) + headers, 0)
    assert one.link_stats.byte_counts(0) == (0, sum(sizes) + headers)
    assert lane_bytes(zero, 1)[0] > sum(with_lane) * 3 // 4


def test_random_sizes_in_both_directions(pair: Pair) -> None:
    """Each rank sends several messages before it receives; some buffers are detached and overwritten."""
    rng = random.Random(5)
    rounds = [[rng.choice([1, 70, 5000, 300_000, 2 * MIB]) for _ in range(4)] for _ in range(6)]

    def exchange(mine: Endpoint, peer: int) -> None:
        for index, sizes in enumerate(rounds):
            buffers = [bytearray(message(size, index + mine.rank)) for size in sizes]
            for number, data in enumerate(buffers):
                pending = mine.send(peer, memoryview(data), deadline_in())
                if pending is not None and number % 3 == 0:
                    pending.detach()
                    data[:] = bytes(len(data))
            for size in sizes:
                assert receive(mine, peer, size) == message(size, index + peer), f"round {index}, {size} bytes"
            mine.flush(deadline_in())

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(exchange, pair[1], 0)
        exchange(pair[0], 1)
        other.result(LONG_S)


@for_algorithms(ALGORITHMS)
def test_large_vectors(collective: str, algorithm: str) -> None:
    with Ranks("tcp", 3) as ranks:
        check_large_vectors(ranks, collective, algorithm)
        endpoints = [communicator.endpoint for communicator in ranks.communicators]
        used = sum(lane_bytes(endpoint, peer)[0] for endpoint in endpoints for peer in range(3))
        assert bool(used) == (collective != "barrier")


def test_a_sum_has_the_same_bits_as_over_one_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    def worker(comm: Communicator) -> bytes:
        source = np.random.default_rng(comm.rank).standard_normal(100_001).astype(np.float32)
        total = np.zeros_like(source)
        comm.run(Operation("all_reduce", source.size), source, total, LONG_S)
        return total.tobytes()

    results = []
    for sockets in (1, 2, SOCKETS):
        monkeypatch.setenv(VARIABLE, str(sockets))
        with Ranks("tcp", 4) as ranks:
            results.append(ranks.run(worker))
    assert results[0] == results[1] == results[2]


def test_ranks_of_several_hosts(scheme: str) -> None:
    """Shared memory and lanes at the same time."""
    with Ranks("hybrid", 4, hosts=(0, 0, 1, 1)) as ranks:
        check_large_vectors(ranks, "all_reduce", "")
        check_large_vectors(ranks, "broadcast", "")


def test_links_beyond_the_limit_have_one_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoop.transport.tcp_lanes, "_MAX_STRIPED_LINKS", 1)
    with ExitStack() as opened:
        zero, *others = endpoints_of([opened.enter_context(open_transport("tcp://127.0.0.1:0")) for _ in range(3)])
        for other in others:
            send_and_flush(zero, other.rank, message(1000))
            assert receive(other, 0, 1000) == message(1000)
        assert [lane_bytes(zero, other.rank)[0] > 0 for other in others] == [True, False]


@pytest.mark.parametrize("dialled", [0, 1])
def test_a_lane_that_cannot_be_dialled_is_not_used(
    dialled: int, pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections after the first ``dialled`` lanes are refused: messages arrive whole, and the log says it once."""
    zero, one = pair
    send_and_flush(zero, 1, b"dials")
    assert receive(one, 0, 5) == b"dials"
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = Address("127.0.0.1", unused.getsockname()[1])
    dials: list[Address] = []

    def connect_to_nobody(address: Address, *rest: Any) -> socket.socket:
        dials.append(address)
        return real_connect(address if len(dials) <= dialled else nobody, *rest)

    monkeypatch.setattr(hoop.transport.tcp_endpoint, "connect", connect_to_nobody)
    for size in (1000, 100_003, 65):
        send_and_flush(zero, 1, message(size))
        assert receive(one, 0, size) == message(size)
    assert len(dials) == dialled + 1, "a lane was dialled again, or another one after it"
    assert (lane_bytes(zero, 1)[0] > 0) == bool(dialled)
    assert [record.message for record in caplog.records if "sockets: lane" in record.message] == [
        f"rank 0: {zero.describe(1)} does not answer: [Errno 111] Connection refused. "
        f"The link uses {dialled + 1} of {SOCKETS} sockets: lane {dialled + 1} was not accepted"
    ]


def forward_one_way(listener: socket.socket, to: Address) -> None:
    """Passes the bytes of the first connection on to an address, and none back."""
    with (
        contextlib.suppress(OSError),  # an end of the connection was closed
        listener.accept()[0] as near,
        socket.create_connection((to.host, to.port)) as far,
    ):
        while data := near.recv(4096):
            far.sendall(data)


@pytest.mark.parametrize("key", [b"", KEY], ids=["no key", "key"])
@pytest.mark.parametrize("obstacle", ["never accepted", "no answer comes through"])
def test_a_lane_that_is_not_accepted_is_not_used(
    obstacle: str, key: bytes, closing: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is made, and the greeting sent. What follows it arrives whole and in order, in both directions."""
    monkeypatch.setattr(hoop.transport.tcp_lanes, "_DIAL_TIMEOUT_S", 0.2)
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    wall = Address("127.0.0.1", listener.getsockname()[1])
    thread = closing.enter_context(ThreadPoolExecutor(1))
    closing.callback(listener.shutdown, socket.SHUT_RDWR)
    zero, one = closing.enter_context(authenticated_pair(key, key))
    connect((zero, one))
    if obstacle == "no answer comes through":
        thread.submit(forward_one_way, listener, one.peers[1])
    dials: list[Address] = []

    def connect_to_wall(address: Address, *rest: Any) -> socket.socket:
        dials.append(address)
        return real_connect(wall if address == one.peers[1] else address, *rest)

    monkeypatch.setattr(hoop.transport.tcp_endpoint, "connect", connect_to_wall)
    sizes = (3 * MIB, 100_003, 5, 1000)
    for seed, size in enumerate(sizes):
        zero.send(1, memoryview(message(size, seed)), deadline_in())
    with ThreadPoolExecutor(1) as receiver:
        received = receiver.submit(lambda: [receive(one, 0, size) for size in sizes])
        zero.flush(deadline_in())
        assert received.result(LONG_S) == [message(size, seed) for seed, size in enumerate(sizes)]
    monkeypatch.setattr(hoop.transport.tcp_lanes, "_DIAL_TIMEOUT_S", LONG_S)
    send_and_flush(one, 0, message(1000))  # this direction has its lanes
    assert receive(zero, 1, 1000) == message(1000)
    assert dials.count(one.peers[1]) == 1, "a lane was dialled again, or another one after it"
    assert lane_bytes(zero, 1)[0] == 0
    assert lane_bytes(one, 0)[0] > 0
    assert [record.message for record in caplog.records if "sockets: lane" in record.message] == [
        f"rank 0: connecting to {zero.describe(1)} passed its deadline (communicator {COMMUNICATOR}, generation 1). "
        f"The link uses 1 of {SOCKETS} sockets: lane 1 was not accepted"
    ]
    assert zero.link_stats.failed_peer is None


def test_an_abort_while_a_lane_is_dialled_is_raised(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    zero, _ = pair
    send_and_flush(zero, 1, b"dials")

    def connect_and_abort(address: Address, *rest: Any) -> socket.socket:
        zero.abort(MembershipChanged("another generation"))
        raise InterruptedError

    monkeypatch.setattr(hoop.transport.tcp_endpoint, "connect", connect_and_abort)
    with pytest.raises(MembershipChanged, match="another generation"):
        send_and_flush(zero, 1, message(1000))


def test_with_checksums_no_lanes_are_used() -> None:
    with ExitStack() as opened:
        here = Address("127.0.0.1", 0)
        transports: list[Transport] = [opened.enter_context(TcpTransport(here, checksums=True)) for _ in range(2)]
        zero, one = endpoints_of(transports)
        zero.send(1, memoryview(message(3 * MIB)), deadline_in())
        received = Waiter(one, peer=0, size=3 * MIB)
        zero.flush(deadline_in())
        assert received.error() is None
        assert received.into == message(3 * MIB)
        assert lane_bytes(zero, 1) == lane_bytes(one, 0) == (0, 0)


# ---- how many sockets


@pytest.mark.parametrize("value", ["0", "17", "-1", "two", "", " 3", "3.0", "²"])
def test_a_bad_number_of_sockets_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(VARIABLE, value)
    expected = rf"HOOP_SOCKETS_PER_LINK={value!r}: give a whole number from 1 to 16, or unset it to let Hoop choose"
    with pytest.raises(InvalidArgument, match=expected):
        open_transport("tcp://127.0.0.1:0")


@pytest.mark.parametrize(("cores", "ranks", "sockets"), [(2, 1, 1), (16, 2, 4), (16, 4, 4), (16, 5, 1), (3, 1, 1)])
def test_the_default_depends_on_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, sockets: int
) -> None:
    monkeypatch.setattr(hoop.transport.tcp_lanes, "available_cores", lambda: cores)
    assert default_sockets(ranks) == sockets


@pytest.mark.parametrize("cores", [1, 64])
def test_without_the_variable_messages_arrive(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(hoop.transport.tcp_lanes, "available_cores", lambda: cores)
    with ExitStack() as opened:
        zero, one = endpoints_of([opened.enter_context(open_transport("tcp://127.0.0.1:0")) for _ in range(2)])
        send_and_flush(zero, 1, message(1000))
        assert receive(one, 0, 1000) == message(1000)
        assert (lane_bytes(zero, 1)[0] > 0) == (cores == 64)


# ---- a peer that ends, and calls that end


@pytest.mark.parametrize("connected", [False, True], ids=["one way", "both ways"])
def test_a_peer_killed_in_the_middle_of_its_message_is_lost(
    child: subprocess.Popen[str],  # noqa: F811 a fixture
    connected: bool,
) -> None:
    """The child's lanes go on while its own thread waits, and so only the part on the link's socket is missing."""
    with open_transport("tcp://127.0.0.1:0") as transport:
        endpoint = endpoint_connected_to(child, transport)
        if connected:
            send_and_flush(endpoint, 1, b"!")
        waiter = Waiter(endpoint, peer=1, size=64 * MIB)
        wait_until(lambda: waiter.into[-1], "the end of the last stripe")
        child.send_signal(signal.SIGKILL)
        error = waiter.error()
        assert isinstance(error, PeerLost), repr(error)
        assert f"rank 0: rank 1 at {endpoint.peers[1]} closed its link" in str(error)
        assert waiter.into[12 * MIB] == 0, "only a part had come"


def test_a_peer_killed_in_the_middle_of_our_message_is_lost(
    child: subprocess.Popen[str],  # noqa: F811 a fixture
) -> None:
    with open_transport("tcp://127.0.0.1:0") as transport:
        endpoint = endpoint_connected_to(child, transport)
        assert endpoint.send(1, memoryview(bytes(64 * MIB)), deadline_in()) is not None
        wait_until(lambda: lane_bytes(endpoint, 1)[0], "the beginning of a stripe")
        child.send_signal(signal.SIGKILL)
        with pytest.raises(PeerLost, match=f"rank 0: rank 1 at {endpoint.peers[1]} closed its link"):
            endpoint.flush(deadline_in(PROMPT_S))


def half_received(pair: Pair) -> Waiter:
    """Rank 1 waits for the rest of a message, on the link's socket and on both lanes: an error keeps rank 0 from it."""
    connect(pair)
    zero, one = pair
    assert isinstance(zero, TcpEndpoint)
    lanes = zero._lanes
    assert zero.send(1, memoryview(b"\2" * (32 * MIB)), deadline_in()) is not None

    def begun() -> bool:
        with pytest.raises(DeadlineExceeded):  # rank 0 sends while it waits, as much as fits into the sockets' buffers
            receive(zero, 1, 1, deadline_in(0.01))
        return all(lane.bytes_sent for lane in lanes._outgoing[1])

    wait_until(begun, "all lanes of rank 0 have begun to send")
    waiter = Waiter(one, peer=0, size=32 * MIB)
    starts = [part.nbytes for part in stripes_of(memoryview(waiter.into), SOCKETS - 1)]
    wait_until(lambda: waiter.into[starts[0]] and waiter.into[starts[0] + starts[1]], "the beginning of each stripe")
    return waiter


@pytest.mark.parametrize("error", [MembershipChanged("generation 2 begins"), PeerLost("rank 2 died")], ids=type)
def test_an_abort_ends_a_striped_receive(pair: Pair, error: HoopError) -> None:
    _, one = pair
    waiter = half_received(pair)
    one.abort(error)
    assert waiter.error() is error
    waiter.into[:] = bytes(len(waiter.into))
    one.close()
    assert not any(waiter.into), "a lane wrote to the memory after the call had ended"


def test_close_ends_a_striped_receive(pair: Pair) -> None:
    _, one = pair
    waiter = half_received(pair)
    one.close()
    assert "rank 1: this endpoint is closed" in str(waiter.error())


def test_a_sender_that_gives_up_says_why(pair: Pair) -> None:
    zero, _ = pair
    waiter = half_received(pair)
    zero.abort(PeerLost("rank 2 died"))
    zero.close()
    error = waiter.error()
    assert isinstance(error, PeerLost), repr(error)
    assert "closed its link, it gave up: rank 2 died" in str(error)


def test_a_receiver_that_gives_up_says_why(pair: Pair) -> None:
    zero, one = pair
    waiter = half_received(pair)
    one.abort(PeerLost("rank 2 died"))
    assert isinstance(waiter.error(), PeerLost)
    one.close()
    with pytest.raises(PeerLost, match=r"rank 0: rank 1 at .* closed its link, it gave up: rank 2 died"):
        zero.flush(deadline_in())


def test_a_deadline_passes_in_a_striped_receive(pair: Pair) -> None:
    zero, one = pair
    connect(pair)
    data = b"\2" * (32 * MIB)
    assert zero.send(1, memoryview(data), deadline_in()) is not None
    with pytest.raises(DeadlineExceeded, match="rank 1: waiting for rank 0 at"):
        receive(one, 0, len(data), deadline_in(0.05))


@pytest.mark.parametrize("ending", ["abort", "error"])
def test_after_an_error_nothing_of_the_buffer_is_sent(pair: Pair, ending: str) -> None:
    """The caller may change it then; the receiver must not get the changed bytes."""
    zero, one = pair
    connect(pair)
    data = bytearray(b"\2" * (32 * MIB))
    assert zero.send(1, memoryview(data), deadline_in()) is not None
    if ending == "abort":
        zero.abort(PeerLost("rank 2 died"))
    else:
        with pytest.raises(DeadlineExceeded):
            receive(zero, 1, 1, deadline_in(0.01))
    data[:] = b"\3" * len(data)
    waiter = Waiter(one, peer=0, size=len(data))
    wait_until(lambda: waiter.into.count(b"\2"), "a part, which had been sent before")
    with contextlib.suppress(TimeoutError):
        waiter.outcome.exception(0.2)  # time in which more could come
    enough = PeerLost("the test has seen enough")
    one.abort(enough)
    assert waiter.error() is enough
    assert not waiter.into.count(b"\3")


def test_after_an_error_the_next_call_continues_to_send(pair: Pair) -> None:
    zero, one = pair
    connect(pair)
    data = message(16 * MIB)
    assert zero.send(1, memoryview(data), deadline_in()) is not None
    with pytest.raises(DeadlineExceeded):
        receive(zero, 1, 1, deadline_in(0.01))
    waiter = Waiter(one, peer=0, size=len(data))
    zero.flush(deadline_in())
    assert waiter.error() is None
    assert waiter.into == data


@pytest.mark.parametrize("call", ["flush", "receive", "wait_readable"])
def test_a_lane_that_fails_alone_fails_its_link(pair: Pair, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link's own socket is intact, and both processes are alive."""
    monkeypatch.setattr(hoop.transport.tcp_endpoint, "_CLOSING_FRAME_S", 0.01)
    zero, one = pair
    connect(pair)
    send_and_flush(zero, 1, message(1000))
    assert receive(one, 0, 1000) == message(1000)
    assert isinstance(one, TcpEndpoint)
    sock = one._lanes._incoming[0][1].sock
    assert sock is not None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()  # resets the connection, because it lingers for 0 seconds
    assert zero.send(1, memoryview(bytes(32 * MIB)), deadline_in()) is not None
    if call == "wait_readable":
        while not (lost := zero.wait_readable([], deadline_in(PROMPT_S))):
            pass
        assert lost == [1]
        assert zero.wait_readable([], deadline_in(0.01)) == [], "its pending message is dropped"
        return
    with pytest.raises(PeerLost, match=r"rank 0: rank 1 at .* closed its link \((Connection reset|Broken pipe)"):
        zero.flush(deadline_in(PROMPT_S)) if call == "flush" else receive(zero, 1, 1, deadline_in(PROMPT_S))
    assert zero.link_stats.failed_peer == 1


def test_a_closing_frame_that_comes_after_the_end_of_a_lane_is_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They travel over different connections."""
    zero, one = pair
    waiting, wait_for_reply = threading.Event(), OutgoingLink.wait_for_reply

    def wait(link: OutgoingLink, timeout: float) -> None:
        waiting.set()
        wait_for_reply(link, LONG_S)

    monkeypatch.setattr(OutgoingLink, "wait_for_reply", wait)
    waiter = half_received(pair)
    assert isinstance(zero, TcpEndpoint)
    for lane in zero._lanes._outgoing[1]:
        lane.shut_down()
    assert waiting.wait(LONG_S)
    zero.abort(PeerLost("rank 2 died"))
    zero.close()
    assert "it gave up: rank 2 died" in str(waiter.error())
    assert one.link_stats.failed_peer is None


def test_wait_readable_returns_when_a_lane_has_sent(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the link's own socket has accepted its part long before."""
    monkeypatch.setattr(
        hoop.transport.tcp_lanes,
        "stripes_of",
        lambda payload, lanes: [payload[:1000], payload[1000 : 16 * MIB], payload[16 * MIB :]],
    )
    zero, one = pair
    connect(pair)
    pending = zero.send(1, memoryview(bytes(32 * MIB)), deadline_in())
    assert pending is not None

    def push() -> None:
        while not pending.done:
            assert zero.wait_readable([], deadline_in()) == []

    with ThreadPoolExecutor(1) as thread:
        pushed = thread.submit(push)
        receive(one, 0, 32 * MIB)
        pushed.result(PROMPT_S)


def test_a_reset_connection_raises_peer_lost_at_both_ends(pair: Pair, closing: ExitStack) -> None:
    faults = FaultyLinks()
    closing.callback(faults.install())
    connect(pair)
    zero, one = pair
    send_and_flush(zero, 1, message(1000))  # dials the lanes
    assert receive(one, 0, 1000) == message(1000)
    faults.drops = 1  # of the first connection that sends: a lane's, or the link's own
    with pytest.raises(PeerLost, match="rank 0: rank 1 at"):
        send_and_flush(zero, 1, bytes(8 * MIB))
    zero.close()
    with pytest.raises(PeerLost, match="rank 1: rank 0 at"):
        receive(one, 0, 8 * MIB)
    assert faults.injected == 1


# ---- lanes of plain sockets: late, missing, short, wrong


@pytest.mark.parametrize("late", [False, True], ids=["lane first", "lane last"])
def test_a_lane_may_come_after_the_message(
    transports: list[Transport],
    pair: Pair,
    dial: Dial,  # noqa: F811 a fixture
    late: bool,
) -> None:
    lane = [lane_hello(), STRIPE.pack(), PARTS[1]]
    link = [hello(), STRIPED.pack(), PARTS[0], FrameHeader(FrameKind.DATA, COMMUNICATOR, 1, 1, 1, 4).pack(), b"next"]
    dial(transports[0], *(link if late else lane))
    wait_for_listener(transports[0], dial)
    waiter = Waiter(pair[0], peer=1, size=STRIPED.length)
    dial(transports[0], *(lane if late else link))
    assert waiter.error() is None
    assert waiter.into == b"".join(PARTS)
    assert receive(pair[0], 1, 4) == b"next"


def test_a_lane_that_does_not_come_is_an_error(
    transports: list[Transport],
    pair: Pair,
    dial: Dial,  # noqa: F811 a fixture
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hoop.transport.tcp_lanes, "_ACCEPT_TIMEOUT_S", 0.02)
    monkeypatch.setattr(hoop.transport.tcp_endpoint, "_LANE_POLL_S", 0.01)
    following = FrameHeader(FrameKind.DATA, COMMUNICATOR, 1, 1, sequence=1, length=4)
    dial(transports[0], hello(), STRIPED.pack(), PARTS[0], following.pack(), b"next")
    with pytest.raises(PeerLost, match=r"rank 0: rank 1 at .* \(its lane 1 did not connect within 0.02 s\)"):
        receive(pair[0], 1, STRIPED.length)
    with pytest.raises(LinkCorrupted, match="message 1 came where 0 was due"):
        receive(pair[0], 1, 4)


@pytest.mark.parametrize(
    ("stripe", "kind", "complaint"),
    [
        (b"", PeerLost, "rank 0: rank 1 at .* closed its link"),
        (STRIPE.pack()[:20], PeerLost, "rank 0: rank 1 at .* closed its link"),
        (STRIPE.pack() + PARTS[1][:-1], PeerLost, "rank 0: rank 1 at .* closed its link"),
        *(
            (
                wrong + PARTS[1],
                LinkCorrupted,
                "link 1 -> 0 of communicator 7, lane 1: a stripe came that is not part of",
            )
            for wrong in (
                FrameHeader(FrameKind.STRIPE, COMMUNICATOR, 1, 1, 1, STRIPE.length, lane=1).pack(),
                FrameHeader(FrameKind.STRIPE, COMMUNICATOR, 2, 1, 0, STRIPE.length, lane=1).pack(),
                FrameHeader(FrameKind.STRIPE, COMMUNICATOR, 1, 1, 0, STRIPE.length - 1, lane=1).pack(),
                FrameHeader(FrameKind.STRIPE, COMMUNICATOR, 1, 1, 0, 1 << 40, lane=1).pack(),
                FrameHeader(FrameKind.STRIPE, COMMUNICATOR, 1, 1, 0, STRIPE.length, lane=2).pack(),
                FrameHeader(FrameKind.DATA, COMMUNICATOR, 1, 1, 0, STRIPE.length).pack(),
                STRIPE.pack()[:-1] + b"!",
            )
        ),
    ],
    ids=["nothing", "header", "short", "sequence", "generation", "length", "huge", "lane", "kind", "damaged"],
)
def test_a_short_or_wrong_stripe_is_an_error(
    transports: list[Transport],
    pair: Pair,
    dial: Dial,  # noqa: F811 a fixture
    stripe: bytes,
    kind: type[HoopError],
    complaint: str,
) -> None:
    lane = dial(transports[0], lane_hello(), stripe)
    assert FrameHeader.unpack(lane.recv(HEADER_BYTES)) == ACCEPTED
    lane.close()
    dial(transports[0], hello(), STRIPED.pack(), PARTS[0])
    with pytest.raises(kind, match=complaint):
        receive(pair[0], 1, STRIPED.length)


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        (FrameHeader(FrameKind.STRIPED, COMMUNICATOR, 1, 1, 0, 1000), "a frame of kind 14 from rank 1 is out of place"),
        (FrameHeader(FrameKind.DATA, COMMUNICATOR, 1, 1, 0, 1000, lane=1), "a frame of kind 2 .* is out of place"),
        (FrameHeader(FrameKind.STRIPE, COMMUNICATOR, 1, 1, 0, 1000, lane=1), "a frame of kind 15 .* is out of place"),
        (FrameHeader(FrameKind.STRIPED, COMMUNICATOR, 1, 1, 0, 1000, lane=16), "lane 16, over the limit of 15"),
        (
            FrameHeader(FrameKind.STRIPED, COMMUNICATOR, 1, 1, 0, 1 << 39, lane=1),
            "has 549755813888 bytes, expected 1000",
        ),
    ],
    ids=["no lanes", "not striped", "a stripe", "too many lanes", "too long"],
)
def test_a_wrong_header_of_a_striped_message_is_refused(
    transports: list[Transport],
    pair: Pair,
    dial: Dial,  # noqa: F811 a fixture
    header: FrameHeader,
    complaint: str,
) -> None:
    dial(transports[0], hello(), header.pack())
    with pytest.raises(LinkCorrupted, match=complaint):
        receive(pair[0], 1, 1000)


@pytest.mark.parametrize(
    ("greeting", "reason"),
    [
        (lane_hello(generation=1), "generation 1 is over, communicator 7 is at 2"),
        (lane_hello(generation=2, source=2), "rank 2 is not in communicator 7"),
        (lane_hello(generation=2, lane=0), "a first frame of kind 13 for lane 0"),
        (lane_hello(generation=2, lane=16), "a frame of lane 16, over the limit of 15"),
    ],
    ids=["generation", "rank", "no number", "number"],
)
def test_a_lane_of_another_link_is_refused(
    transports: list[Transport],
    dial: Dial,  # noqa: F811 a fixture
    greeting: bytes,
    reason: str,
) -> None:
    endpoints = endpoints_of(transports, generation=2)
    assert refusal(dial(transports[0], greeting)) == reason
    connect((endpoints[0], endpoints[1]))
    for endpoint in endpoints:
        endpoint.close()


def test_a_second_lane_of_the_same_number_does_not_replace_the_first(
    transports: list[Transport],
    pair: Pair,
    dial: Dial,  # noqa: F811 a fixture
) -> None:
    zero, one = pair
    send_and_flush(one, 0, message(1000))
    assert receive(zero, 1, 1000) == message(1000)
    assert dial(transports[0], lane_hello()).recv(1) == b"", "it was closed"
    send_and_flush(one, 0, message(1000, seed=1))
    assert receive(zero, 1, 1000) == message(1000, seed=1)


# ---- authentication


def test_lanes_authenticate_like_links(closing: ExitStack) -> None:
    ends = closing.enter_context(authenticated_pair(KEY, KEY))
    for sender, receiver in ((0, 1), (1, 0)):
        for size in (1000, 100_003):
            send_and_flush(ends[sender], receiver, message(size))
            assert receive(ends[receiver], sender, size) == message(size)
        assert lane_bytes(ends[sender], receiver)[0] > 0


def test_a_lane_without_the_key_is_refused(closing: ExitStack, dial: Dial) -> None:  # noqa: F811 a fixture
    transports: list[Transport] = [
        closing.enter_context(TcpTransport(Address("127.0.0.1", 0), key=KEY)) for _ in range(2)
    ]
    zero, one = endpoints_of(transports)
    assert "this device wants links that prove themselves" in refusal(dial(transports[0], lane_hello()))
    send_and_flush(one, 0, message(1000))
    assert receive(zero, 1, 1000) == message(1000)
    impostor = TcpTransport(Address("127.0.0.1", 0), key=OTHER)
    other = closing.enter_context(impostor).endpoint(COMMUNICATOR, 1, 1, one.peers)
    with pytest.raises(PeerLost, match="could not prove that it belongs to this cluster"):
        send_and_flush(other, 0, message(1000))
