"""One rank of the benchmark, of any contender.

``python -m hoop.lab.bench.rank`` is driven over its standard input by ``contest``:

    rank ── its address ──▶ runner       (1) one JSON line
    rank ◀── all addresses ── runner     (2) one JSON line
    rank 0 ── time of a size ──▶ runner  (3) one JSON line a size

``mpirun -n 2 python rank.py SECONDS BYTES …`` is an MPI rank, which prints (3). It runs in any Python that has mpi4py
and NumPy and may not have Hoop, so this module imports only the standard library until it knows the contender.
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

TIMEOUT_S = 120.0
BATCHES = 15
BATCH_S = 0.01


def _write_line(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def median_seconds(call: Callable[[], object], agree: Callable[[float], float], seconds: float) -> float:
    """Median time of one call, measured for about ``seconds``.

    ``agree`` broadcasts rank 0's value, so that all ranks make the same number of calls a batch.
    """
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


def run_native(task: dict[str, Any]) -> None:
    """Hoop's communicator: vectors in arenas (``arena``), in private memory (``shm``), or over TCP (``tcp``)."""
    import numpy as np

    from hoop.collectives.communicator import Communicator
    from hoop.collectives.registry import Operation
    from hoop.memory import Arena, default_directory, dtype
    from hoop.topology import Address
    from hoop.transport import Transport, open_transport
    from hoop.transport.shm_listener import ShmTransport

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
        _write_line(str(transport.address))  # (1)
        peers = [Address.parse(one) for one in json.loads(sys.stdin.readline())]  # (2)
        endpoint = transport.endpoint(1, 1, task["rank"], peers)
        communicator = Communicator(endpoint)

        def agree(value: float) -> float:
            box = np.array([value], np.float64)
            communicator.run(Operation("broadcast", 1, dtype("float64")), box, box, TIMEOUT_S)
            return float(box[0])

        for size in sizes:
            count = size // 4
            if arena is not None:
                vector = arena.array(arena.allocate(f"v{size}", size).address, dtype("float32"), count)
            else:
                vector = np.empty(count, np.float32)
            vector[:] = 0
            operation = Operation("all_reduce", count, algorithm=task.get("algorithm", ""))
            run = communicator.prepare(operation, vector, vector)
            median = median_seconds(
                lambda run=run: run(time.monotonic() + TIMEOUT_S),  # type: ignore[misc]
                agree,
                seconds,
            )
            vector[:] = task["rank"] + 1
            run(time.monotonic() + TIMEOUT_S)
            expected = len(peers) * (len(peers) + 1) / 2
            assert (vector == expected).all(), f"rank {task['rank']}: the sum is wrong"
            if task["rank"] == 0:
                _write_line({"bytes": size, "seconds": median, "algorithm": run.algorithm})  # (3)
        communicator.run(Operation("barrier"), vector[:0], vector[:0], TIMEOUT_S)
        communicator.close()


def run_torch(task: dict[str, Any]) -> None:
    """torch.distributed with CPU tensors: contender ``torch`` uses Hoop's backend, ``gloo`` uses Gloo."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _write_line("")
    json.loads(sys.stdin.readline())
    backend = "gloo" if task["contender"] == "gloo" else "hoop"
    dist.init_process_group(backend, init_method=f"tcp://{task['master']}", rank=task["rank"], world_size=task["ranks"])

    def agree(value: float) -> float:
        box = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(box, 0)
        return float(box[0])

    for size in task["sizes"]:
        tensor = torch.zeros(size // 4)
        median = median_seconds(lambda tensor=tensor: dist.all_reduce(tensor), agree, task["seconds"])  # type: ignore[misc]
        tensor.fill_(1)
        dist.all_reduce(tensor)
        assert bool((tensor == task["ranks"]).all()), f"rank {task['rank']}: the sum is wrong"
        if task["rank"] == 0:
            _write_line({"bytes": size, "seconds": median})
    dist.barrier()
    dist.destroy_process_group()


def run_mpi(seconds: float, sizes: list[int]) -> None:
    """The MPI of the mpirun that started this process."""
    import numpy as np
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for size in sizes:
        vector = np.zeros(size // 4, np.float32)
        median = median_seconds(
            lambda vector=vector: world.Allreduce(MPI.IN_PLACE, vector),  # type: ignore[misc]
            lambda value: world.bcast(value, root=0),
            seconds,
        )
        vector[:] = world.rank + 1
        world.Allreduce(MPI.IN_PLACE, vector)
        assert (vector == world.size * (world.size + 1) / 2).all(), f"rank {world.rank}: the sum is wrong"
        if world.rank == 0:
            _write_line({"bytes": size, "seconds": median})


def main() -> None:
    if len(sys.argv) > 1:
        run_mpi(float(sys.argv[1]), [int(one) for one in sys.argv[2:]])
        return
    task = json.loads(sys.stdin.readline())
    (run_torch if task["contender"] in ("torch", "gloo") else run_native)(task)


if __name__ == "__main__":
    main()
