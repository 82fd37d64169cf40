"""DistributedDataParallel over Hoop's collectives: an ordinary PyTorch script with backend="hoop".

python examples/torch_backend.py                         starts two processes of itself
torchrun --nproc-per-node 4 examples/torch_backend.py    or any other launcher
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hoop.data import load

BATCH = 64
"""Samples per process and step."""


def train(steps: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp = DistributedDataParallel(model)  # broadcasts the weights, averages gradients in the backward
    optimizer = torch.optim.Adam(ddp.parameters(), lr=2e-3)
    data = load("mnist")
    order = np.random.default_rng(seed=1).permutation(len(data.train))  # the same on every rank
    started = time.perf_counter()
    for step in range(steps):
        # Each rank takes its own slice of the global batch.
        first = (step * size + rank) * BATCH
        indices = np.take(order, np.arange(first, first + BATCH), mode="wrap")
        images, labels = data.train.batch(indices, epoch=0, seed=0)
        loss = nn.functional.cross_entropy(ddp(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1:>4}  loss {loss.item():.4f}")
    seconds = time.perf_counter() - started

    # Every rank evaluates its part of the test samples; the all-reduce sums the counts.
    images, labels = data.test.batch(np.arange(rank, len(data.test), size), epoch=0, seed=0)
    with torch.no_grad():
        correct = (model(images).argmax(1) == labels).sum().double()
    dist.all_reduce(correct)
    if rank == 0:
        speed = steps * size * BATCH / seconds
        print(f"{size} processes: accuracy {correct.item() / len(data.test):.2%}, {speed:,.0f} samples/s")


def run_process(rank: int, size: int, store: str, steps: int) -> None:
    dist.init_process_group("hoop", init_method=f"file://{store}", rank=rank, world_size=size)
    train(steps)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP with backend='hoop' on MNIST.")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("hoop")  # the only line that names Hoop
        train(options.steps)
        dist.destroy_process_group()
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # processes on one machine must not compete for its cores
    with tempfile.TemporaryDirectory(prefix="ddp-") as folder:
        # The rendezvous is a file, so no port must be chosen.
        arguments = (options.processes, str(Path(folder, "meet")), options.steps)
        torch.multiprocessing.spawn(run_process, arguments, nprocs=options.processes)


if __name__ == "__main__":
    main()
