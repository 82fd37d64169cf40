"""A rank that leaves its process group at once is not reported as dead, and its peers know who died before it left."""

from __future__ import annotations

import threading
import time

import pytest

from hoop.topology import Address
from hoop.torch_backend import p2p
from hoop.torch_backend.p2p import P2PEngine
from hoop.transport.tcp_listener import TcpTransport

LONG_S = 240.0
DIED = "is gone: its process ended without leaving the group"


class LeapingClock:
    """The monotonic clock of a process that is frozen for a minute whenever ``frozen`` is set."""

    def __init__(self) -> None:
        self._leap_s = 0.0
        self.frozen = threading.Event()

    def monotonic(self) -> float:
        if self.frozen.is_set():
            self.frozen.clear()
            self._leap_s += 60.0
        return time.monotonic() + self._leap_s


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen meanwhile"])
def test_a_rank_leaves_only_after_the_hello_of_every_peer(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LeapingClock()
    monkeypatch.setattr(p2p, "time", clock)
    transports = [TcpTransport(Address("127.0.0.1", 0)) for _ in range(2)]
    addresses = [transport.address for transport in transports]

    endpoints = [transports[rank].endpoint(7, 1, rank, addresses) for rank in range(2)]
    order: list[str] = []
    leaver = P2PEngine(endpoints[1], "rank 1", LONG_S)
    leaver.start()

    def leave() -> None:
        leaver.close()
        order.append("rank 1 left")

    leaving = threading.Thread(target=leave)
    leaving.start()
    leaving.join(0.5)  # a close that does not wait would end here
    if frozen:
        clock.frozen.set()
        endpoints[1].wake()
        leaving.join(1.0)  # a close that takes the freeze for its wait would end here
    stayer = P2PEngine(endpoints[0], "rank 0", LONG_S)
    order.append("rank 0 started")
    stayer.start()
    leaving.join(LONG_S)
    assert order == ["rank 0 started", "rank 1 left"]
    departed = stayer.first_departed(1, LONG_S)
    stayer.close()
    for transport in transports:
        transport.close()
    assert departed == (1, "has left the group")


def test_a_rank_that_leaves_has_told_who_died() -> None:
    """Rank 2 died, and only rank 0 can see that: rank 2's link to rank 1 is still open. Then rank 0 leaves."""
    transports = [TcpTransport(Address("127.0.0.1", 0)) for _ in range(4)]
    addresses = [transport.address for transport in transports]
    leaver = P2PEngine(transports[0].endpoint(7, 1, 0, addresses[:3]), "rank 0", LONG_S)
    stayer = P2PEngine(transports[1].endpoint(7, 1, 1, [*addresses[:2], addresses[3]]), "rank 1", LONG_S)
    dying = transports[2].endpoint(7, 1, 2, addresses[:3])
    open_link = transports[3].endpoint(7, 1, 2, [*addresses[:2], addresses[3]])
    leaver.start()
    stayer.start()
    hello = memoryview(bytes(24))
    for endpoint, peer in ((dying, 0), (open_link, 1)):
        endpoint.send(peer, hello, time.monotonic() + LONG_S)
    dying.close()
    assert leaver.first_departed(2, LONG_S) == (2, DIED)
    leaver.close()
    assert stayer.first_departed(0, LONG_S) == (2, DIED)
    stayer.close()
    for transport in transports:
        transport.close()
