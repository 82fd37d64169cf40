"""How a call is timed: batches long enough for the clock, their median. Standard library only.

Every contender, in whatever interpreter it runs, times with this file.

One rank of a benchmark that Hoop starts itself: ``python -m hoop.lab.bench.rank``, driven over its standard input.

rank ── its address ──▶ runner      (1) one JSON line
rank ◀── everybody's ── runner      (2) one JSON line
rank 0 ── a size's time ──▶ runner  (3) one JSON line a size
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from hoop.collectives.communicator import Communicator
from hoop.collectives.registry import Operation
from hoop.memory import Arena, default_directory, dtype
from hoop.topology import Address
from hoop.transport import open_transport
from hoop.transport.base import Transport
from hoop.transport.shm_listener import ShmTransport

BATCHES = 15
BATCH_S = 0.01


def median_seconds(call: Callable[[], object], agree: Callable[[float], float], seconds: float) -> float:
    """The median time of one call. ``agree`` makes all ranks use rank 0's number of calls a batch."""
    call()
    started = time.perf_counter()
    call()
    once = agree(max(time.perf_counter() - started, 1e-7))
    batches = BATCHES if once * BATCHES < 2 * seconds else 3
    calls = max(1, int(min(seconds / batches, max(BATCH_S, seconds / batches)) / once))
    calls = min(calls, 2000)
    times = []
    for _ in range(batches):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - started) / calls)
    return statistics.median(times)


TIMEOUT_S = 120.0
FLOAT32 = dtype("float32")


def _tell(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def _agree(communicator: Communicator) -> Callable[[float], float]:
    def agree(value: float) -> float:
        box = np.array([value], np.float64)
        communicator.run(Operation("broadcast", 1, dtype("float64")), box, box, TIMEOUT_S)
        return float(box[0])

    return agree


def native(task: dict[str, Any]) -> None:
    """Hoop's own communicator: vectors in arenas (``arena``), anywhere (``shm``), or over TCP (``tcp``)."""
    sizes, seconds = task["sizes"], task["seconds"]
    with ExitStack() as stack:
        arena: Arena | None = None
        transport: Transport
        if task["contender"] == "arena":
            capacity = sum(sizes) + (1 << 20)
            arena = Arena.create(default_directory(capacity) / f"hoop-bench-{os.getpid()}.arena", capacity)
            stack.callback(arena.close, delete=True)
            transport = stack.enter_context(ShmTransport(Address("bench", 0), arena))
        else:
            transport = stack.enter_context(open_transport(f"{task['contender']}://{task['host']}:0"))
        _tell(str(transport.address))  # (1)
        peers = [Address.parse(one) for one in json.loads(sys.stdin.readline())]  # (2)
        endpoint = transport.endpoint(1, 1, task["rank"], peers)
        communicator = Communicator(endpoint)
        for size in sizes:
            count = size // 4
            if arena is not None:
                vector = arena.array(arena.allocate(f"v{size}", size).address, FLOAT32, count)
            else:
                vector = np.empty(count, np.float32)
            vector[:] = 0
            operation = Operation("all_reduce", count, algorithm=task.get("algorithm", ""))
            run = communicator.prepare(operation, vector, vector)
            taken = median_seconds(
                lambda run=run: run(time.monotonic() + TIMEOUT_S),  # type: ignore[misc]
                _agree(communicator),
                seconds,
            )
            vector[:] = task["rank"] + 1
            run(time.monotonic() + TIMEOUT_S)
            expected = len(peers) * (len(peers) + 1) / 2
            assert (vector == expected).all(), f"rank {task['rank']}: the sum is wrong"
            if task["rank"] == 0:
                _tell({"bytes": size, "seconds": taken, "algorithm": run.algorithm})  # (3)
        communicator.run(Operation("barrier"), vector[:0], vector[:0], TIMEOUT_S)
        communicator.close()


def through_torch(task: dict[str, Any]) -> None:
    """torch.distributed with ordinary tensors: ``torch`` is Hoop's backend, ``gloo`` its rival."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _tell("")
    json.loads(sys.stdin.readline())
    backend = "gloo" if task["contender"] == "gloo" else "hoop"
    dist.init_process_group(
        backend,
        init_method=f"tcp://{task['master']}",
        rank=task["rank"],
        world_size=task["ranks"],
    )

    def agree(value: float) -> float:
        box = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(box, 0)
        return float(box[0])

    for size in task["sizes"]:
        tensor = torch.zeros(size // 4)
        taken = median_seconds(lambda tensor=tensor: dist.all_reduce(tensor), agree, task["seconds"])  # type: ignore[misc]
        tensor.fill_(1)
        dist.all_reduce(tensor)
        assert bool((tensor == task["ranks"]).all()), f"rank {task['rank']}: the sum is wrong"
        if task["rank"] == 0:
            _tell({"bytes": size, "seconds": taken})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    work = json.loads(sys.stdin.readline())
    (through_torch if work["contender"] in ("torch", "gloo") else native)(work)
