"""FSDP2 (``fully_shard``) over Hoop's collectives: each process has its part of parameters, gradients and optimizer.

torchrun --nproc-per-node 2 examples/trainers/fsdp2.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

BATCH, SEQUENCE, VOCABULARY = 16, 32, 64


def build_model() -> nn.Sequential:
    """A small transformer; the same weights on every rank."""
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCABULARY, 64), *blocks, nn.Linear(64, VOCABULARY))


def global_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count; the model learns the next token."""
    starts = torch.randint(VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + torch.arange(SEQUENCE + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def train(model: nn.Module, steps: int, rank: int, size: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    share, loss = BATCH // size, torch.zeros(())
    for step in range(steps):
        # Each rank takes its own slice of the global batch.
        inputs, labels = (part[rank * share : (rank + 1) * share] for part in global_batch(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description="FSDP2 with backend='hoop'.")
    parser.add_argument("--backend", default="hoop")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="each rank writes the whole model to this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)  # the only line that names Hoop
    rank, size = dist.get_rank(), dist.get_world_size()
    model = build_model()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    loss = train(model, options.steps, rank, size)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=False))
    print(f"rank {rank} of {size} by {dist.get_backend()}: loss {loss:.4f} after {options.steps} steps")
    if options.out:
        save_file(whole, options.out / f"rank-{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
