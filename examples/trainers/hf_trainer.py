"""Hugging Face's ``Trainer`` over Hoop's collectives: GPT-2 with random weights learns to count.

HOOP_REPLACE_GLOO=1 torchrun --nproc-per-node 2 examples/trainers/hf_trainer.py --cpu

On GPUs ``ddp_backend="hoop"`` is all. On CPUs ``Trainer`` accepts no name but Gloo's, and ``HOOP_REPLACE_GLOO=1`` makes
Gloo's groups Hoop's.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SAMPLES, SEQUENCE, VOCABULARY = 256, 32, 64


def build_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": SEQUENCE, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    )


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(SEQUENCE)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description="Hugging Face's Trainer with Hoop's collectives.")
    parser.add_argument("--cpu", action="store_true", help="on CPUs, also where there is a GPU")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="each rank writes the model to this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu = torch.cuda.is_available() and not options.cpu
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=not on_gpu,
            ddp_backend="hoop" if on_gpu else None,
            num_train_epochs=options.epochs,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = build_model()
        result = Trainer(model, arguments, train_dataset=Counting()).train()
    rank, size = arguments.process_index, arguments.world_size
    loss = result.training_loss
    print(f"rank {rank} of {size} by {dist.get_backend()}: average loss {loss:.4f}", flush=True)
    if options.out:
        weights = {name: one.detach().cpu().clone() for name, one in model.named_parameters()}
        save_file(weights, options.out / f"rank-{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
