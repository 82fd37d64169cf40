"""Fine-tuning of a causal language model: batches are dicts, sequences are padded, the loss is a mean over tokens.

    python examples/own_code/language_model.py                     trains it on 1 and 2 devices: the same weights

The batches and the model's call are those of Hugging Face's models: ``model(input_ids=…, attention_mask=…)``.
"""

from __future__ import annotations

import argparse
import functools
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor, nn

import hoop

VOCABULARY, WIDTH, LONGEST, PAD, IGNORED = 64, 32, 24, 0, -100


class CausalLM(nn.Module):
    """A small transformer whose head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LONGEST, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        length = input_ids.shape[1]
        hidden = self.embedding(input_ids) + self.positions(torch.arange(length))
        causal = torch.triu(torch.full((length, length), -torch.inf), diagonal=1)
        padding = torch.zeros(attention_mask.shape).masked_fill(attention_mask == 0, -torch.inf)
        return {"logits": self.head(self.block(hidden, src_mask=causal, src_key_padding_mask=padding))}


def build(seed: int) -> nn.Module:
    """The model, the same for the same seed."""
    torch.manual_seed(seed)
    return CausalLM()


class Sentences(torch.utils.data.Dataset[dict[str, list[int]]]):
    """Sequences of different lengths, each of which counts up by a step of its own."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        length, step = 4 + index % (LONGEST - 4), 1 + index % 5
        return {"input_ids": [1 + (index + step * place) % (VOCABULARY - 1) for place in range(length)]}


def pad(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch, padded to its longest sequence; padding has no label."""
    longest = max(len(one["input_ids"]) for one in samples)
    rows = [one["input_ids"] + [PAD] * (longest - len(one["input_ids"])) for one in samples]
    labels = [one["input_ids"][1:] + [IGNORED] * (longest - len(one["input_ids"]) + 1) for one in samples]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": torch.tensor(labels)}


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    """The sum over the tokens of a shard, and their number: the mean over the tokens of a batch is minimised."""
    logits, labels = model(batch["input_ids"], batch["attention_mask"])["logits"], batch["labels"]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    tokens = (labels != IGNORED).sum()
    right = (logits.argmax(-1) == labels).sum()
    return {"loss": (total, tokens), "token_accuracy": (right, tokens)}


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for biases and norms."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return [
        {"params": [one for one in trained if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.dim() <= 1], "weight_decay": 0.0},
    ]


def train(devices: int, epochs: int = 3, **settings: Any) -> hoop.Result:
    """AdamW with parameter groups, warm-up and a cosine schedule; clipping."""
    return hoop.train(
        build,
        Sentences(),
        collate_fn=pad,
        loss=token_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-3),
        parameter_groups=decay_groups,
        schedule="cosine",
        warmup=5,
        clip=1.0,
        devices=devices,
        epochs=epochs,
        batch_size=40,
        shards=4,
        **settings,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="A language model on 1 and 2 devices.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    checksums = set()
    for devices in options.devices:
        result = train(devices, options.epochs)
        checksums.add(result.weights_sha256)
        print(f"{devices} devices: loss {result.loss:.4f}, token accuracy {result.metrics['token_accuracy']:.1%}")
    print("the same weights, to the bit" if len(checksums) == 1 else "the weights differ")


if __name__ == "__main__":
    main()
