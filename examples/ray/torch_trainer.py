"""Ray Train with Hoop's collectives: a TorchTrainer whose workers use DDP over the backend "hoop".

    pip install 'hoop[ray]' 'ray[train]'
    python examples/ray/torch_trainer.py --workers 2

Ray Train starts the workers and makes the process group; ``TorchConfig(backend="hoop")`` is all that changes. Workers
on several machines need a token: set HOOP_TOKEN for them, as below.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn


def train(config: dict[str, Any]) -> None:
    """A worker: one rank of the group that Ray Train has made."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    points = torch.rand(2_000, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
    labels = (points.norm(dim=1) < 0.7).long()
    mine = slice(dist.get_rank(), None, dist.get_world_size())
    loss = torch.zeros(())
    for _ in range(config["steps"]):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points[mine]), labels[mine])
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    ray.train.report({"loss": mean.item(), "backend": dist.get_backend()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="that Ray reserves for a worker")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--address", help="Ray's head; otherwise RAY_ADDRESS, this machine's, or a new one")
    options = parser.parse_args()
    token = {name: os.environ[name] for name in ("HOOP_TOKEN",) if name in os.environ}
    ray.init(address=options.address, runtime_env={"env_vars": token} if token else None)
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": options.steps},
        torch_config=TorchConfig(backend="hoop"),
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers, resources_per_worker={"CPU": options.cpus}),
    )
    metrics = trainer.fit().metrics
    assert metrics is not None, "every worker reports"
    print(f"loss {metrics['loss']:.4f} with the backend {metrics['backend']!r}")


if __name__ == "__main__":
    main()
