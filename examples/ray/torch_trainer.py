"""Ray Train with Hoop's collectives: a ``TorchTrainer`` with ``TorchConfig(backend="hoop")``, and DDP as usual.

python examples/ray/torch_trainer.py                          # on a Ray of its own, on this machine
python examples/ray/torch_trainer.py --address 10.0.0.1:6379  # on a node of a cluster

Ray Train starts the workers and restarts all of them when one is lost. For a run that goes on without the lost ones, to
the same weights, see train.py in this folder.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import distributed as dist
from torch import nn

SAMPLES, BATCH = 4_000, 100


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane, and whether they are inside of a ring."""
    points = torch.rand(SAMPLES, 2, generator=torch.Generator().manual_seed(1)) * 4 - 2
    return points, ((points.norm(dim=1) > 0.8) & (points.norm(dim=1) < 1.6)).long()


def worker(config: dict[str, Any]) -> None:
    """What each worker runs, with its own part of every batch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    points, labels = make_data()
    model = prepare_model(nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rank, size = dist.get_rank(), dist.get_world_size()
    for epoch in range(config["epochs"]):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            mine = batch[rank::size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(points[mine]), labels[mine]).backward()
            optimizer.step()
    right = (model(points).argmax(1) == labels).float().mean().item()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if rank == 0:  # Ray keeps the metrics that come with a checkpoint
            torch.save(model.state_dict(), Path(folder) / "model.pt")
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        metrics = {"accuracy": right, "backend": dist.get_backend(), "workers": size}
        ray.train.report(metrics, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--address", help="Ray's head; otherwise RAY_ADDRESS, this machine's, or a new one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1, help="that Ray reserves for a worker")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--storage", help="Ray Train's folder, shared by all nodes; otherwise one that is deleted")
    options = parser.parse_args()
    # Ray's workers call each other by the addresses of their nodes: Hoop's links want a token there.
    token = {"HOOP_TOKEN": f"join-{secrets.token_hex(32)}"}
    ray.init(address=options.address, runtime_env={"env_vars": token}, log_to_driver=False)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = TorchTrainer(
            worker,
            train_loop_config={"epochs": options.epochs},
            torch_config=TorchConfig(backend="hoop"),
            scaling_config=ScalingConfig(num_workers=options.workers, resources_per_worker={"CPU": options.cpus}),
            run_config=RunConfig(storage_path=options.storage or scratch),
        )
        metrics = trainer.fit().metrics
    ray.shutdown()
    if metrics is None:
        raise SystemExit("the workers reported nothing")
    print(f"accuracy {metrics['accuracy']:.2%}  {metrics['workers']} workers, backend {metrics['backend']}")


if __name__ == "__main__":
    main()
