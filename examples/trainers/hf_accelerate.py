"""Hugging Face's ``accelerate`` over Hoop's collectives.

HOOP_REPLACE_GLOO=1 torchrun --nproc-per-node 2 examples/trainers/hf_accelerate.py --cpu

On GPUs ``InitProcessGroupKwargs(backend="hoop")`` is all, with ``accelerate launch`` or torchrun. On CPUs
``Accelerator`` accepts no name but Gloo's, and ``HOOP_REPLACE_GLOO=1`` makes Gloo's groups Hoop's. There
``accelerate launch`` starts several processes only through mpirun.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, FEATURES, CLASSES = 512, 16, 4


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser(description="accelerate with Hoop's collectives.")
    parser.add_argument("--cpu", action="store_true", help="on CPUs, also where there is a GPU")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="each rank writes the model to this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() and not options.cpu
    accelerator = Accelerator(
        cpu=not on_gpu, kwargs_handlers=[InitProcessGroupKwargs(backend="hoop")] if on_gpu else None
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = DataLoader(dataset(), batch_size=32, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    loss = torch.zeros(())
    for _ in range(options.epochs):
        for inputs, labels in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            optimizer.step()
    average = accelerator.reduce(loss.detach(), "mean").item()
    rank, size = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {size} by {dist.get_backend()}: loss {average:.4f}", flush=True)
    if options.out:
        weights = {name: one.cpu() for name, one in accelerator.get_state_dict(model).items()}
        save_file(weights, options.out / f"rank-{rank}.safetensors")
    accelerator.end_training()


if __name__ == "__main__":
    main()
