"""A stress test of memory ordering in shared memory: does a rank ever read stale data after a barrier?

    python -m hoop.lab.bench.ordering --ranks 2 --seconds 60

In each round every rank fills its stage with the number of the round, enters a barrier, and reads the stages of all
ranks. Every word must hold that number; a word with an older number is a stale read. On ARM, "write the data, then set
a flag" without a fence causes stale reads. ``--unordered`` publishes with such a flag instead of a barrier, and sets it
halfway through the data so that it fails on any machine: it shows that the test can fail.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import dataclass

import numpy as np

from hoop.errors import HoopError
from hoop.topology import Address
from hoop.transport.base import SharedEndpoint
from hoop.transport.shm_listener import ShmTransport

WORDS = 4096
TIMEOUT_S = 60.0


@dataclass
class OrderingFindings:
    """Counts of one rank."""

    rounds: int = 0
    words: int = 0
    stale: int = 0


def stress(endpoint: SharedEndpoint, seconds: float, unordered: bool = False) -> OrderingFindings:
    """Run rounds for ``seconds`` (if ``unordered``: 2000 rounds). Rank 0 decides, so all ranks stop at one round."""
    findings = OrderingFindings()
    endpoint.wait_for_peers(time.monotonic() + TIMEOUT_S)
    stages = [
        [segment.staging_buffers[parity].view(np.uint64)[:WORDS] for parity in (0, 1)] for segment in endpoint.segments
    ]
    flags = [segment.control_words[0][4:5] for segment in endpoint.segments]
    deadline = time.monotonic() + seconds
    running = True
    while running:
        findings.rounds += 1
        number, parity = findings.rounds, findings.rounds & 1
        mine = stages[endpoint.rank][parity]
        # A random delay now and then, so that every order of arrival occurs.
        if random.random() < 0.01:
            time.sleep(random.random() * 1e-4)
        if unordered:
            mine[: WORDS // 2] = number
            flags[endpoint.rank][0] = number
            if number % 20 == endpoint.rank:
                time.sleep(0.001)  # so that a peer reads meanwhile on any machine
            mine[WORDS // 2 :] = number
            while any(int(flag[0]) < number for flag in flags):
                os.sched_yield()
        else:
            mine[1:] = number
            mine[0] = number << 1 | (time.monotonic() < deadline)
            endpoint.barrier(time.monotonic() + TIMEOUT_S)
        for peer, peer_stages in enumerate(stages):
            seen = peer_stages[parity]
            if peer != endpoint.rank:
                findings.words += WORDS - 1
                findings.stale += int(np.count_nonzero(seen[1:] != number))
        running = bool(int(stages[0][parity][0]) & 1) if not unordered else number < 2000
    return findings


def run(ranks: int, seconds: float, unordered: bool = False) -> list[OrderingFindings]:
    """Run the test with one process a rank; returns the counts of each rank."""
    pipes = [(os.pipe(), os.pipe()) for _ in range(ranks)]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                _rank(rank, pipes[rank], seconds, unordered)
                code = 0
            except HoopError as error:
                sys.stderr.write(f"rank {rank}: {error}\n")
            finally:
                os._exit(code)
        children.append(child)
    files = []
    for (from_child, child_writes), (child_reads, to_child) in pipes:
        os.close(child_writes)
        os.close(child_reads)
        files.append((os.fdopen(from_child), os.fdopen(to_child, "w")))
    addresses = [reader.readline().strip() for reader, _ in files]
    for _, writer in files:
        writer.write(json.dumps(addresses) + "\n")
        writer.flush()
    found = []
    for reader, writer in files:
        line = reader.readline()
        found.append(OrderingFindings(**json.loads(line)) if line else OrderingFindings())
        reader.close()
        writer.close()
    for child in children:
        os.waitpid(child, 0)
    return found


def _rank(rank: int, pipes: tuple[tuple[int, int], tuple[int, int]], seconds: float, unordered: bool) -> None:
    reader, writer = os.fdopen(pipes[1][0]), os.fdopen(pipes[0][1], "w")
    with ShmTransport(Address("ordering", 0)) as transport:
        writer.write(f"{transport.address}\n")
        writer.flush()
        peers = [Address.parse(one) for one in json.loads(reader.readline())]
        endpoint = transport.endpoint(1, 1, rank, peers)
        assert isinstance(endpoint, SharedEndpoint)
        findings = stress(endpoint, seconds, unordered)
        if not unordered:
            endpoint.barrier(time.monotonic() + TIMEOUT_S)
        endpoint.close()
    writer.write(json.dumps(vars(findings)) + "\n")
    writer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--unordered", action="store_true")
    arguments = parser.parse_args()
    how = "2000 rounds" if arguments.unordered else f"{arguments.seconds:g} s"
    sys.stderr.write(f"{arguments.ranks} ranks look for stale reads, {how}\n")
    found = run(arguments.ranks, arguments.seconds, arguments.unordered)
    for rank, one in enumerate(found):
        sys.stdout.write(f"rank {rank}: {one.rounds} rounds, {one.words} words read, {one.stale} stale\n")
    sys.exit(any(one.stale or not one.rounds for one in found))


if __name__ == "__main__":
    main()
