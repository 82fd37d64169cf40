"""A Hugging Face model's own loss in ``hoop.train``: padded batches train as in PyTorch on the whole batch."""

from __future__ import annotations

import functools
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from forked_ranks import checkpoint, tensors_in, train
from small_jobs import settings
from torch import Tensor, nn

from hoop.data.dataset import Splits
from hoop.data.structured import NestedData
from hoop.engine.job import Job

pytestmark = pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: pip install 'hoop[trainers]'"
)

SAMPLES, LENGTH, TOKENS, BATCH, RATE = 32, 10, 50, 16, 0.3


@functools.cache
def batches() -> dict[str, Tensor]:
    """Texts of different lengths, padded on the right; the labels are -100 there."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, TOKENS, (SAMPLES, LENGTH), generator=generator)
    lengths = torch.randint(3, LENGTH + 1, (SAMPLES,), generator=generator)
    mask = torch.arange(LENGTH) < lengths.unsqueeze(1)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, ids, -100)}


def model(seed: int) -> nn.Module:
    transformers: Any = import_module("transformers")
    torch.manual_seed(seed)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": None, "eos_token_id": None}
    made: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=TOKENS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, **dropout, **ends
        )
    )
    return made


def own(net: Any, batch: Any) -> Any:
    return net(**batch).loss


def counted(net: Any, batch: Any) -> Any:
    labels = batch["labels"][:, 1:]
    logits = net(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total, (labels != -100).sum()


def trained(loss: Any, shards: int, size: int = 1) -> dict[str, Tensor]:
    data = NestedData(batches())
    job = Job(model, lambda: Splits(data, data), loss)
    changes: dict[str, Any] = {"optimizer": "sgd", "lr": RATE, "epochs": 1, "batch_size": BATCH, "shuffle": False}
    return tensors_in(checkpoint(train("shm", size, settings("data", shards=shards, **changes), job)))


def trained_plain() -> dict[str, Tensor]:
    net: Any = model(0)
    optimizer = torch.optim.SGD(net.parameters(), RATE)
    for low in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        net(**{name: one[low : low + BATCH] for name, one in batches().items()}).loss.backward()
        optimizer.step()
    return dict(net.named_parameters())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_padded_batches_train_as_the_whole_batch_in_pytorch() -> None:
    plain = trained_plain()
    for shards, size in ((1, 1), (4, 1), (8, 2)):
        found, expected = trained(own, shards, size), trained(counted, shards)
        for name, one in plain.items():
            assert torch.equal(found[name], expected[name]), f"{name}, {shards} shards"
            assert torch.allclose(found[name], one, atol=1e-6), f"{name}, {shards} shards"
