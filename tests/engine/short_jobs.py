"""The jobs of ``small_jobs`` with half the steps: for tests of training without faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import small_jobs
from forked_ranks import checkpoint, tensors_in
from small_jobs import BATCH, first_of_mnist, trained_alone
from torch import Tensor

from hoop.data.dataset import Splits

SAMPLES = 132
"""As in ``small_jobs``, the last step of an epoch has 6 samples: fewer than 8 shards, so some of them are empty."""
STEPS = -(-SAMPLES // BATCH)


def mnist() -> Splits:
    return first_of_mnist(SAMPLES)


JOBS = {name: replace(job, data=mnist) for name, job in small_jobs.JOBS.items()}


def alone(job: str, changes: tuple[tuple[str, Any], ...] = ()) -> dict[str, Tensor]:
    """Weights and optimizer state after data parallel training on one device."""
    return tensors_in(checkpoint([trained_alone(job, mnist, changes)]))
