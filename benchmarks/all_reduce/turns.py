"""Two versions of Hoop, all-reduce by all-reduce, in turns on the same machine: the cost of a change.

    git worktree add /tmp/before COMMIT
    python benchmarks/all_reduce/turns.py --before /tmp/before --turns 200

The ranks of both versions stay alive, and those of one version are idle while those of the other work. A turn is a
batch of each version, in alternating order. The output has medians and minima over turns, and the median of the ratios
within a turn, which occasional other load disturbs least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
SIZES = (4, 437_560, 64 << 20)
TIMEOUT_S = 300.0


class Ranks:
    """The rank processes of one version. Each version runs its own copy of this file, with its own module names."""

    def __init__(self, tree: Path, contender: str, ranks: int, sizes: list[int]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        task = json.dumps({"contender": contender, "sizes": sizes})
        self._children = [
            subprocess.Popen(
                [sys.executable, str(tree / HERE.relative_to(ROOT)), "--rank", str(rank), "--task", task],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(ranks)
        ]
        self._send([self._receive(child) for child in self._children])

    def batch(self, size: int, calls: int) -> float:
        """Seconds per call, measured by rank 0 over a batch."""
        self._send([size, calls])
        seconds = [float(self._receive(child)) for child in self._children]
        return seconds[0]

    def close(self) -> None:
        for child in self._children:
            child.communicate()

    def _send(self, message: object) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(json.dumps(message) + "\n")
            child.stdin.flush()

    def _receive(self, child: subprocess.Popen[str]) -> Any:
        assert child.stdout is not None
        return json.loads(child.stdout.readline())


def rank_main(rank: int, task: dict[str, Any]) -> None:
    """One rank of the version that PYTHONPATH selects."""
    import numpy as np

    from hoop.collectives.communicator import Communicator
    from hoop.collectives.registry import Operation
    from hoop.memory import Arena, default_directory, dtype
    from hoop.topology import Address
    from hoop.transport import open_transport
    from hoop.transport.shm_listener import ShmTransport

    sizes, kind = task["sizes"], dtype("float32")
    with ExitStack() as stack:
        arena = None
        if task["contender"] == "arena":
            capacity = sum(sizes) + (1 << 20)
            arena = Arena.create(default_directory(capacity) / f"hoop-turns-{os.getpid()}.arena", capacity)
            stack.callback(arena.close, delete=True)
            transport: Any = stack.enter_context(ShmTransport(Address("bench", 0), arena))
        else:
            transport = stack.enter_context(open_transport(f"{task['contender']}://127.0.0.1:0"))
        print(json.dumps(str(transport.address)), flush=True)
        peers = [Address.parse(one) for one in json.loads(sys.stdin.readline())]
        communicator = Communicator(transport.endpoint(1, 1, rank, peers))
        stack.callback(communicator.close)
        prepared = {}
        for size in sizes:
            vector = np.zeros(size // 4, np.float32)
            if arena is not None:
                vector = arena.array(arena.allocate(f"v{size}", size).address, kind, size // 4)
                vector[:] = 0
            prepared[size] = communicator.prepare(Operation("all_reduce", size // 4), vector, vector, TIMEOUT_S)
            prepared[size](time.monotonic() + TIMEOUT_S)
        for line in sys.stdin:
            size, calls = json.loads(line)
            run, deadline = prepared[size], time.monotonic() + TIMEOUT_S
            run(deadline)  # synchronizes the ranks
            started = time.perf_counter()
            for _ in range(calls):
                run(deadline)
            print((time.perf_counter() - started) / calls, flush=True)


def compare(before: Path, contender: str, ranks: int, sizes: list[int], turns: int, seconds: float) -> None:
    """Print one row per size."""
    versions = [Ranks(tree, contender, ranks, sizes) for tree in (before, ROOT)]
    try:
        for size in sizes:
            once = min(one.batch(size, 1) for _ in range(10) for one in versions)
            calls = max(1, int(seconds / once))
            found: list[list[float]] = [[], []]
            for turn in range(turns):
                for version in (0, 1) if turn % 2 else (1, 0):
                    found[version].append(versions[version].batch(size, calls))
            old, new = found
            ratio = statistics.median(now / then for then, now in zip(old, new, strict=True))
            figures = [statistics.median(old), statistics.median(new), min(old), min(new)]
            cells = " | ".join(f"{one * 1e6:.2f}" for one in figures)
            print(f"| {contender} | {ranks} | {size} | {calls} | {cells} | {ratio:.3f} |", flush=True)
    finally:
        for one in versions:
            one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of the other version")
    parser.add_argument("--contenders", default="arena,shm,tcp")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=0.01, help="of a batch")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, json.loads(options.task))
        return
    if options.before is None:
        parser.error("--before: which checkout is to be compared with?")
    sizes = [int(size) for size in options.sizes.split(",")]
    print("| | ranks | bytes | calls a batch | before, us | now, us | fastest before | fastest now | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for contender in options.contenders.split(","):
        for ranks in map(int, options.ranks.split(",")):
            compare(options.before, contender, ranks, sizes, options.turns, options.seconds)


if __name__ == "__main__":
    main()
