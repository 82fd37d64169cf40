"""What the GPU does in a training step: kernels and copies by direction, from PyTorch's profiler. Prints a table.

    python benchmarks/gpu/copies.py                     128 steps of each case
    python benchmarks/gpu/copies.py --only pipeline     those whose name contains this; also hybrid, ps
    python benchmarks/gpu/copies.py --accelerator emulated --only 2 --steps 2 --warm-up 1     without a GPU: bytes only

The engine trains as in ``hoop train``, without replicas, each device in a process of its own; the rows are sums over
the devices of a case. In data parallel, copies from the GPU to the host are the tails of the totals (loss, votes,
provenance), once a stride of up to 64 steps; in a pipeline they are losses, and copies from the host are samples. The
last rows of a case are the engine's own counters of bytes (``Accelerator``), which leave out samples and tails of data
parallel, and the bytes of activations that went from GPU to GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection

import jobs
import torch
from torch.profiler import ProfilerActivity, profile

from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext, group_id
from hoop.engine.job import Job
from hoop.engine.recipes import RECIPES
from hoop.engine.settings import Settings
from hoop.engine.trainer import Trainer
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport.shm_listener import ShmTransport

CASES: list[tuple[str, Job, dict[str, object], int]] = [
    ("mnist", RECIPES["mnist"], {}, 1),
    ("mobilenet, TF32", jobs.mobilenet, {"tf32": True}, 1),
    ("gpt", jobs.gpt, {}, 1),
    ("gpt, pipeline of one stage", jobs.gpt, {"strategy": "pipeline:1f1b"}, 1),
    ("gpt, pipeline of 2 stages", jobs.gpt, {"strategy": "pipeline:1f1b"}, 2),
    ("gpt, hybrid of 2 x 2", jobs.gpt, {"strategy": "hybrid:replicas=2"}, 4),
    ("gpt, ps:bsp, 2 workers and a server", jobs.gpt, {"strategy": "ps:bsp"}, 3),
]
Activity = dict[str, tuple[int, float]]
"""Count and microseconds of each kind of activity. Counters of bytes are given as a count."""


def run_rank(case: int, accelerator: str, warm_up: int, steps: int, rank: int, link: Connection) -> None:
    """Train as one rank, and send the activity after the warm-up over ``link``."""
    _, job, changes, size = CASES[case]
    settings = Settings().replaced(
        {**job.settings, **changes, "accelerator": accelerator, "max_steps": warm_up + steps, "evaluate_every": 0}
    )
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(f"{folder}/arena", 1 << 30)
        transport = ShmTransport(Address("127.0.0.1", 0), arena)
        link.send_bytes(json.dumps([transport.address.host, transport.address.port]).encode())
        peers = [Address(*one) for one in json.loads(link.recv_bytes())]
        communicator = Communicator(transport.endpoint(1, 1, rank, peers))
        groups = {tuple(range(size)): communicator}

        def group(ranks: Sequence[int]) -> Communicator:
            key = tuple(ranks)
            if key not in groups:
                endpoint = transport.endpoint(group_id(1, key), 1, key.index(rank), [peers[one] for one in key])
                groups[key] = Communicator(endpoint)
            return groups[key]

        context = RankContext(arena, communicator, group, (rank, size))
        trainer = Trainer(context, settings, job, lambda event: None, lambda: False, None, "copies.")
        found = trace(trainer, warm_up, steps)
        link.send_bytes(json.dumps(found).encode())
        link.recv_bytes()  # no rank closes its links before all are done
        trainer.close()
        for one in groups.values():
            one.close()
        transport.close()
        arena.close()


def trace(trainer: Trainer, warm_up: int, steps: int) -> Activity:
    """Train; returns the activity of all steps after the warm-up."""
    accelerator, channel = trainer.executor.accelerator, trainer.executor.channel
    assert accelerator is not None
    while trainer._done < warm_up:
        trainer._train_steps()
    accelerator.synchronize()
    before = accelerator.bytes_uploaded, accelerator.bytes_downloaded, channel.bytes_shared
    with profile(activities=[ProfilerActivity.CUDA]) if accelerator.cuda else contextlib.nullcontext() as profiler:
        while trainer._done < warm_up + steps:
            trainer._train_steps()
        accelerator.synchronize()
    after = accelerator.bytes_uploaded, accelerator.bytes_downloaded, channel.bytes_shared
    found: Activity = defaultdict(lambda: (0, 0.0))
    for event in profiler.profiler.kineto_results.events() if profiler is not None else ():  # type: ignore[union-attr]
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name()
        kind = name if name.startswith(("Memcpy", "Memset")) else "kernel"
        count, duration = found[kind]
        found[kind] = count + 1, duration + event.duration_ns() / 1e3
    names = "bytes uploaded", "bytes downloaded", "bytes of activations, GPU to GPU"
    for name, new, old in zip(names, after, before, strict=True):
        found[name] = new - old, 0.0
    return found


def run_case(case: int, accelerator: str, warm_up: int, steps: int) -> Activity:
    """Run the ranks of a case in processes of their own; returns the sums over them."""
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    links, processes = [], []
    for rank in range(CASES[case][3]):
        link, other_end = spawn.Pipe()
        processes.append(spawn.Process(target=run_rank, args=(case, accelerator, warm_up, steps, rank, other_end)))
        processes[-1].start()
        other_end.close()
        links.append(link)
    addresses = json.dumps([json.loads(link.recv_bytes()) for link in links]).encode()
    for link in links:
        link.send_bytes(addresses)
    total: Activity = defaultdict(lambda: (0, 0.0))
    for link in links:
        for kind, (count, duration) in json.loads(link.recv_bytes()).items():
            total[kind] = total[kind][0] + count, total[kind][1] + duration
    for link in links:
        link.send_bytes(b"done")
    for process in processes:
        process.join()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=128, help="steps of each case that are traced")
    parser.add_argument("--warm-up", type=int, default=64, help="steps before them")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--accelerator", default="cuda", choices=("cuda", "emulated"))
    options = parser.parse_args()
    print("| case | activity | a step | microseconds a step |\n|---|---|---|---|", flush=True)
    for case, (name, *_) in enumerate(CASES):
        if options.only not in name:
            continue
        found = run_case(case, options.accelerator, options.warm_up, options.steps)
        for kind, (count, duration) in sorted(found.items(), key=lambda one: one[0]):
            print(f"| {name} | {kind} | {count / options.steps:.2f} | {duration / options.steps:.2f} |", flush=True)


if __name__ == "__main__":
    main()
