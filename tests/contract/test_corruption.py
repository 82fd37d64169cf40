"""A link that flips bits: every message arrives as sent, or an error names the link; no sum is ever wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from exchange import receive, send_and_flush
from ranks import COMMUNICATOR, LONG_S, Ranks, deadline_in, endpoints_of

import hoop.transport.tcp_endpoint
import hoop.transport.tcp_listener
from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.errors import DeadlineExceeded, LinkCorrupted, PeerLost
from hoop.topology import Address
from hoop.transport import Endpoint
from hoop.transport.fault_injection import FaultyLinks
from hoop.transport.registry import SCHEMES
from hoop.transport.tcp_endpoint import MAX_RETRANSMITS, TcpEndpoint
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.frames import HEADER_BYTES

MIB = 1 << 20


class BitFlipper(FaultyLinks):
    """Flips one bit in each chosen byte of the stream; offsets count from the moment they are set."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: list[int] = []
        """Offsets of the bytes to change, in ascending order."""
        self.flip_received = False
        """Whether to change received bytes instead of sent ones."""
        self.always = False

    def on_send(self, data: bytes) -> bytes:
        return data if self.flip_received else self._flip(data)

    def on_recv(self, data: bytes) -> bytes:
        return self._flip(data) if self.flip_received else data

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        while self.offsets and self.offsets[0] < len(data):
            changed[self.offsets.pop(0)] ^= 1 << random.randrange(8)
            self.injected += 1
        self.offsets = [offset - len(data) for offset in self.offsets]
        if self.always and len(data) > 2 * HEADER_BYTES:
            changed[-1] ^= 1
            self.injected += 1
        return bytes(changed)


@pytest.fixture
def flipper(monkeypatch: pytest.MonkeyPatch) -> Iterator[BitFlipper]:
    monkeypatch.setattr(hoop.transport.tcp_listener, "REPLY_POLL_S", 0.001)
    links = BitFlipper()
    remove = links.install()
    yield links
    remove()


@pytest.fixture
def pair(flipper: BitFlipper) -> Iterator[tuple[Endpoint, Endpoint]]:
    with ExitStack() as opened:
        transports = [opened.enter_context(TcpTransport(Address("127.0.0.1", 0), checksums=True)) for _ in range(2)]
        yield tuple(endpoints_of(transports))  # type: ignore[misc]


def send_and_check(pair: tuple[Endpoint, Endpoint], messages: list[bytes]) -> None:
    zero, one = pair
    for message in messages:
        one.send(0, memoryview(message), deadline_in())
    for message in messages:
        assert receive(zero, 1, len(message)) == message


def flip_bits(pair: tuple[Endpoint, Endpoint], flipper: BitFlipper, count: int, seed: int) -> None:
    """Flips bits anywhere: in headers, payloads, answers, and the HELLO of a replacement connection."""
    random.seed(seed)
    zero, one = pair
    send_and_check(pair, [b"the first"])
    for index in range(count):
        messages = [random.randbytes(random.choice([0, 1, 8, 300, 5000])) for _ in range(random.randint(1, 4))]
        size = sum(HEADER_BYTES + len(message) for message in messages)
        flipper.flip_received = index % 10 == 9
        before, corrupted = flipper.injected, zero.messages_corrupted
        flipper.offsets = [random.randrange(HEADER_BYTES if flipper.flip_received else size)]
        if index % 7 == 0:  # also in the HELLO of the new connection, or after it
            flipper.offsets.append(size + random.randrange(2 * HEADER_BYTES))
        send_and_check(pair, messages)
        one.flush(deadline_in())
        if not flipper.flip_received:
            assert flipper.injected > before, "the fault did not fire"
            assert zero.messages_corrupted > corrupted, f"try {index}: a flipped bit went unnoticed"
        flipper.offsets = []
    assert one.messages_retransmitted >= count // 2


def test_a_flipped_bit_is_detected_and_the_message_retransmitted(
    pair: tuple[Endpoint, Endpoint], flipper: BitFlipper
) -> None:
    flip_bits(pair, flipper, 200, seed=1)


@pytest.mark.slow
def test_ten_thousand_flipped_bits(pair: tuple[Endpoint, Endpoint], flipper: BitFlipper) -> None:
    flip_bits(pair, flipper, 10_000, seed=2)


def test_a_link_that_corrupts_every_message_fails_and_is_named(
    pair: tuple[Endpoint, Endpoint], flipper: BitFlipper
) -> None:
    zero, one = pair
    send_and_check(pair, [b"as it was"])
    flipper.always = True
    one.send(0, memoryview(bytes(500)), deadline_in())
    link = f"link 1 -> 0 of communicator {COMMUNICATOR}"
    expected = f"{link}: message 1 of 500 bytes is not what was sent, {MAX_RETRANSMITS + 1} times"
    with pytest.raises(LinkCorrupted, match=expected):
        receive(zero, 1, 500)
    assert zero.messages_corrupted == MAX_RETRANSMITS + 1
    assert flipper.injected == MAX_RETRANSMITS + 1


