"""A loop with ``hoop.elastic`` in the workers of Ray Train: ``ray_own_loop.py ADDRESS FOLDER``, run by ``test_ray.py``.

Every worker writes the hash of its weights into the folder; the last line printed is that of one device without Ray.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import hoop.elastic


def train(**where: Any) -> tuple[int, str]:
    """The rank, and the hash of the trained weights."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(120, 6)
    data = (inputs, inputs.argmax(1) % 3)
    run = hoop.elastic.Run(model=model, optimizer=optimizer, data=data, batch_size=24, shards=4, epochs=3, **where)
    for step in run.steps():
        for x, y in step.shards():
            step.backward(nn.functional.cross_entropy(model(x), y), weight=len(y))
        step.update()
    weights = b"".join(one.detach().numpy().tobytes() for one in model.state_dict().values())
    return run.rank, hashlib.sha256(weights).hexdigest()


def worker(config: dict[str, Any]) -> None:
    rank, digest = train(on="torchrun")
    (Path(config["folder"]) / f"rank-{rank}").write_text(digest)


def main() -> None:
    address, folder = sys.argv[1:]
    ray.init(address=address, runtime_env={"env_vars": {"HOOP_TOKEN": f"join-{secrets.token_hex(32)}"}})
    trainer = TorchTrainer(
        worker,
        train_loop_config={"folder": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=folder),
    )
    trainer.fit()
    ray.shutdown()
    print(train()[1])


if __name__ == "__main__":
    main()
