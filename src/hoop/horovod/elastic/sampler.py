"""A sampler that goes on in the middle of an epoch with another number of ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from hoop.horovod.basics import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Shares out the samples of an epoch that have not been processed yet among the ranks.

    Call ``record_batch`` after each batch, give the sampler to ``TorchState``, and call ``set_epoch`` after an epoch.
    Each rank gets equally many samples: at the end of an epoch some are used twice.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_indices: set[int] = set()
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: no sample is processed."""
        self.epoch = epoch
        self.processed_indices = set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Takes note that this rank has processed its batch ``batch_idx`` since the epoch or the last reset began."""
        self.record_indices(self.get_indices(batch_idx, batch_size))

    def record_indices(self, indices: list[int]) -> None:
        """Takes note of processed samples."""
        self.processed_indices.update(indices)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of a batch of this rank."""
        start = batch_idx * batch_size
        return self.indices[start : start + batch_size]

    def reset(self) -> None:
        """Shares out the remaining samples among the ranks there are now."""
        self.rank, self.num_replicas = rank(), size()
        remaining = [index for index in range(len(self.dataset)) if index not in self.processed_indices]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(remaining)
        self.remaining_indices = remaining
        self.num_samples = math.ceil(len(remaining) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas
        repeated = remaining * math.ceil(self.total_size / len(remaining)) if remaining else []
        self.indices = repeated[self.rank : self.total_size : self.num_replicas]

    def state_dict(self) -> dict[str, Any]:
        """The epoch and the processed samples."""
        return {"epoch": self.epoch, "processed_indices": sorted(self.processed_indices)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a ``state_dict``."""
        self.epoch = state["epoch"]
        self.processed_indices = set(state["processed_indices"])
        self.reset()

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
