"""The sum of gradients between GPUs of several hosts, over NCCL and in host memory. Prints a table.

    python benchmarks/gpu/exchange.py                                2 processes, 1 MiB to 256 MiB; about a minute
    python benchmarks/gpu/exchange.py --processes 4 --sizes 64MiB
    python benchmarks/gpu/exchange.py --device cpu --sizes 1MiB      without a GPU: tries the script, without NCCL

Each process is a rank with one shard, linked over TCP on loopback, and takes the next GPU. Where there are fewer GPUs
than processes, each pretends to NCCL that it is on a host of its own (NCCL_HOSTID): its ranks then talk over sockets
and take turns on the GPU, which shows that it works, not how fast it is between GPUs. ms: of ``meet`` and ``sum_into``,
the median of the repeats, on the slowest rank. GB/s: bytes of a gradient, divided by that time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch

from hoop.collectives.communicator import Communicator, all_gather_object
from hoop.collectives.shard_tree import merge_plan
from hoop.config import parse_size
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.exchanged_rows import ExchangedRows
from hoop.engine.stage.nccl_group import open_nccl_group
from hoop.engine.stage.peer_rows import SETS, PeerRows, StagedRows
from hoop.engine.stage.state import StateVectors
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport.tcp_listener import TcpTransport

REPEATS, WARM_UP = 20, 3
TIMEOUT_S = 120.0


class OneOfMany(Accelerator):
    """A GPU that several ranks share, which NCCL takes for GPUs of several hosts."""

    @property
    def identity(self) -> str:
        os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
        return f"GPU of process {os.getpid()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--sizes", default="1MiB,16MiB,64MiB,256MiB", help="of a gradient; default: %(default)s")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="default: %(default)s")
    options = parser.parse_args()
    sizes = [parse_size(size) for size in options.sizes.split(",")]
    links: list[Connection] = []
    for rank in range(options.processes):
        ours, theirs = Pipe()
        if not os.fork():
            run_rank(theirs, rank, options.processes, sizes, options.device)
            os._exit(0)
        theirs.close()
        links.append(ours)
    addresses = [link.recv_bytes() for link in links]
    for link in links:
        link.send_bytes(b"[" + b",".join(addresses) + b"]")
    print("| bytes | sum | ms | GB/s |\n|---|---|---|---|")
    for row in json.loads(links[0].recv_bytes()):
        print(
            "| {bytes} | {sum} | {ms:.3f} | {speed:.2f} |".format(**row) if "ms" in row else f"| | {row['note']} | | |"
        )
    for _ in links:
        os.wait()


def run_rank(link: Connection, rank: int, size: int, sizes: list[int], device: str) -> None:
    transport = TcpTransport(Address("127.0.0.1", 0))
    link.send_bytes(json.dumps([transport.address.host, transport.address.port]).encode())
    peers = [Address(*one) for one in json.loads(link.recv_bytes())]
    comm = Communicator(transport.endpoint(1, 1, rank, peers))
    accelerator = Accelerator(torch.device("cpu"))
    if device == "cuda":
        count = torch.cuda.device_count()
        kind = Accelerator if count >= size else OneOfMany
        accelerator = kind(torch.device("cuda", rank % count))
    rows = [row for one in sizes for row in measure(comm, accelerator, one)]
    if rank == 0:
        link.send_bytes(json.dumps(rows).encode())
    all_gather_object(comm, "", TIMEOUT_S)  # no rank closes its links before all are done
    comm.close()
    transport.close()


def measure(comm: Communicator, accelerator: Accelerator, size: int) -> list[dict[str, Any]]:
    count, found = size // 4, []
    plans = [merge_plan([rank], comm.size) for rank in range(comm.size)]
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(f"{folder}/arena", 3 * size + (1 << 20))
        vectors = StateVectors(arena, "benchmark.")
        deadline = time.monotonic() + TIMEOUT_S
        staged = StagedRows(comm, plans, comm.size, count, accelerator, vectors, deadline)
        found.append(row_of(comm, staged, accelerator, size, "in host memory"))
        group = open_nccl_group(comm, accelerator, TIMEOUT_S)
        if isinstance(group, str):
            return [*found, {"note": f"not over NCCL: {group}"}]
        rows = ExchangedRows(comm, plans, comm.size, count, accelerator.device, group)
        if problem := rows.connect(time.monotonic() + TIMEOUT_S):
            raise SystemExit(problem)
        found.append(row_of(comm, rows, accelerator, size, "over NCCL"))
        all_gather_object(comm, "", TIMEOUT_S)
        rows.close()
    return found


def row_of(comm: Communicator, rows: PeerRows, accelerator: Accelerator, size: int, name: str) -> dict[str, Any]:
    total, times = torch.zeros(size // 4, device=accelerator.device), []
    rows.own.normal_()
    for repeat in range(WARM_UP + REPEATS):
        accelerator.synchronize()
        all_gather_object(comm, "", TIMEOUT_S)
        began = time.perf_counter()
        rows.meet(repeat % SETS, time.monotonic() + TIMEOUT_S)
        rows.sum_into(total, repeat % SETS)
        accelerator.synchronize()
        times.append(time.perf_counter() - began)
    seconds = max(all_gather_object(comm, statistics.median(times[WARM_UP:]), TIMEOUT_S))
    return {"bytes": size, "sum": name, "ms": 1e3 * seconds, "speed": size / seconds / 1e9}


if __name__ == "__main__":
    main()
