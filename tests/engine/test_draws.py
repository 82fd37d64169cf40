"""Random numbers that a block draws by functions in its own code depend on the shard and not on the device."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from forked_ranks import checkpoint, differing, tensors_in, train
from short_jobs import mnist
from small_jobs import settings
from torch import Tensor, nn

from hoop.engine.job import Job


class Dropping(nn.Module):
    """Draws random numbers, but contains no random layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(784, 20)

    def forward(self, images: Tensor) -> Tensor:
        return F.dropout(self.inner(images.flatten(1)), 0.5, self.training)


def dropping(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(Dropping(), nn.Linear(20, 10))


def test_random_functions_in_a_block_are_seeded() -> None:
    job = Job(dropping, mnist)
    one, three = (tensors_in(checkpoint(train("shm", devices, settings("data"), job))) for devices in (1, 3))
    assert differing(one, three) == []
