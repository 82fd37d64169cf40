"""One collective of a tensor parallel or sequence parallel layer, as PyTorch calls it, by Hoop and by Gloo.

    python benchmarks/trainers/calls.py
    python benchmarks/trainers/calls.py --bytes 65536 --turns 40 --json

Two processes make both groups and use them in turns. A figure is the median over turns of the microseconds of a call:

    functional   torch.distributed._functional_collectives, what DTensor's layers call: with autograd and a wait
    plain        torch.distributed, synchronous
    async        torch.distributed with async_op=True, and wait() at once
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.multiprocessing as mp

import hoop.torch_backend  # noqa: F401 - registers the backend
from hoop.report.tables import Column, Table

RANKS = 2
BACKENDS = ("hoop", "gloo")
TIMEOUT = timedelta(seconds=120)
Call = Callable[[], object]


def calls(group: dist.ProcessGroup, elements: int) -> dict[str, Call]:
    """The calls to measure, by name."""
    tensor, gathered = torch.ones(elements), torch.ones(RANKS * elements)
    part = torch.ones(elements // RANKS)
    return {
        "all_reduce, functional": lambda: functional.all_reduce(tensor, "sum", group).sum(),  # the sum waits for it
        "all_reduce, plain": lambda: dist.all_reduce(tensor, group=group),
        "all_gather_into_tensor, plain": lambda: dist.all_gather_into_tensor(gathered, tensor, group=group),
        "all_gather_into_tensor, async": lambda: _waited(
            dist.all_gather_into_tensor(gathered, tensor, group=group, async_op=True)
        ),
        "reduce_scatter_tensor, plain": lambda: dist.reduce_scatter_tensor(part, tensor, group=group),
        "reduce_scatter_tensor, async": lambda: _waited(
            dist.reduce_scatter_tensor(part, tensor, group=group, async_op=True)
        ),
    }


def _waited(work: dist.Work | None) -> None:
    assert work is not None, "it is asynchronous"
    work.wait()


def run_rank(rank: int, folder: str, elements: int, turns: int, repeats: int) -> None:
    """One process: rank 0 writes the seconds of a call, by name and backend."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=TIMEOUT)
    groups = {backend: dist.new_group(backend=backend, timeout=TIMEOUT) for backend in BACKENDS}
    known = {backend: calls(group, elements) for backend, group in groups.items()}
    seconds: dict[str, dict[str, list[float]]] = {name: {one: [] for one in BACKENDS} for name in known["hoop"]}
    for turn in range(turns + 1):
        for name, by_backend in seconds.items():
            for backend in BACKENDS:
                call = known[backend][name]
                dist.barrier()
                call()
                began = time.perf_counter()
                for _ in range(repeats):
                    call()
                if turn:  # the first one warms up
                    by_backend[backend].append((time.perf_counter() - began) / repeats)
    if rank == 0:
        Path(folder, "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=8192, help="of a rank's tensor [default: %(default)s]")
    parser.add_argument("--turns", type=int, default=20, help="[default: %(default)s]")
    parser.add_argument("--repeats", type=int, default=100, help="calls a turn [default: %(default)s]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hoop-calls-") as folder:
        arguments = (folder, options.bytes // 4, options.turns, options.repeats)
        mp.start_processes(run_rank, arguments, RANKS, start_method="spawn")  # type: ignore[no-untyped-call]
        seconds = json.loads(Path(folder, "seconds.json").read_text())
    rows = []
    for name, by_backend in seconds.items():
        hoop_us, gloo_us = (1e6 * statistics.median(by_backend[backend]) for backend in BACKENDS)
        rows.append([name, hoop_us, gloo_us, gloo_us / hoop_us])
    table = Table([Column("call"), Column("Hoop", "us"), Column("Gloo", "us"), Column("Gloo / Hoop")], rows)
    about = f"{options.bytes} bytes, {platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
    if options.json:
        print(json.dumps({"rows": table.plain(), "about": about, "load": os.getloadavg()}))
        return
    print(table.markdown())
    print(f"{about}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
