"""A stress test of shared memory: does a rank ever read what its peer has not written yet?

    python -m hoop.lab.bench.ordering --ranks 2 --seconds 60

Every rank fills its stage with the number of the round, meets the others, and reads all of theirs: every word must
carry that number. A word that carries an older one is a stale read, which is what "write the data, then set a
flag" gives on ARM. ``--unordered`` publishes with such a flag instead of a meeting (and sets it halfway through the
data, so that it fails on any machine): it shows that the test can fail.
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
    """What one rank saw."""

    rounds: int = 0
    words: int = 0
    stale: int = 0


def stress(endpoint: SharedEndpoint, seconds: float, unordered: bool = False) -> OrderingFindings:
    """Rounds until the time is over; all ranks stop at the same one."""
    findings = OrderingFindings()
    endpoint.gather(time.monotonic() + TIMEOUT_S)
    stages = [[box.stages[turn].view(np.uint64)[:WORDS] for turn in (0, 1)] for box in endpoint.mailboxes]
    flags = [box.told[0][4:5] for box in endpoint.mailboxes]
    until = time.monotonic() + seconds
    going = True
    while going:
        findings.rounds += 1
        number, turn = findings.rounds, findings.rounds & 1
        mine = stages[endpoint.rank][turn]
        # Now and then a little late, so that every order of arrival comes up.
        if random.random() < 0.01:
            time.sleep(random.random() * 1e-4)
        if unordered:
            mine[: WORDS // 2] = number
            flags[endpoint.rank][0] = number
            if number % 20 == endpoint.rank:
                time.sleep(0.001)  # so that a peer looks meanwhile on any machine
            mine[WORDS // 2 :] = number
            while any(int(flag[0]) < number for flag in flags):
                os.sched_yield()
        else:
            mine[1:] = number
            mine[0] = number << 1 | (time.monotonic() < until)
            endpoint.meet(time.monotonic() + TIMEOUT_S)
        for peer, one in enumerate(stages):
            seen = one[turn]
            if peer != endpoint.rank:
                findings.words += WORDS - 1
                findings.stale += int(np.count_nonzero(seen[1:] != number))
        going = bool(int(stages[0][turn][0]) & 1) if not unordered else number < 2000
    return findings


def run(ranks: int, seconds: float, unordered: bool = False) -> list[OrderingFindings]:
    """One process a rank; what each of them saw."""
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
    for (up, up_end), (down_end, down) in pipes:
        os.close(up_end)
        os.close(down_end)
        files.append((os.fdopen(up), os.fdopen(down, "w")))
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
            endpoint.meet(time.monotonic() + TIMEOUT_S)
        endpoint.close()
    writer.write(json.dumps(vars(findings)) + "\n")
    writer.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
