"""A user's own tensors as a dataset.

Any map-style torch dataset: ``len(dataset)`` and ``dataset[i]``, a pair of input and target.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import numpy as np
import torch

from hoop.data.dataset import Batch, Indices, checked, rows_of, sha256_of
from hoop.data.sampler import ITEM, random_draws
from hoop.errors import InvalidArgument


class TensorData:
    """Inputs and targets, a row a sample, handed out as they are.

    They are not copied: do not change them afterwards. (uint8 images are better off as ``ImageData``.)
    """

    fixed = True

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, *, name: str = "tensors") -> None:
        for field, tensor in (("inputs", inputs), ("targets", targets)):
            if tensor.dim() < 1 or tensor.device.type != "cpu":
                raise InvalidArgument(
                    f"{field}: {list(tensor.shape)} on {tensor.device} is not rows on the CPU"
                )
        if not len(inputs) == len(targets) > 0:
            raise InvalidArgument(
                f"inputs, targets: {len(inputs)} and {len(targets)} rows are not as many, or none"
            )
        self.name = name
        self.inputs, self.targets = inputs.detach().contiguous(), targets.detach().contiguous()

    def __len__(self) -> int:
        return len(self.inputs)

    @functools.cached_property
    def checksum(self) -> str:
        """The sha256 of the tensors: types, shapes and bytes."""
        return sha256_of(self.inputs, self.targets)

    def allocate(self, rows: int) -> Batch:
        inputs, targets = (t.new_empty((rows, *t.shape[1:])) for t in (self.inputs, self.targets))
        return inputs, targets

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        # A copy, because torch takes no read-only array, and an order's are.
        rows = torch.from_numpy(checked(indices, self).copy())
        inputs, targets = rows_of(out, len(rows), self)
        torch.index_select(self.inputs, 0, rows, out=inputs)
        torch.index_select(self.targets, 0, rows, out=targets)
        return inputs, targets


PROBES = 16
"""Samples that a checksum looks at: reading all may take longer than an epoch."""

_GENERATOR = threading.Lock()
"""torch has one CPU generator a process: two threads that load at once would share its numbers."""


class MapStyle(Protocol):
    """What ``torch.utils.data.Dataset`` promises, and lists of pairs too."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MapData:
    """A map-style dataset, sample by sample.

    Before each sample torch's generator is seeded by a hash of (seed, epoch, sample), so that random
    transforms that draw from torch do not depend on who loads a sample, or when.
    """

    fixed = False
    """Its transforms may draw."""

    def __init__(self, dataset: MapStyle, *, name: str = "", checksum: str = "") -> None:
        if len(dataset) < 1:
            raise InvalidArgument("dataset: it has no samples")
        self.dataset = dataset
        self.name = name or type(dataset).__name__
        self._checksum = checksum

    def __len__(self) -> int:
        return len(self.dataset)

    @functools.cached_property
    def checksum(self) -> str:
        """What was given, or the sha256 of the length and of 16 samples spread evenly from first to last."""
        if self._checksum:
            return self._checksum
        probes = np.unique(np.linspace(0, len(self) - 1, PROBES).astype(np.int64))
        inputs, targets = self.batch(probes, epoch=0, seed=0)
        return sha256_of(np.array([len(self)]), inputs, targets)

    def allocate(self, rows: int) -> Batch:
        inputs, targets = (t.new_empty((rows, *t.shape)) for t in self._first)
        return inputs, targets

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        samples = checked(indices, self)
        inputs, targets = rows_of(out, len(samples), self)
        with _GENERATOR, torch.random.fork_rng(devices=[]):
            for row, (sample, bits) in enumerate(
                zip(samples.tolist(), random_draws(samples, seed, epoch, ITEM).tolist(), strict=True)
            ):
                torch.default_generator.manual_seed(bits >> 1)
                _put(self._pair(sample), (inputs[row], targets[row]), f"{self.name}[{sample}]")
        return inputs, targets

    @functools.cached_property
    def _first(self) -> Batch:
        """What samples look like."""
        with _GENERATOR, torch.random.fork_rng(devices=[]):
            return self._pair(0)

    def _pair(self, sample: int) -> Batch:
        item = self.dataset[sample]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InvalidArgument(f"dataset: {self.name}[{sample}] is not a pair of input and target")
        inputs, targets = (torch.as_tensor(part) for part in item)
        return inputs, targets


def _put(item: Batch, rows: Batch, what: str) -> None:
    for field, value, row in zip(("input", "target"), item, rows, strict=True):
        if value.shape != row.shape:
            raise InvalidArgument(
                f"dataset: the {field} of {what} is {list(value.shape)}, that of the first {list(row.shape)}; "
                f"samples of one shape make a batch"
            )
        row.copy_(value)