def test_a_large_message_is_retransmitted_after_its_buffer_was_overwritten(
    pair: tuple[Endpoint, Endpoint], flipper: BitFlipper
) -> None:
    """``flush`` has returned, so the sender may reuse its buffer."""
    zero, one = pair
    send_and_check(pair, [b"the first"])
    data = bytearray(random.Random(3).randbytes(300_000))
    sent = bytes(data)
    flipper.offsets = [200_000]
    send_and_flush(one, 0, data)  # type: ignore[arg-type]
    data[:] = bytes(len(data))
    assert receive(zero, 1, len(data)) == sent
    assert one.messages_retransmitted == 1


@pytest.fixture
def long_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closing endpoint waits for a receiver that gets no processor time for a while."""
    monkeypatch.setattr(hoop.transport.tcp_endpoint, "LINGER_S", LONG_S)


@pytest.mark.usefixtures("long_linger")
def test_close_retransmits_a_corrupted_last_message(pair: tuple[Endpoint, Endpoint], flipper: BitFlipper) -> None:
    zero, one = pair
    send_and_check(pair, [b"the first"])
    flipper.offsets = [HEADER_BYTES + 3]
    send_and_flush(one, 0, b"the last")
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(receive, zero, 1, 8)
        one.close()
        assert received.result(LONG_S) == b"the last"


@pytest.mark.usefixtures("long_linger")
def test_close_retransmits_while_the_listener_handles_replies(
    pair: tuple[Endpoint, Endpoint], flipper: BitFlipper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``close`` once took the listener's thread for one that waits in a collective, and did not wait for the
    acknowledgement."""
    zero, one = pair
    assert isinstance(one, TcpEndpoint)
    send_and_check(pair, [b"the first"])
    flipper.offsets = [HEADER_BYTES + 3]
    send_and_flush(one, 0, b"the last")
    handling, go_on = threading.Event(), threading.Event()
    handle_replies = one._handle_replies

    def handle_slowly() -> float:
        handling.set()
        assert go_on.wait(LONG_S)
        return handle_replies()

    monkeypatch.setattr(one, "_handle_replies", handle_slowly)
    monkeypatch.setattr(one, "_on_close", lambda endpoint: threading.Timer(0.1, go_on.set).start())
    assert handling.wait(LONG_S), "the listener's thread did not read the replies"
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(receive, zero, 1, 8)
        one.close()
        assert received.result(LONG_S) == b"the last"


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "tree"])
def test_all_reduce_is_correct_over_links_that_flip_bits(
    flipper: BitFlipper, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEMES, "tcp", partial(TcpTransport, checksums=True))
    count, rounds = 30_000, 5
    random.seed(4)
    with Ranks("tcp", 4) as ranks:
        for index in range(rounds):
            flipper.offsets = sorted(random.sample(range(count * 4), 3))

            def worker(comm: Communicator, index: int = index) -> tuple[float, float]:
                total = np.zeros(count, np.float32)
                source = np.full(count, comm.rank + index, np.float32)
                comm.run(Operation("all_reduce", count, algorithm=algorithm), source, total, LONG_S)
                return float(total.min()), float(total.max())

            assert ranks.run(worker) == [(6 + 4 * index, 6 + 4 * index)] * 4
        corrupted = sum(comm.endpoint.messages_corrupted for comm in ranks.communicators)
    assert flipper.injected >= rounds
    assert corrupted >= rounds


# ---- other injected link faults


def test_a_reset_connection_raises_peer_lost_at_both_ends(pair: tuple[Endpoint, Endpoint], flipper: BitFlipper) -> None:
    zero, one = pair
    send_and_check(pair, [b"the first"])
    flipper.drops = 1
    with pytest.raises(PeerLost, match="rank 1: rank 0 at"):
        send_and_flush(one, 0, bytes(5000))
    with pytest.raises(PeerLost, match="rank 0: rank 1 at"):
        receive(zero, 1, 5000)
    assert flipper.injected == 1


def test_a_partition_raises_an_error_that_names_the_peer(pair: tuple[Endpoint, Endpoint], flipper: BitFlipper) -> None:
    zero, one = pair
    send_and_check(pair, [b"the first"])
    flipper.partitioned = True
    send_and_flush(one, 0, b"never arrives")
    with pytest.raises(DeadlineExceeded, match="rank 0: waiting for rank 1 at"):
        receive(zero, 1, 13, deadline_in(0.2))
