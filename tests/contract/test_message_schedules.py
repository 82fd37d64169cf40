"""Messages that are delayed, duplicated, lost, reordered or of another generation are never mistaken for others.

Whatever the order of delivery, the receiver accepts a prefix of the sent messages, each once and in order; then it
raises an error. So no gradient is added twice or in place of another.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest
from exchange import receive
from ranks import COMMUNICATOR, deadline_in

from hoop.errors import DeadlineExceeded, LinkCorrupted, MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.frames import FrameHeader, FrameKind

GENERATION = 3
MESSAGES = 6
PEER: list[Address] = []


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    receiver = TcpTransport(Address("127.0.0.1", 0))
    with receiver, TcpTransport(Address("127.0.0.1", 0)) as peer:
        PEER.append(peer.address)  # the receiver may dial its peer
        yield receiver
        PEER.clear()


def frame(sequence: int, communicator: int, generation: int = GENERATION) -> bytes:
    payload = sequence.to_bytes(8, "little")
    return FrameHeader(FrameKind.DATA, communicator, generation, 1, sequence, len(payload)).pack() + payload


def schedule(rng: random.Random, communicator: int) -> list[bytes]:
    """The frames after random faults of the network or of a peer that was declared dead."""
    frames = [frame(sequence, communicator) for sequence in range(MESSAGES)]
    for _ in range(rng.randint(0, 3)):
        index, other = rng.randrange(len(frames)), rng.randrange(len(frames))
        match rng.choice(["duplicate", "lose", "swap", "delay", "stale", "stranger"]):
            case "duplicate":
                frames.insert(other, frames[index])
            case "lose" if len(frames) > 1:
                del frames[index]
            case "swap":
                frames[index], frames[other] = frames[other], frames[index]
            case "delay":
                frames.append(frames.pop(index))
            case "stale":
                frames.insert(index, frame(rng.randrange(MESSAGES), communicator, GENERATION - 1))
            case "stranger":
                frames.insert(index, frame(rng.randrange(MESSAGES), communicator + 1))
    return frames


def deliver(transport: TcpTransport, communicator: int, frames: list[bytes]) -> list[int]:
    """Sends the frames to an endpoint and returns the messages that it accepts."""
    peers = [transport.address, PEER[0]]
    endpoint = transport.endpoint(communicator, GENERATION, 0, peers)
    address = (transport.address.host, transport.address.port)
    received: list[int] = []
    with socket.create_connection(address) as sock:
        hello = FrameHeader(FrameKind.HELLO, communicator, GENERATION, 1, 0, 0).pack()
        sock.sendall(hello + b"".join(frames))
        sock.shutdown(socket.SHUT_WR)
        try:
            while True:
                received.append(int.from_bytes(receive(endpoint, 1, 8, deadline_in()), "little"))
        except (LinkCorrupted, MembershipChanged, PeerLost):
            pass
        except DeadlineExceeded:
            pytest.fail("it waited for what will not come")
        finally:
            endpoint.close()
    return received


def check(transport: TcpTransport, schedules: int) -> None:
    rng = random.Random(schedules)
    incomplete = 0
    for communicator in range(COMMUNICATOR, COMMUNICATOR + schedules):
        frames = schedule(rng, communicator)
        received = deliver(transport, communicator, frames)
        assert received == list(range(len(received))), f"{communicator}: {received}"
        intact = [frame(sequence, communicator) for sequence in range(MESSAGES)]
        assert (len(received) == MESSAGES) == (frames[:MESSAGES] == intact), f"{communicator}: {received}"
        incomplete += len(received) < MESSAGES
    assert incomplete > schedules // 3, "most schedules were harmless"


def test_messages_are_received_once_and_in_order(transport: TcpTransport) -> None:
    check(transport, 500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_schedules(transport: TcpTransport) -> None:
    check(transport, 100_000)
