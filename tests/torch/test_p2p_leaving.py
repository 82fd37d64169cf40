"""A rank that leaves its process group at once is not reported as dead, and its peers know who died before it left."""

from __future__ import annotations

import threading
import time

from hoop.topology import Address
from hoop.torch_backend.p2p import P2PEngine
from hoop.transport.tcp_listener import TcpTransport

LONG_S = 240.0
DIED = "is gone: its process ended without leaving the group"


def test_a_rank_leaves_only_after_the_hello_of_every_peer() -> None:
    transports = [TcpTransport(Address("127.0.0.1", 0)) for _ in range(2)]
    addresses = [transport.address for transport in transports]

    def engine(rank: int) -> P2PEngine:
        return P2PEngine(transports[rank].endpoint(7, 1, rank, addresses), f"rank {rank}", LONG_S)

    order: list[str] = []
    leaver = engine(1)
    leaver.start()

    def leave() -> None:
        leaver.close()
        order.append("rank 1 left")

    leaving = threading.Thread(target=leave)
    leaving.start()
    leaving.join(0.5)  # a close that does not wait would end here
    stayer = engine(0)
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
