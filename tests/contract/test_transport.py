"""Behaviour that every transport must have."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest
from exchange import Pair, Waiter, connect, receive, send_and_flush, wait_until_running
from ranks import COMMUNICATOR, LONG_S, NUMPY, PROMPT_S, URIS, deadline_in, endpoints_of

from hoop.errors import (
    DeadlineExceeded,
    HoopError,
    InvalidArgument,
    LinkCorrupted,
    MembershipChanged,
    PeerLost,
)
from hoop.transport import Endpoint, Transport, open_transport
from hoop.transport.registry import SCHEMES

MIB = 1 << 20
SIZES = (0, 1, 2, 63, 64, 65, 4096, 65_537, 0, 3 * MIB + 1, 1)


def message(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng((size, seed)).bytes(size)


def test_every_scheme_is_tested() -> None:
    assert set(URIS) - {NUMPY} == set(SCHEMES), "enter a new transport in URIS of tests/contract/ranks.py"


def test_an_unknown_scheme_is_rejected_and_the_known_ones_are_named() -> None:
    with pytest.raises(
        InvalidArgument, match=rf"'pigeon://roof:1' has no known scheme; known: {', '.join(sorted(SCHEMES))}"
    ):
        open_transport("pigeon://roof:1")
    with pytest.raises(InvalidArgument, match=r"'nowhere' is not host:port"):
        open_transport("tcp://nowhere")


def test_port_0_selects_a_free_port(transports: list[Transport], scheme: str) -> None:
    first, second = transports
    assert first.scheme == second.scheme == ("shm" if scheme == NUMPY else scheme)
    assert first.address != second.address
    assert first.address.port != 0


def test_messages_arrive_in_order_and_whole(pair: Pair) -> None:
    zero, one = pair
    with ThreadPoolExecutor(1) as thread:
        for size in SIZES:
            thread.submit(send_and_flush, one, 0, message(size))
        for size in SIZES:
            assert receive(zero, 1, size) == message(size), f"{size} bytes"


def test_both_directions_are_independent(pair: Pair) -> None:
    zero, one = pair

    def exchange(mine: Endpoint, peer: int) -> list[bytes]:
        for size in SIZES:
            mine.send(peer, memoryview(message(size, mine.rank)), deadline_in())
        received = [receive(mine, peer, size) for size in SIZES]
        mine.flush(deadline_in())
        return received

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(exchange, one, 0)
        assert exchange(zero, 1) == [message(size, 1) for size in SIZES]
        assert other.result(LONG_S) == [message(size, 0) for size in SIZES]


def test_elements_of_any_type_travel_as_bytes(pair: Pair) -> None:
    zero, one = pair
    values, into = np.arange(100, dtype=np.float64), np.zeros(100)
    one.send(0, values.data, deadline_in())
    zero.recv_into(1, into.data, deadline_in())
    assert into.tobytes() == values.tobytes()
    one.send(0, values[:0].data, deadline_in())
    zero.recv_into(1, into[:0].data, deadline_in())
    assert one.bytes_sent == values.nbytes


def test_send_never_waits_for_the_receiver(pair: Pair) -> None:
    """One thread sends 32 MiB each way before any receive: a send that waited would deadlock."""
    zero, one = pair
    messages = [message(32 * MIB, rank) for rank in range(2)]
    zero.send(1, memoryview(messages[0]), deadline_in())
    one.send(0, memoryview(messages[1]), deadline_in())

    def receive_and_flush(mine: Endpoint, peer: int) -> bytes:
        received = receive(mine, peer, 32 * MIB)
        mine.flush(deadline_in())
        return received

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(receive_and_flush, one, 0)
        assert receive_and_flush(zero, 1) == messages[1]
        assert other.result(LONG_S) == messages[0]


def test_after_detach_the_sender_may_overwrite(pair: Pair) -> None:
    zero, one = pair
    buffers = [bytearray(message(16 * MIB, seed)) for seed in range(3)]
    expected = [bytes(buffer) for buffer in buffers]
    for buffer in buffers:
        if (pending := zero.send(1, memoryview(buffer), deadline_in())) is not None:
            assert not pending.done
            pending.detach()
            pending.detach()  # the second call has nothing to copy
        buffer[:] = bytes(len(buffer))
    with ThreadPoolExecutor(1) as thread:
        flushed = thread.submit(zero.flush, deadline_in())
        for index, want in enumerate(expected):
            assert receive(one, 0, 16 * MIB) == want, f"message {index}"
        flushed.result(LONG_S)


def test_a_pending_send_reports_when_it_is_done(pair: Pair) -> None:
    zero, one = pair
    pending = zero.send(1, memoryview(message(16 * MIB)), deadline_in())
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(receive, one, 0, 16 * MIB)
        zero.flush(deadline_in())
        assert pending is None or pending.done
        assert other.result(LONG_S) == message(16 * MIB)


@pytest.mark.parametrize("expected", [0, 7, 9], ids="expected {}".format)
def test_a_wrong_length_is_refused_and_named(pair: Pair, expected: int) -> None:
    zero, one = pair
    send_and_flush(one, 0, b"12345678")
    # "rank 0: rank 1 at …" or "link 1 -> 0 of …"
    with pytest.raises(LinkCorrupted, match=rf"(rank|link) 1 .*\b8 bytes.* expected {expected}\b"):
        receive(zero, 1, expected)


def test_a_message_to_its_own_rank_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidArgument, match="rank 0: a rank cannot send a message to itself"):
        pair[0].send(0, memoryview(b"me"), deadline_in())


@pytest.mark.parametrize("connected", [False, True], ids=["before the first message", "between messages"])
def test_a_deadline_passes_and_the_peer_is_named(pair: Pair, connected: bool) -> None:
    zero, one = pair
    if connected:
        connect(pair)
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=rf"rank 0: waiting for rank 1 at {one.peers[1]}"):
        receive(zero, 1, 8, deadline_in(0.05))
    assert 0.04 < time.monotonic() - started < PROMPT_S


def test_an_expired_deadline_does_not_lose_a_message_that_has_arrived(pair: Pair) -> None:
    zero, one = pair
    connect(pair)
    send_and_flush(one, 0, b"in time")
    send_and_flush(one, 0, b"as well")
    assert receive(zero, 1, 7) == b"in time"
    assert receive(zero, 1, 7, time.monotonic() - 1) == b"as well"


def test_wait_readable_reports_messages_and_lost_peers(transports: list[Transport]) -> None:
    """For a lost peer, ``recv_into`` then raises the error."""
    zero, one = endpoints_of(transports)
    connect((zero, one))
    assert zero.wait_readable([1], deadline_in(0.01)) == []
    send_and_flush(one, 0, b"first")
    assert zero.wait_readable([1], deadline_in()) == [1]
    assert zero.wait_readable([1], deadline_in()) == [1], "it is still there"
    assert receive(zero, 1, 5) == b"first"
    one.close()
    assert zero.wait_readable([1], deadline_in()) == [1]
    with pytest.raises(PeerLost, match="rank 1"):
        receive(zero, 1, 5)
    zero.close()


def test_a_message_from_any_peer_or_a_lost_peer_ends_wait_readable(scheme: str) -> None:
    with ExitStack() as opened:
        transports = [opened.enter_context(open_transport(URIS[scheme])) for _ in range(4)]
        zero, *others = endpoints_of(transports)
        for other in others:
            send_and_flush(other, 0, b"!")
            receive(zero, other.rank, 1)
            send_and_flush(zero, other.rank, b"!")
            receive(other, 0, 1)
        with ThreadPoolExecutor(1) as thread:
            for sender in (others[1], others[0], others[2]):
                waiting = thread.submit(zero.wait_readable, [1, 2, 3], deadline_in())
                wait_until_running(waiting)
                send_and_flush(sender, 0, b"word")
                assert waiting.result(PROMPT_S) == [sender.rank]
                assert receive(zero, sender.rank, 4) == b"word"
            waiting = thread.submit(zero.wait_readable, [1, 2, 3], deadline_in())
            wait_until_running(waiting)
            others[1].close()
            assert waiting.result(PROMPT_S) == [2]
            with pytest.raises(PeerLost, match="rank 2"):
                receive(zero, 2, 1)
            send_and_flush(others[2], 0, b"still here")
            assert zero.wait_readable([1, 3], deadline_in()) == [3]
            assert receive(zero, 3, 10) == b"still here"
        for endpoint in (zero, *others):
            endpoint.close()


def test_pending_messages_progress_during_wait_readable(pair: Pair) -> None:
    """Both send more than a link holds before they receive: wait_readable must send the rest."""
    large = message(16 * MIB)

    def swap(mine: Endpoint, peer: int) -> bytes:
        mine.send(peer, memoryview(large), deadline_in())
        while not mine.wait_readable([peer], deadline_in()):
            pass
        received = receive(mine, peer, len(large))
        mine.send(peer, memoryview(b"done"), deadline_in())
        while not mine.wait_readable([peer], deadline_in()):
            pass
        return received + receive(mine, peer, 4)

    zero, one = pair
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(swap, one, 0)
        assert swap(zero, 1) == large + b"done"
        assert other.result(LONG_S) == large + b"done"


def test_wait_readable_reports_a_lost_peer_with_pending_messages(transports: list[Transport]) -> None:
    zero, one = endpoints_of(transports)
    connect((zero, one))
    pending = zero.send(1, memoryview(message(16 * MIB)), deadline_in())
    if pending is None:
        pytest.skip("this transport takes everything at once")
    one.close()
    deadline = deadline_in(PROMPT_S)
    while not (lost := zero.wait_readable([], deadline)):
        assert time.monotonic() < deadline, "no peer was reported"
    assert lost == [1]
    with pytest.raises(PeerLost, match="rank 1"):
        receive(zero, 1, 1)
    zero.close()


def test_a_wake_before_the_wait_is_not_lost(pair: Pair) -> None:
    zero, one = pair
    zero.wake()
    connect(pair)
    assert zero.wait_readable([1], deadline_in()) == []
    send_and_flush(one, 0, b"news")
    assert zero.wait_readable([1], deadline_in()) == [1]
    assert receive(zero, 1, 4) == b"news"


def test_wake_ends_wait_readable(pair: Pair) -> None:
    zero, _ = pair
    for connected in (False, True):
        if connected:
            connect(pair)
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(zero.wait_readable, [1], deadline_in())
            wait_until_running(waiting)
            zero.wake()
            assert waiting.result(PROMPT_S) == []


@pytest.mark.parametrize("connected", [False, True], ids=["before the first message", "between messages"])
def test_abort_wakes_a_waiting_thread(transports: list[Transport], connected: bool) -> None:
    """Repeated, because the abort may come before, during or after the start of the wait."""
    for generation in range(1, 21):
        zero, one = endpoints_of(transports, generation=generation)
        if connected:
            connect((zero, one))
        waiter = Waiter(zero, peer=1)
        reason = MembershipChanged(f"generation {generation + 1} begins")
        zero.abort(reason)
        assert waiter.error() is reason
        one.close()
        zero.close()


def test_after_an_abort_every_call_raises_its_error(pair: Pair) -> None:
    zero, _ = pair
    connect(pair)
    reason = MembershipChanged("generation 2 begins")
    zero.abort(reason)
    zero.abort(PeerLost("an afterthought"))  # the first reason stays
    for call in (
        lambda: zero.send(1, memoryview(b"late"), deadline_in()),
        lambda: receive(zero, 1, 1),
        lambda: zero.flush(deadline_in()),
    ):
        with pytest.raises(HoopError) as raised:
            call()
        assert raised.value is reason


def test_a_rank_that_does_not_use_its_links_sees_that_a_peer_is_lost(pair: Pair) -> None:
    zero, one = pair
    connect(pair)
    zero.raise_failure()
    send_and_flush(one, 0, b"not a failure")
    zero.raise_failure()
    assert receive(zero, 1, 13) == b"not a failure"
    one.close()

    def look_until(deadline: float) -> None:
        while time.monotonic() < deadline:
            zero.raise_failure()

    with pytest.raises(PeerLost, match="rank 0: rank 1 at "):
        look_until(deadline_in())


def test_an_abort_is_the_failure_that_is_raised(pair: Pair) -> None:
    reason = MembershipChanged("generation 2 begins")
    pair[0].abort(reason)
    with pytest.raises(MembershipChanged) as raised:
        pair[0].raise_failure()
    assert raised.value is reason


def test_close_wakes_a_waiting_thread(transports: list[Transport]) -> None:
    for generation in range(1, 51):
        zero, one = endpoints_of(transports, generation=generation)
        connect((zero, one))
        waiter = Waiter(zero, peer=1)
        zero.close()
        error = waiter.error()
        assert isinstance(error, PeerLost), repr(error)
        assert "rank 0: this endpoint is closed" in str(error)
        one.close()


def test_an_endpoint_can_be_closed_twice(pair: Pair) -> None:
    connect(pair)
    pair[0].close()
    pair[0].close()
    with pytest.raises(PeerLost, match="rank 0: this endpoint is closed"):
        pair[0].send(1, memoryview(b"late"), deadline_in())


def test_a_peer_that_closes_is_lost_and_named(pair: Pair) -> None:
    zero, one = pair
    connect(pair)
    waiter = Waiter(zero, peer=1)
    one.close()
    error = waiter.error()
    assert isinstance(error, PeerLost), repr(error)
    assert f"rank 0: rank 1 at {one.peers[1]} " in str(error)


def test_a_peer_that_closes_before_its_first_message_is_lost(pair: Pair) -> None:
    zero, one = pair
    waiter = Waiter(zero, peer=1)
    one.close()
    error = waiter.error()
    assert isinstance(error, PeerLost), repr(error)
    assert "rank 1" in str(error)


def test_a_peer_that_closed_before_the_first_send_is_lost(pair: Pair) -> None:
    """The send may still succeed or fail at once; the receive must not wait for its deadline."""
    zero, one = pair
    one.close()

    def ask() -> None:
        zero.send(1, memoryview(b"anyone there?"), deadline_in())
        receive(zero, 1, 8)

    with pytest.raises((PeerLost, MembershipChanged), match=r"rank 0: rank 1 at"):
        ask()


def test_closing_an_endpoint_and_its_transport_wakes_the_peer(transports: list[Transport], pair: Pair) -> None:
    zero, one = pair
    connect(pair)
    waiter = Waiter(zero, peer=1)
    one.close()
    transports[1].close()
    error = waiter.error()
    assert isinstance(error, PeerLost), repr(error)
    assert "rank 1" in str(error)


def test_closing_a_transport_closes_its_endpoints(transports: list[Transport], pair: Pair) -> None:
    zero, one = pair
    connect(pair)
    transports[1].close()
    with pytest.raises(PeerLost, match="rank 0: rank 1 at"):
        receive(zero, 1, 8)
    with pytest.raises(PeerLost, match="rank 1: this endpoint is closed"):
        receive(one, 0, 8)


def test_messages_flushed_before_close_arrive(transports: list[Transport]) -> None:
    """Also if the close follows at once, before the receiver has accepted the link."""
    for generation in range(1, 51):
        zero, one = endpoints_of(transports, generation=generation)
        send_and_flush(zero, 1, b"ping")
        send_and_flush(one, 0, b"last words")
        assert receive(one, 0, 4) == b"ping"
        one.close()
        assert receive(zero, 1, 10) == b"last words", f"attempt {generation}"
        with pytest.raises(PeerLost, match="rank 1"):
            receive(zero, 1, 1)
        zero.close()


def test_communicators_do_not_mix(transports: list[Transport]) -> None:
    pairs = {number: endpoints_of(transports, communicator=number) for number in (1, 2, 1 << 60)}
    for number, (zero, _) in pairs.items():
        send_and_flush(zero, 1, b"from %20d" % number)
    for number, (_, one) in reversed(pairs.items()):
        assert receive(one, 0, 25) == b"from %20d" % number
    assert {zero.messages_sent for zero, _ in pairs.values()} == {1}
    pairs[1][0].close()
    send_and_flush(pairs[2][0], 1, b"still here")
    assert receive(pairs[2][1], 0, 10) == b"still here"
    for pair in pairs.values():
        for endpoint in pair:
            endpoint.close()


def test_generations_do_not_mix(transports: list[Transport]) -> None:
    """A message of an old generation does not reach the next generation of the same communicator."""
    old = endpoints_of(transports, generation=3)
    new = endpoints_of(transports, generation=4)
    send_and_flush(old[0], 1, b"the old")
    send_and_flush(new[0], 1, b"the new")
    assert receive(new[1], 0, 7) == b"the new"
    old[0].close()
    old[1].close()
    send_and_flush(new[1], 0, b"and back")
    assert receive(new[0], 1, 8) == b"and back"
    new[0].close()
    new[1].close()


def test_a_rank_has_one_endpoint(transports: list[Transport], pair: Pair) -> None:
    with pytest.raises(InvalidArgument, match=rf"communicator {COMMUNICATOR}, generation 1: rank 0 has an end"):
        transports[0].endpoint(COMMUNICATOR, 1, 0, pair[0].peers)


def test_messages_and_bytes_are_counted(pair: Pair) -> None:
    zero, one = pair
    assert (zero.messages_sent, zero.bytes_sent) == (0, 0)
    for index, size in enumerate((0, 10, 1000)):
        send_and_flush(zero, 1, message(size))
        receive(one, 0, size)
        assert zero.messages_sent == index + 1
    assert zero.bytes_sent == 1010
    assert (one.messages_sent, one.bytes_sent) == (0, 0)


def test_endpoint_attributes(pair: Pair, transports: list[Transport]) -> None:
    for rank, endpoint in enumerate(pair):
        assert (endpoint.communicator, endpoint.generation, endpoint.rank) == (COMMUNICATOR, 1, rank)
        assert endpoint.size == 2
        assert endpoint.peers == tuple(transport.address for transport in transports)
