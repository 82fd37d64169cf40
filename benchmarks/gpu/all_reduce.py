"""All-reduce of CUDA tensors between processes that share a GPU: backend hoop beside gloo (and nccl). Prints a table.

    python benchmarks/gpu/all_reduce.py                          2 and 4 processes, 64 KiB to 256 MiB; about a minute
    python benchmarks/gpu/all_reduce.py --processes 2 --sizes 64MiB --profile     the kernels and copies of one call
    python benchmarks/gpu/all_reduce.py --device cpu --sizes 1MiB                 without a GPU: tries the script

GB/s is the algorithm bandwidth: bytes of the tensor of one rank, divided by the time of a call (median of the repeats,
of the slowest rank; 1 GB is 10^9 bytes). Calls are synchronous and follow one another, as
in training; the time ends when the GPU has done the last. "copy" is
``b.copy_(a)`` of as many bytes in one process, the least that any collective has to do. NCCL refuses two ranks on one
GPU: it is measured where there is a GPU for each process. Processes that share a GPU run under CUDA MPS, which this
script starts if it is there; ``--no-mps`` shows what it is good for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

SRC = Path(__file__).resolve().parents[2] / "src"
sys.path.insert(0, str(SRC))

from hoop.config import parse_size  # noqa: E402

REPEATS, WARM_UP, LEAST_SECONDS = 7, 5, 0.2
SIZES = "64KiB,1MiB,16MiB,64MiB,256MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2,4", help="numbers of processes; default: %(default)s")
    parser.add_argument("--sizes", default=SIZES, help="sizes of a rank's tensor; default: %(default)s")
    parser.add_argument("--backends", default="hoop,gloo,nccl", help="default: %(default)s")
    parser.add_argument("--dtype", default="float32", help="default: %(default)s")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu: emulated, to try the script")
    parser.add_argument("--chunk", default="", help="bytes that hoop combines at a time (CHUNK_BYTES)")
    parser.add_argument("--host-meetings", action="store_true", help="let hosts meet, after waiting for their GPUs")
    parser.add_argument("--no-mps", action="store_true", help="let the processes take turns on the GPU")
    parser.add_argument("--profile", action="store_true", help="print the kernels and copies of one call on rank 0")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, in place of the table")
    parser.add_argument("--rank", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options, json.loads(options.rank))
        return
    if not options.json:
        print("| processes | bytes | backend | ms | GB/s |\n|---|---|---|---|---|", flush=True)
    for count in map(int, options.processes.split(",")):
        for backend in options.backends.split(","):
            for row in measure(options, count, backend):
                show(options, row)


def show(options: argparse.Namespace, row: dict[str, Any]) -> None:
    if options.json:
        print(json.dumps(row), flush=True)
    elif "note" in row:
        print(f"| {row['processes']} | | {row['backend']} | {row['note']} | |", flush=True)
    else:
        cells = f"{row['ms']:.4f} | {row['GB/s']:.1f}"
        print(f"| {row['processes']} | {row['bytes']} | {row['backend']} | {cells} |", flush=True)


def measure(options: argparse.Namespace, count: int, backend: str) -> list[dict[str, Any]]:
    """Starts the ranks of one group, each a process of this script, and returns the rows of rank 0."""
    if backend == "nccl" and gpus(options) < count:
        note = f"not measured: NCCL needs a GPU for each rank, and here is {gpus(options)}"
        return [{"processes": count, "backend": backend, "note": note}]
    with tempfile.TemporaryDirectory() as folder, mps(options, count) as warning:
        if warning:
            print(warning, file=sys.stderr, flush=True)
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--rank", json.dumps([rank, count, backend, folder])],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                text=True,
            )
            for rank in range(count)
        ]
        try:
            output, _ = ranks[0].communicate(timeout=500)
            codes = [rank.wait(60) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    if any(codes):
        return [{"processes": count, "backend": backend, "note": f"failed: exit codes {codes}"}]
    lines = output.splitlines()
    for line in lines:
        if not line.startswith("{"):
            print(line)
    return [json.loads(line) for line in lines if line.startswith("{")]


def gpus(options: argparse.Namespace) -> int:
    """GPUs here, asked for in another process: this one must not initialise CUDA."""
    if options.device != "cuda":
        return 0
    words = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def mps(options: argparse.Namespace, count: int) -> contextlib.AbstractContextManager[str]:
    if options.no_mps or options.device != "cuda":
        return contextlib.nullcontext("")
    from hoop.launch.mps import shared_gpus

    return shared_gpus(count)


def run_rank(options: argparse.Namespace, place: list[Any]) -> None:
    import torch
    import torch.distributed as dist

    from hoop.torch_backend import autoload, device_collectives, device_links, device_memory

    rank, count, backend, folder = place
    torch.set_num_threads(1)
    if not hasattr(dist.Backend, "HOOP"):
        autoload.register()  # Hoop's files without an installation
    if options.chunk:
        device_collectives.CHUNK_BYTES = parse_size(options.chunk)
    device_links.MEET_ON_DEVICE = not options.host_meetings
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        device_memory.MEMORIES["cpu"] = device_memory.EmulatedMemory
    dist.init_process_group(
        backend, init_method=f"file://{folder}/meet", rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    kind = getattr(torch, options.dtype)
    for size in map(parse_size, options.sizes.split(",")):
        tensor = torch.full((size // kind.itemsize,), rank + 1, dtype=kind, device=options.device)
        dist.all_reduce(tensor)
        assert bool((tensor == sum(range(1, count + 1))).all()), "a wrong sum"
        tensor.zero_()
        if options.profile:
            profile(tensor, rank, options.device)
            continue
        seconds = time_calls(lambda tensor=tensor: dist.all_reduce(tensor), options.device)
        slowest = torch.tensor([seconds], dtype=torch.float64, device=options.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if rank == 0:
            print_row(count, size, backend, float(slowest))
            if backend == "hoop":
                other = torch.empty_like(tensor)
                copying = time_calls(lambda a=tensor, b=other: b.copy_(a), options.device, alone=True)
                print_row(1, size, "copy", copying)
        dist.barrier()
    dist.destroy_process_group()


def print_row(processes: int, size: int, backend: str, seconds: float) -> None:
    row = {"processes": processes, "bytes": size, "backend": backend, "ms": 1e3 * seconds, "GB/s": size / seconds / 1e9}
    print(json.dumps(row), flush=True)


def time_calls(call: Any, device: str, alone: bool = False) -> float:
    """Seconds of a call: the median of the repeats. Ranks agree on the number of calls, unless ``alone``."""
    import torch
    import torch.distributed as dist

    def run(calls: int) -> float:
        if not alone:
            dist.barrier()
        wait()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return (time.perf_counter() - started) / calls

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    run(WARM_UP)
    once = torch.tensor([run(WARM_UP)], dtype=torch.float64, device=device)
    if not alone:
        dist.broadcast(once, 0)
    calls = max(3, min(2000, int(LEAST_SECONDS / REPEATS / float(once))))
    return statistics.median(run(calls) for _ in range(REPEATS))


def profile(tensor: Any, rank: int, device: str) -> None:
    """Prints what the GPU does in one call: nothing of it is a copy from or to the host."""
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with torch.profiler.profile(activities=activities) as recorded:
        dist.all_reduce(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
    if rank == 0:
        for event in recorded.events():
            if device != "cuda" or event.device_type == torch.autograd.DeviceType.CUDA:
                print(f"{event.name[:100]}: {event.time_range.elapsed_us():.1f} us at {event.time_range.start:.1f} us")


if __name__ == "__main__":
    main()
