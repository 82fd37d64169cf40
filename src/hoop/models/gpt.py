"""A small character-level GPT: embedding, transformer blocks, head. About 0.8 million parameters.

The head's weights are not tied to the embedding: tied weights would belong to the first and the last stage of a
pipeline at once.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from hoop.errors import InvalidArgument
from hoop.models.seeding import seeded

INIT_STD = 0.02
"""Standard deviation of initial weights."""


class Embedding(nn.Module):
    """Token embedding plus position embedding: (batch, time) to (batch, time, width)."""

    def __init__(self, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time = tokens.shape[-1]
        if time > self.position.num_embeddings:
            raise InvalidArgument(
                f"tokens: {time} in a row, but this model's context is {self.position.num_embeddings}"
            )
        embedded: torch.Tensor = self.token(tokens) + self.position.weight[:time]
        return embedded


class Attention(nn.Module):
    """Causal self-attention. ``take`` projects to query, key and value; ``give`` is the output projection.

    The names of submodules are part of checkpoints (``state_dict`` keys).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.take = nn.Linear(width, 3 * width)
        self.give = nn.Linear(width, width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        batch, time, width = stream.shape
        projected = self.take(stream).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: torch.Tensor = self.give(attended.transpose(1, 2).reshape(batch, time, width))
        return output


class Block(nn.Module):
    """Pre-norm transformer block: attention, then an MLP (``thought``), each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.thought = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = stream + self.attention(stream)
        output: torch.Tensor = stream + self.thought(stream)
        return output


def _initialise(model: nn.Sequential, layers: int) -> None:
    """Normal weights, zero biases; smaller weights in layers that add to the residual stream.

    Without that the stream's variance would grow with depth.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            residual = name.endswith(("give.weight", "thought.3.weight"))
            nn.init.normal_(parameter, std=INIT_STD / math.sqrt(2 * layers) if residual else INIT_STD)


def gpt(
    seed: int, *, vocabulary: int = 65, context: int = 128, width: int = 128, layers: int = 4, heads: int = 4
) -> nn.Sequential:
    """A GPT from token indices (batch, time) to logits of the next token (batch, time, vocabulary)."""
    for field, value in {"vocabulary": vocabulary, "context": context, "layers": layers, "heads": heads}.items():
        if value < 1:
            raise InvalidArgument(f"{field}: {value} is not at least 1")
    if width < 1 or width % heads:
        raise InvalidArgument(f"width: {width} does not divide among {heads} heads")
    with seeded(seed):
        blocks = [Block(width, heads) for _ in range(layers)]
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
        model = nn.Sequential(Embedding(vocabulary, context, width), *blocks, head)
        _initialise(model, layers)
    return model
