"""One contender in a process of its own: trains, and prints one line of JSON.

    contender.py hoop  --devices 2                     hoop.train
    contender.py torch --threads 1 --fused             one plain process, as an expert writes it
    contender.py torch --ranks 2 --backend gloo        DDP: one process per rank, as torchrun starts them

All train the same job from the same initial weights, with the same global batch, optimizer and rates. A lap is timed:
some epochs, from the first sample to the last update, without start, evaluation and checkpoints. Set
``OMP_NUM_THREADS`` before the start (``race.py`` does): PyTorch reads it once, when it is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
Figures = dict[str, Any]


def by_hoop(options: argparse.Namespace) -> Figures:
    """``hoop.train``, timed by the events of its devices."""
    from jobs import job_named
    from resident import Resident

    from hoop.runs.api import train

    job = job_named(options.job, options.samples)
    resident = Resident()
    laps: list[float] = []
    since = last = 0.0

    def on_event(event: Figures) -> None:
        nonlocal since, last
        match event["kind"]:
            case "started":
                since = event["time"]
            case "steps":
                last = event["time"]
                resident.sample()
            case "evaluated":
                laps.append(last - since)
                since = event["time"]

    settings = {
        "epochs": options.laps * options.lap,
        "seed": options.seed,
        "evaluate_every": options.lap,
        "checkpoint_every": 0,
        "trace_steps": 0,
    }
    overrides = {"batch_size": options.batch_size, "shards": options.shards, "optimizer": options.optimizer}
    settings |= {name: value for name, value in overrides.items() if value is not None}
    result = train(
        job,
        devices=options.devices,
        strategy=options.strategy,
        memory=options.memory,
        progress=on_event,
        **settings,
    )
    summary = result.summary
    return {
        "lap_seconds": laps,
        "steps": summary["steps"] // options.laps,
        "accuracy": summary["accuracy"],
        "loss": summary["loss"],
        "bytes_a_step": summary["bytes_sent"] / max(1, summary["steps"]),
        "idle": summary["idle_fraction"],
        "shares": summary["shares"],
        "arena_bytes": summary["memory"],
        "resident_bytes": resident.grown,
        "weights_sha256": summary["weights_sha256"],
    }


def by_torch(options: argparse.Namespace) -> Figures | None:
    """Plain PyTorch in one process, or one rank of DDP; None on ranks other than 0."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from jobs import job_named
    from torch import nn

    from hoop.torch_backend.autoload import register

    rank, ranks = int(os.environ.get("RANK", "0")), options.ranks
    _pin(range(rank * options.threads, (rank + 1) * options.threads))
    torch.set_num_threads(options.threads)
    job = job_named(options.job, options.samples)
    settings = job.defaults(options.job)
    rates, batch_size = settings.optimizer, options.batch_size or settings.batch_size
    data = job.data()
    # The whole dataset, normalised once and kept as floats: a step only selects its rows.
    inputs, targets = data.train.batch(np.arange(len(data.train)), epoch=0, seed=0)
    model: nn.Module = job.model(options.seed)
    trained = model
    if ranks > 1:
        if options.backend == "hoop" and not hasattr(dist.Backend, "HOOP"):
            register()  # torch finds only an installed Hoop by itself, not one in a source tree
        dist.init_process_group(options.backend, init_method=os.environ["STORE"], rank=rank, world_size=ranks)
        trained = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = optimizer_for(model, rates, options.fused)
    criterion = nn.CrossEntropyLoss()
    per_epoch = -(-len(targets) // batch_size)
    steps = options.laps * options.lap * per_epoch
    shuffle = torch.Generator().manual_seed(options.seed)
    whole = batch_size >= len(targets) and ranks == 1
    laps: list[float] = []
    step = 0
    for _ in range(options.laps):
        if ranks > 1:
            dist.barrier()
        started = time.perf_counter()
        for _ in range(options.lap):
            permutation = torch.randperm(len(targets), generator=shuffle)
            for start in range(0, len(targets), batch_size):
                if whole:  # the sum over all samples does not depend on their order
                    images, labels = inputs, targets
                else:
                    rows = permutation[start : start + batch_size]
                    rows = rows[len(rows) * rank // ranks : len(rows) * (rank + 1) // ranks]
                    images, labels = inputs[rows], targets[rows]
                optimizer.param_groups[0]["lr"] = rates.rate(step, steps)
                optimizer.zero_grad(set_to_none=True)
                criterion(trained(images), labels).backward()
                optimizer.step()
                step += 1
        laps.append(time.perf_counter() - started)
    accuracy = accuracy_of(model, data.test)
    if ranks > 1:
        dist.destroy_process_group()
    if rank:
        return None
    return {"lap_seconds": laps, "steps": options.lap * per_epoch, "accuracy": accuracy}


def optimizer_for(model: Any, chosen: Any, fused: bool) -> Any:
    """PyTorch's own optimizer, with the recipe's constants."""
    import torch

    if chosen.name == "sgd":
        return torch.optim.SGD(
            model.parameters(),
            lr=chosen.lr,
            momentum=chosen.momentum,
            nesterov=chosen.nesterov,
            weight_decay=chosen.weight_decay,
            fused=fused,
        )
    kind = torch.optim.Adam if chosen.name == "adam" else torch.optim.AdamW
    betas = (chosen.beta1, chosen.beta2)
    return kind(
        model.parameters(),
        lr=chosen.lr,
        betas=betas,
        eps=chosen.eps,
        weight_decay=chosen.weight_decay,
        fused=fused,
    )


def accuracy_of(model: Any, data: Any) -> float:
    import numpy as np
    import torch

    model.eval()
    correct = 0
    with torch.no_grad():
        for start in range(0, len(data), 500):
            rows = np.arange(start, min(start + 500, len(data)))
            inputs, targets = data.batch(rows, epoch=0, seed=0)
            correct += int((model(inputs).argmax(-1) == targets).sum())
    return correct / len(data)


def _pin(cores: range) -> None:
    """Pin this process to these cores, as Hoop pins its devices; not on a machine with fewer."""
    if hasattr(os, "sched_setaffinity"):
        available = sorted(os.sched_getaffinity(0))
        if cores.stop <= len(available):
            os.sched_setaffinity(0, {available[core] for core in cores})


def spawn(arguments: list[str], ranks: int) -> None:
    """Start one process per rank; rank 0 prints the line."""
    with tempfile.TemporaryDirectory(prefix="hoop-bench-") as folder:
        environment = os.environ | {"STORE": f"file://{folder}/store", "WORLD_SIZE": str(ranks)}
        command = [sys.executable, str(HERE / "contender.py"), *arguments]
        processes = [
            subprocess.Popen(
                command,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kind", choices=("hoop", "torch"))
    parser.add_argument("--job", default="mnist", help="mnist, softmax:SIZE or mobilenetv2")
    parser.add_argument("--laps", type=int, default=3, help="how many are timed, each by itself")
    parser.add_argument("--lap", type=int, default=1, help="epochs of a lap")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--samples", type=int, default=64, help="made-up images, where they are made up")
    parser.add_argument("--devices", type=int, default=2, help="hoop: how many")
    parser.add_argument("--shards", type=int, help="hoop: parts of a batch")
    parser.add_argument("--strategy", default="data", help="hoop: as hoop train has it")
    parser.add_argument("--optimizer", help="hoop: instead of the recipe's")
    parser.add_argument("--memory", default="256MiB", help="hoop: of a device")
    parser.add_argument("--threads", type=int, default=1, help="torch: of a process")
    parser.add_argument("--fused", action="store_true", help="torch: the optimizer's fused kernel")
    parser.add_argument("--ranks", type=int, default=1, help="torch: processes, with DDP if more than one")
    parser.add_argument("--backend", default="gloo", choices=("gloo", "hoop"), help="torch: DDP's")
    options = parser.parse_args()
    if options.kind == "torch" and options.ranks > 1 and "RANK" not in os.environ:
        spawn(sys.argv[1:], options.ranks)
        return
    figures = by_hoop(options) if options.kind == "hoop" else by_torch(options)
    if figures is not None:
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
