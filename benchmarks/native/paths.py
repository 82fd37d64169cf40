"""The native core and the NumPy path, all-reduce by all-reduce, in turns on the same machine.

    python benchmarks/native/paths.py --ranks 2,4,8,16 --turns 50

The ranks of both paths stay alive (the NumPy path: HOOP_NATIVE=0), and those of one path are idle while those of the
other work. A turn is a batch of each path, in alternating order. The output has the median and the minimum of each path
over turns, and the median of the ratios within a turn, which occasional other load disturbs least.

    arena   a prepared all_reduce of vectors in device memory
    shm     a prepared all_reduce of vectors in private memory
    run     Communicator.run of vectors in private memory
    torch   torch.distributed.all_reduce with backend hoop
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SIZES = (4, 64, 4096, 65_536, 437_560, 4 << 20)
CONTENDERS = ("arena", "shm", "run", "torch")
TIMEOUT_S = 300.0


class Ranks:
    """The rank processes of one path."""

    def __init__(self, native: bool, contender: str, ranks: int, sizes: list[int]) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            "HOOP_NATIVE": "1" if native else "0",
        }
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        task = json.dumps({"contender": contender, "sizes": sizes, "ranks": ranks, "port": port})
        self._children = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), "--task", task],
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            for rank in range(ranks)
        ]
        self._send([self._receive(child) for child in self._children])
        states = {self._receive(child) for child in self._children}
        if states != {native}:
            raise SystemExit(f"native core in use: {states}, expected {native}; hoop doctor says why")

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
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"a rank ended with code {child.wait()}")
        return json.loads(line)


def rank_main(rank: int, task: dict[str, Any]) -> None:
    """One rank: prepares a call for each size, then runs batches of them."""
    with (torch_calls if task["contender"] == "torch" else own_calls)(rank, task) as calls_of:
        for line in sys.stdin:
            size, calls = json.loads(line)
            call = calls_of[size]
            call()  # synchronizes the ranks
            started = time.perf_counter()
            for _ in range(calls):
                call()
            print((time.perf_counter() - started) / calls, flush=True)


@contextmanager
def own_calls(rank: int, task: dict[str, Any]) -> Iterator[dict[int, Callable[[], object]]]:
    """By size: an all_reduce of Hoop's communicator."""
    import numpy as np

    from hoop.collectives.communicator import Communicator
    from hoop.collectives.registry import Operation
    from hoop.memory import Arena, default_directory, dtype
    from hoop.topology import Address
    from hoop.transport import open_transport
    from hoop.transport.shm_endpoint import ShmEndpoint
    from hoop.transport.shm_listener import ShmTransport

    sizes, kind = task["sizes"], dtype("float32")
    with ExitStack() as stack:
        arena = None
        if task["contender"] == "arena":
            capacity = sum(sizes) + (1 << 20)
            arena = Arena.create(default_directory(capacity) / f"hoop-paths-{os.getpid()}.arena", capacity)
            stack.callback(arena.close, delete=True)
            transport: Any = stack.enter_context(ShmTransport(Address("bench", 0), arena))
        else:
            transport = stack.enter_context(open_transport("shm://127.0.0.1:0"))
        print(json.dumps(str(transport.address)), flush=True)
        peers = [Address.parse(one) for one in json.loads(sys.stdin.readline())]
        endpoint = transport.endpoint(1, 1, rank, peers)
        communicator = Communicator(endpoint)
        stack.callback(communicator.close)
        calls: dict[int, Callable[[], object]] = {}
        for size in sizes:
            vector = np.zeros(size // 4, np.float32)
            if arena is not None:
                vector = arena.array(arena.allocate(f"v{size}", size).address, kind, size // 4)
                vector[:] = 0
            operation = Operation("all_reduce", size // 4)
            if task["contender"] == "run":
                calls[size] = lambda operation=operation, vector=vector: communicator.run(  # type: ignore[misc]
                    operation, vector, vector, TIMEOUT_S
                )
            else:
                prepared = communicator.prepare(operation, vector, vector, TIMEOUT_S)
                calls[size] = lambda prepared=prepared: prepared(time.monotonic() + TIMEOUT_S)  # type: ignore[misc]
            calls[size]()
        assert isinstance(endpoint, ShmEndpoint)
        print(json.dumps(endpoint.native is not None), flush=True)
        yield calls


@contextmanager
def torch_calls(rank: int, task: dict[str, Any]) -> Iterator[dict[int, Callable[[], object]]]:
    """By size: an all_reduce of torch.distributed."""
    import torch
    import torch.distributed as dist

    from hoop.native import library

    torch.set_num_threads(1)
    print(json.dumps(""), flush=True)
    sys.stdin.readline()
    address = f"tcp://127.0.0.1:{task['port']}"
    dist.init_process_group("hoop", init_method=address, rank=rank, world_size=task["ranks"])
    calls: dict[int, Callable[[], object]] = {}
    for size in task["sizes"]:
        tensor = torch.zeros(size // 4)
        calls[size] = lambda tensor=tensor: dist.all_reduce(tensor)  # type: ignore[misc]
        calls[size]()
    print(json.dumps(library.load() is not None), flush=True)
    yield calls
    dist.destroy_process_group()


def compare(contender: str, ranks: int, sizes: list[int], turns: int, seconds: float) -> None:
    """Prints one row per size."""
    paths = [Ranks(native, contender, ranks, sizes) for native in (False, True)]
    try:
        for size in sizes:
            once = min(one.batch(size, 1) for _ in range(10) for one in paths)
            calls = max(1, min(2000, int(seconds / once)))
            found: list[list[float]] = [[], []]
            for turn in range(turns):
                for path in (0, 1) if turn % 2 else (1, 0):
                    found[path].append(paths[path].batch(size, calls))
            numpy, native = found
            ratio = statistics.median(then / now for then, now in zip(numpy, native, strict=True))
            figures = [statistics.median(numpy), statistics.median(native), min(numpy), min(native)]
            cells = " | ".join(f"{one * 1e6:.2f}" for one in figures)
            print(f"| {contender} | {ranks} | {size} | {calls} | {cells} | {ratio:.2f}x |", flush=True)
    finally:
        for one in paths:
            one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--ranks", default="2,4,8,16")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a batch")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, json.loads(options.task))
        return
    sizes = [int(size) for size in options.sizes.split(",")]
    print("| | ranks | bytes | calls a batch | NumPy, us | native, us | fastest NumPy | fastest native | faster by |")
    print("|---|---|---|---|---|---|---|---|---|")
    for ranks in map(int, options.ranks.split(",")):
        for contender in options.contenders.split(","):
            compare(contender, ranks, sizes, options.turns, options.seconds)


if __name__ == "__main__":
    main()
