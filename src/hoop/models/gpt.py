"""A small GPT over characters: embedding, transformer blocks, head. About 0.8 million parameters.

The head has weights of its own: shared with the embedding they would belong to the first and to the last
stage of a pipeline at once.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from hoop.errors import InvalidArgument
from hoop.models.seeding import seeded

SPREAD = 0.02
"""Standard deviation of fresh weights."""


class Embedding(nn.Module):
    """What each token is, plus where it stands: (batch, time) to (batch, time, width)."""

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
    """Causal self-attention: a token looks at itself and at what came before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.take = nn.Linear(width, 3 * width)
        self.give = nn.Linear(width, width)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        batch, time, width = stream.shape
        taken = self.take(stream).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = taken.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        given: torch.Tensor = self.give(seen.transpose(1, 2).reshape(batch, time, width))
        return given


class Block(nn.Module):
    """Attention, then two linear layers, each on a normalised copy and added back to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.thought = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = stream + self.attention(stream)
        thought: torch.Tensor = stream + self.thought(stream)
        return thought


def _initialise(model: nn.Sequential, layers: int) -> None:
    """Small weights; smaller where a block adds to the stream, which would grow with depth otherwise."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() > 1:
            adds = name.endswith(("give.weight", "thought.3.weight"))
            nn.init.normal_(parameter, std=SPREAD / math.sqrt(2 * layers) if adds else SPREAD)


def gpt(
    seed: int, *, vocabulary: int = 65, context: int = 128, width: int = 128, layers: int = 4, heads: int = 4
) -> nn.Sequential:
    """A GPT from token numbers (batch, time) to scores of the next token (batch, time, vocabulary)."""
    for field, value in {
        "vocabulary": vocabulary,
        "context": context,
        "layers": layers,
        "heads": heads,
    }.items():
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
