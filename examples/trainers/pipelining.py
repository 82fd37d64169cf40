"""``torch.distributed.pipelining`` over Hoop: each process has one stage of a model, micro-batches flow through them.

torchrun --nproc-per-node 2 examples/trainers/pipelining.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

BATCH, SEQUENCE, VOCABULARY, MICRO_BATCHES = 16, 32, 64, 4


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


def loss_of(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description="A pipeline of torch.distributed.pipelining with backend='hoop'.")
    parser.add_argument("--backend", default="hoop")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, help="each rank writes its stage to this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)  # the only line that names Hoop
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = list(build_model())
    cuts = [len(layers) * index // size for index in range(size + 1)]
    layers = nn.Sequential(*layers[cuts[rank] : cuts[rank + 1]])
    stage = PipelineStage(layers, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)
    losses: list[torch.Tensor] = []  # of the last step's micro-batches, on the last rank
    for step in range(options.steps):
        inputs, labels = global_batch(step)
        losses.clear()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=labels, losses=losses)
        else:
            schedule.step()
        optimizer.step()
    loss = f", loss {torch.stack(losses).mean():.4f}" if losses else ""
    print(f"rank {rank} of {size} by {dist.get_backend()}: {options.steps} steps{loss}")
    if options.out:
        save_file(layers.state_dict(), options.out / f"rank-{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
