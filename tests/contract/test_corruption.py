"""A link that flips bits: every message still comes as it was sent, or an error names the link; never a wrong sum."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from exchange import receive, say
from ranks import COMMUNICATOR, LONG_S, Ranks, endpoints_of, soon

import hoop.transport.tcp_listener
from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.errors import DeadlineExceeded, LinkCorrupted, PeerLost
from hoop.topology import Address
from hoop.transport import Endpoint
from hoop.transport.fault_injection import FaultyLinks
from hoop.transport.registry import SCHEMES
from hoop.transport.tcp_endpoint import MAX_RETRANSMITS
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.frames import HEADER_BYTES

MIB = 1 << 20


class Flipper(FaultyLinks):
    """Flips the bits at chosen places, counted in bytes from when it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.at: list[int] = []
        """Bytes from now on, in order, of which a bit is flipped."""
        self.back = False
        """Whether in what comes back instead."""
        self.always = False

    def on_send(self, data: bytes) -> bytes:
        return data if self.back else self._through(data)

    def on_recv(self, data: bytes) -> bytes:
        return self._through(data) if self.back else data

    def _through(self, data: bytes) -> bytes:
        changed = bytearray(data)
        while self.at and self.at[0] < len(data):
            changed[self.at.pop(0)] ^= 1 << random.randrange(8)
            self.injected += 1
        self.at = [place - len(data) for place in self.at]
        if self.always and len(data) > 2 * HEADER_BYTES:
            changed[-1] ^= 1
            self.injected += 1
        return bytes(changed)


@pytest.fixture
def flipper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flipper]:
    monkeypatch.setattr(hoop.transport.tcp_listener, "REPLY_POLL_S", 0.001)
    found = Flipper()
    remove = found.install()
    yield found
    remove()


@pytest.fixture
def pair(flipper: Flipper) -> Iterator[tuple[Endpoint, Endpoint]]:
    with ExitStack() as opened:
        transports = [opened.enter_context(TcpTransport(Address("127.0.0.1", 0), checksums=True)) for _ in range(2)]
        yield tuple(endpoints_of(transports))  # type: ignore[misc]


def exchanged(pair: tuple[Endpoint, Endpoint], messages: list[bytes]) -> None:
    zero, one = pair
    for message in messages:
        one.send(0, memoryview(message), soon())
    for message in messages:
        assert receive(zero, 1, len(message)) == message


def tries(pair: tuple[Endpoint, Endpoint], flipper: Flipper, count: int, seed: int) -> None:
    """Bits anywhere: in headers, in payloads, in the HELLO of a connection that replaces another, in answers."""
    random.seed(seed)
    zero, one = pair
    exchanged(pair, [b"the first"])
    for index in range(count):
        messages = [random.randbytes(random.choice([0, 1, 8, 300, 5000])) for _ in range(random.randint(1, 4))]
        size = sum(HEADER_BYTES + len(message) for message in messages)
        flipper.back = index % 10 == 9
        before, damaged = flipper.injected, zero.messages_corrupted
        flipper.at = [random.randrange(HEADER_BYTES if flipper.back else size)]
        if index % 7 == 0:  # and in the HELLO that follows, or what comes after it
            flipper.at.append(size + random.randrange(2 * HEADER_BYTES))
        exchanged(pair, messages)
        one.flush(soon())
        if not flipper.back:
            assert flipper.injected > before, "the fault did not fire"
            assert zero.messages_corrupted > damaged, f"try {index}: a flipped bit went unnoticed"
        flipper.at = []
    assert one.messages_retransmitted >= count // 2


def test_a_flipped_bit_is_noticed_and_its_message_sent_again(pair: tuple[Endpoint, Endpoint], flipper: Flipper) -> None:
    tries(pair, flipper, 200, seed=1)


@pytest.mark.slow
def test_ten_thousand_flipped_bits(pair: tuple[Endpoint, Endpoint], flipper: Flipper) -> None:
    tries(pair, flipper, 10_000, seed=2)


def test_a_link_that_always_changes_bytes_is_given_up_and_named(
    pair: tuple[Endpoint, Endpoint], flipper: Flipper
) -> None:
    zero, one = pair
    exchanged(pair, [b"as it was"])
    flipper.always = True
    one.send(0, memoryview(bytes(500)), soon())
    link = f"link 1 -> 0 of communicator {COMMUNICATOR}"
    expected = f"{link}: message 1 of 500 bytes is not what was sent, {MAX_RETRANSMITS + 1} times"
    with pytest.raises(LinkCorrupted, match=expected):
        receive(zero, 1, 500)
    assert zero.messages_corrupted == MAX_RETRANSMITS + 1
    assert flipper.injected == MAX_RETRANSMITS + 1


def test_a_large_message_is_sent_again_while_its_sender_does_something_else(
    pair: tuple[Endpoint, Endpoint], flipper: Flipper
) -> None:
    """The sender has handed it over and is gone; what it sent is overwritten meanwhile."""
    zero, one = pair
    exchanged(pair, [b"the first"])
    data = bytearray(random.Random(3).randbytes(300_000))
    sent = bytes(data)
    flipper.at = [200_000]
    say(one, 0, data)  # type: ignore[arg-type]
    data[:] = bytes(len(data))
    assert receive(zero, 1, len(data)) == sent
    assert one.messages_retransmitted == 1


def test_the_last_message_of_an_endpoint_is_sent_again_before_it_closes(
    pair: tuple[Endpoint, Endpoint], flipper: Flipper
) -> None:
    zero, one = pair
    exchanged(pair, [b"the first"])
    flipper.at = [HEADER_BYTES + 3]
    say(one, 0, b"the last")
    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(receive, zero, 1, 8)
        one.close()
        assert received.result(LONG_S) == b"the last"


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "tree"])
def test_sums_stay_right_over_links_that_flip_bits(
    flipper: Flipper, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCHEMES, "tcp", partial(TcpTransport, checksums=True))
    count, rounds = 30_000, 5
    random.seed(4)
    with Ranks("tcp", 4) as ranks:
        for index in range(rounds):
            flipper.at = sorted(random.sample(range(count * 4), 3))

            def job(one: Communicator, index: int = index) -> tuple[float, float]:
                total = np.zeros(count, np.float32)
                source = np.full(count, one.rank + index, np.float32)
                one.run(Operation("all_reduce", count, algorithm=algorithm), source, total, LONG_S)
                return float(total.min()), float(total.max())

            assert ranks.run(job) == [(6 + 4 * index, 6 + 4 * index)] * 4
        damaged = sum(one.endpoint.messages_corrupted for one in ranks.communicators)
    assert flipper.injected >= rounds
    assert damaged >= rounds


# ---- other things that can be made to go wrong with a link


def test_a_connection_that_is_reset_in_the_middle_is_told_at_both_ends(
    pair: tuple[Endpoint, Endpoint], flipper: Flipper
) -> None:
    zero, one = pair
    exchanged(pair, [b"the first"])
    flipper.drops = 1
    with pytest.raises(PeerLost, match="rank 1: rank 0 at"):
        say(one, 0, bytes(5000))
    with pytest.raises(PeerLost, match="rank 0: rank 1 at"):
        receive(zero, 1, 5000)
    assert flipper.injected == 1


def test_a_partition_is_told_by_name(pair: tuple[Endpoint, Endpoint], flipper: Flipper) -> None:
    zero, one = pair
    exchanged(pair, [b"the first"])
    flipper.partitioned = True
    say(one, 0, b"never arrives")
    with pytest.raises(DeadlineExceeded, match="rank 0: waiting for rank 1 at"):
        receive(zero, 1, 13, soon(0.2))
