"""The cost of checksums: all-reduce of two ranks over loopback, without and with them, in CPU time.

    python benchmarks/tcp/checksums.py

Loopback has no wire to wait for, so this is an upper bound of the cost: both ranks and the kernel share the processor.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.topology import Address
from hoop.transport.tcp_listener import TcpTransport

ROUNDS = {4: 600, 437544: 150, 4 << 20: 40, 64 << 20: 6}
"""The number of measurements of each size."""


def measure(checksums: bool) -> dict[int, float]:
    """Median CPU seconds of one rank, by bytes."""
    mine, other = socket.socketpair()
    child = os.fork()
    rank, wire = (0, mine) if child else (1, other)
    with TcpTransport(Address("127.0.0.1", 0), checksums=checksums) as transport:
        wire.sendall(f"{transport.address}\n".encode())
        peer = Address.parse(wire.makefile().readline().strip())
        peers = [transport.address, peer] if rank == 0 else [peer, transport.address]
        communicator = Communicator(transport.endpoint(7, 1, rank, peers))
        found = {size: _median(communicator, size) for size in ROUNDS}
        communicator.close()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    mine.close()
    other.close()
    return found


def _median(communicator: Communicator, size: int) -> float:
    count = size // 4
    source, total = np.ones(count, np.float32), np.zeros(count, np.float32)
    operation = Operation("all_reduce", count)
    times = []
    for _ in range(ROUNDS[size]):
        began = time.process_time()
        communicator.run(operation, source, total, 60)
        times.append(time.process_time() - began)
    return statistics.median(times[len(times) // 10 :])


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()
    plain, checked = measure(False), measure(True)
    print("| bytes | without, us | with, us | ratio |")
    print("|---|---|---|---|")
    for size in ROUNDS:
        ratio = checked[size] / plain[size]
        print(f"| {size} | {plain[size] * 1e6:.0f} | {checked[size] * 1e6:.0f} | {ratio:.2f}x |")


if __name__ == "__main__":
    main()
