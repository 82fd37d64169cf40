"""A rank that leaves its process group at once is not reported as dead."""

from __future__ import annotations

import threading
import time

from hoop.topology import Address
from hoop.torch_backend.p2p import P2PEngine
from hoop.transport.tcp_listener import TcpTransport

LONG_S = 240.0


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
    deadline = time.monotonic() + LONG_S
    while (departed := stayer.first_departed(0.05)) is None:
        assert time.monotonic() < deadline, "rank 0 has not heard that rank 1 left"
    stayer.close()
    for transport in transports:
        transport.close()
    assert departed == (1, "has left the group")
