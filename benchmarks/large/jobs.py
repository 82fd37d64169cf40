"""Two large jobs: a GPT of 124 million parameters on tinyshakespeare, and an MLP with 1.15 GB of state.

    HOOP_DATA=FOLDER hoop train benchmarks/large/jobs.py:gpt --devices 4 --memory 3200MiB --set max_steps=2
    hoop train benchmarks/large/jobs.py:mlp --devices 3 --strategy pipeline --memory 2500MiB --set max_steps=5

The GPT has the 12 layers, the width of 768 and the 12 heads of GPT-2's smallest model, and as many parameters. GPT-2
ties its head to the embedding of 50257 tokens; Hoop's model does not, so that each belongs to one stage of a pipeline,
and has half as many tokens. The text has 65 characters: the other tokens cost memory and time as in a real vocabulary.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn

from hoop.data.dataset import Splits
from hoop.data.tensors import TensorData
from hoop.data.text import TextData, tinyshakespeare
from hoop.engine.job import Job
from hoop.models.catalog import build

CONTEXT, VOCABULARY = 64, 25_600
TEST_WINDOWS = 8
WIDTH, LAYERS = 4_800, 4
"""Of the MLP's hidden layers."""
BATCH, EPOCH_STEPS = 16, 5
"""Of the MLP: an epoch is short, because checkpoints are made after epochs."""


@lru_cache
def text() -> Splits:
    whole = tinyshakespeare(context=CONTEXT)
    assert isinstance(whole.test, TextData)
    few = whole.test.tokens[: TEST_WINDOWS * CONTEXT + 1]
    return Splits(whole.train, TextData("tinyshakespeare/few", few, whole.test.vocabulary, context=CONTEXT))


@lru_cache
def pixels() -> Splits:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH * EPOCH_STEPS, 784, generator=generator)
    labels = torch.randint(10, (len(images),), generator=generator)
    few = TensorData(images[:BATCH], labels[:BATCH], name="noise/test")
    return Splits(TensorData(images, labels, name="noise/train"), few)


def gpt_model(seed: int) -> nn.Module:
    return build("gpt", seed, vocabulary=VOCABULARY, context=CONTEXT, width=768, layers=12, heads=12)


def mlp_model(seed: int) -> nn.Module:
    return build("mlp", seed, widths=(784, *[WIDTH] * (LAYERS + 1), 10))


gpt = Job(
    gpt_model,
    text,
    settings={
        "epochs": 1,
        "batch_size": 4,
        "shards": 4,
        "optimizer": "sgd",  # with momentum: 1.0 GB of state
        "lr": 1e-2,
        "momentum": 0.9,
        "clip": 1.0,
        "balance": False,  # shards that never move need fewer gradient slots
        "evaluate_every": 0,
        "checkpoint_every": 0,
    },
    about="GPT of 124 million parameters, tinyshakespeare",
)
mlp = Job(
    mlp_model,
    pixels,
    settings={
        "epochs": 2,
        "batch_size": BATCH,
        "shards": 4,
        "optimizer": "adam",
        "lr": 1e-4,
        "evaluate_every": 0,
        "checkpoint_every": 0,
    },
    about="MLP of 96 million parameters, noise",
)
