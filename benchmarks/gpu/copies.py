"""What the GPU does in a training step: kernels and copies by direction, from PyTorch's profiler. Prints a table.

    python benchmarks/gpu/copies.py            128 steps of mnist, of random images and of random text, one device

The engine trains as in ``hoop train``, in this process. In data parallel, copies from the GPU to the host are the tails
of the totals (loss, votes, provenance), once a stride of up to 64 steps; in a pipeline of one stage they are losses,
and copies from the host are samples. The last two rows of a case are the engine's own counters of bytes
(``Accelerator``), which leave out samples and tails of data parallel.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict

import jobs
import torch
from torch.profiler import ProfilerActivity, profile

from hoop.collectives.communicator import Communicator
from hoop.collectives.rank_context import RankContext
from hoop.engine.job import Job
from hoop.engine.recipes import RECIPES
from hoop.engine.settings import Settings
from hoop.engine.trainer import Trainer
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport.shm_listener import ShmTransport

WARM_UP = 64
CASES: list[tuple[str, Job, dict[str, object]]] = [
    ("mnist", RECIPES["mnist"], {}),
    ("mobilenet, TF32", jobs.mobilenet, {"tf32": True}),
    ("gpt", jobs.gpt, {}),
    ("gpt, pipeline of one stage", jobs.gpt, {"strategy": "pipeline:1f1b"}),
]


def trace(job: Job, changes: dict[str, object], steps: int) -> dict[str, tuple[int, float]]:
    """Count and microseconds of each kind of activity on the GPU, over all steps after the warm-up.

    The engine's counters of bytes are given as a count.
    """
    settings = Settings().replaced(
        {**job.settings, **changes, "accelerator": "cuda", "max_steps": WARM_UP + steps, "evaluate_every": 0}
    )
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(f"{folder}/arena", 1 << 30)
        transport = ShmTransport(Address("127.0.0.1", 0), arena)
        communicator = Communicator(transport.endpoint(1, 1, 0, [transport.address]))
        context = RankContext(arena, communicator, lambda ranks: communicator, (0, 1))
        trainer = Trainer(context, settings, job, lambda event: None, lambda: False, None, "copies.")
        while trainer.executor.steps_updated < WARM_UP:
            trainer._train_steps()
        torch.cuda.synchronize()
        accelerator = trainer.executor.accelerator
        assert accelerator is not None
        before = accelerator.bytes_uploaded, accelerator.bytes_downloaded
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            while trainer.executor.steps_updated < WARM_UP + steps:
                trainer._train_steps()
            torch.cuda.synchronize()
        after = accelerator.bytes_uploaded, accelerator.bytes_downloaded
        trainer.close()
        communicator.close()
        transport.close()
        arena.close()
    found: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type() != torch.autograd.DeviceType.CUDA:
            continue
        name = event.name()
        kind = name if name.startswith(("Memcpy", "Memset")) else "kernel"
        count, duration = found[kind]
        found[kind] = count + 1, duration + event.duration_ns() / 1e3
    found["bytes uploaded"], found["bytes downloaded"] = (
        (new - old, 0.0) for new, old in zip(after, before, strict=True)
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=128, help="steps of each case that are traced")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    print("| case | activity | a step | microseconds a step |\n|---|---|---|---|", flush=True)
    for name, job, changes in CASES:
        if options.only not in name:
            continue
        for kind, (count, duration) in sorted(trace(job, changes, options.steps).items(), key=lambda one: one[0]):
            print(f"| {name} | {kind} | {count / options.steps:.2f} | {duration / options.steps:.2f} |", flush=True)


if __name__ == "__main__":
    main()
