"""Messages that are delayed, duplicated, lost, reordered, or of another generation: none is taken for another.

Whatever is delivered, in whatever order, the receiver sees a beginning of what was sent, each message once and in its
place; then it waits, or names what is wrong. So no gradient is added twice, or in another's place.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator

import pytest
from exchange import receive
from ranks import COMMUNICATOR, soon

from hoop.errors import DeadlineExceeded, LinkCorrupted, MembershipChanged, PeerLost
from hoop.topology import Address
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.frames import FrameHeader, FrameKind

GENERATION = 3
MESSAGES = 6
PEER: list[Address] = []


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    made = TcpTransport(Address("127.0.0.1", 0))
    with made, TcpTransport(Address("127.0.0.1", 0)) as other:
        PEER.append(other.address)  # somebody is there, should the receiver ask
        yield made
        PEER.clear()


def frame(sequence: int, communicator: int, generation: int = GENERATION) -> bytes:
    payload = sequence.to_bytes(8, "little")
    return FrameHeader(FrameKind.DATA, communicator, generation, 1, sequence, len(payload)).pack() + payload


def schedule(draw: random.Random, communicator: int) -> list[bytes]:
    """What a network and a peer that was thought dead may make of some messages."""
    frames = [frame(sequence, communicator) for sequence in range(MESSAGES)]
    for _ in range(draw.randint(0, 3)):
        at, other = draw.randrange(len(frames)), draw.randrange(len(frames))
        match draw.choice(["duplicate", "lose", "swap", "delay", "stale", "stranger"]):
            case "duplicate":
                frames.insert(other, frames[at])
            case "lose" if len(frames) > 1:
                del frames[at]
            case "swap":
                frames[at], frames[other] = frames[other], frames[at]
            case "delay":
                frames.append(frames.pop(at))
            case "stale":
                frames.insert(at, frame(draw.randrange(MESSAGES), communicator, GENERATION - 1))
            case "stranger":
                frames.insert(at, frame(draw.randrange(MESSAGES), communicator + 1))
    return frames


def delivered(transport: TcpTransport, communicator: int, frames: list[bytes]) -> list[int]:
    """What a receiver takes of it."""
    peers = [transport.address, PEER[0]]
    endpoint = transport.endpoint(communicator, GENERATION, 0, peers)
    place = (transport.address.host, transport.address.port)
    taken: list[int] = []
    with socket.create_connection(place) as sock:
        hello = FrameHeader(FrameKind.HELLO, communicator, GENERATION, 1, 0, 0).pack()
        sock.sendall(hello + b"".join(frames))
        sock.shutdown(socket.SHUT_WR)
        try:
            while True:
                taken.append(int.from_bytes(receive(endpoint, 1, 8, soon(5)), "little"))
        except (LinkCorrupted, MembershipChanged, PeerLost):
            pass
        except DeadlineExceeded:
            pytest.fail("it waited for what will not come")
        finally:
            endpoint.close()
    return taken


def check(transport: TcpTransport, schedules: int) -> None:
    draw = random.Random(schedules)
    spoiled = 0
    for communicator in range(COMMUNICATOR, COMMUNICATOR + schedules):
        frames = schedule(draw, communicator)
        taken = delivered(transport, communicator, frames)
        assert taken == list(range(len(taken))), f"{communicator}: {taken}"
        whole = [frame(sequence, communicator) for sequence in range(MESSAGES)]
        assert (len(taken) == MESSAGES) == (frames[:MESSAGES] == whole), f"{communicator}: {taken}"
        spoiled += len(taken) < MESSAGES
    assert spoiled > schedules // 3, "most schedules were harmless"


def test_no_message_is_taken_twice_or_for_another(transport: TcpTransport) -> None:
    check(transport, 500)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_schedules(transport: TcpTransport) -> None:
    check(transport, 100_000)
