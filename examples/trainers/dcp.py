"""Distributed checkpoints (``torch.distributed.checkpoint``) over Hoop: two processes save, one goes on.

torchrun --nproc-per-node 2 examples/trainers/dcp.py --checkpoint counting --steps 20
torchrun --nproc-per-node 1 examples/trainers/dcp.py --checkpoint counting --steps 30    goes on at step 20
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

BATCH, VOCABULARY = 32, 64


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, VOCABULARY))


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers; the model learns the next one."""
    numbers = torch.randint(VOCABULARY, (BATCH,), generator=torch.Generator().manual_seed(step))
    return numbers, (numbers + 1) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP2 with distributed checkpoints, backend='hoop'.")
    parser.add_argument("--backend", default="hoop")
    parser.add_argument("--steps", type=int, default=20, help="train until this step")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder; training goes on from it if it exists")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)  # the only line that names Hoop
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build_model()
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    done = 0
    if (options.checkpoint / ".metadata").exists():  # written last, by rank 0
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": torch.zeros((), dtype=torch.int64)}
        dcp.load(state, checkpoint_id=options.checkpoint)  # each rank reads the parts that it needs
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        done = int(state["step"])

    share, loss = BATCH // size, torch.zeros(())
    for step in range(done, options.steps):
        inputs, labels = (part[rank * share : (rank + 1) * share] for part in global_batch(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()

    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": torch.tensor(options.steps)}
    dcp.save(state, checkpoint_id=options.checkpoint)  # each rank writes its own part
    print(f"rank {rank} of {size} by {dist.get_backend()}: steps {done} to {options.steps}, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
