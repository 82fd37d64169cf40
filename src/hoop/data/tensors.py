"""A user's own data as a dataset: tensors (``TensorData``), or any map-style torch dataset (``MapData``)."""

from __future__ import annotations

import functools
import threading
from typing import Any, Protocol

import numpy as np
import torch

from hoop.data.dataset import Batch, Indices, check_indices, output_rows, sha256_of
from hoop.data.sampler import ITEM, random_draws
from hoop.errors import InvalidArgument


class TensorData:
    """Input and target tensors, one row per sample, without transforms.

    The tensors are not copied: do not change them afterwards. For uint8 images use ``ImageData``.
    """

    fixed = True

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, *, name: str = "tensors") -> None:
        for field, tensor in (("inputs", inputs), ("targets", targets)):
            if tensor.dim() < 1 or tensor.device.type != "cpu":
                raise InvalidArgument(f"{field}: {list(tensor.shape)} on {tensor.device} is not rows on the CPU")
        if not len(inputs) == len(targets) > 0:
            raise InvalidArgument(
                f"inputs, targets: {len(inputs)} and {len(targets)} rows; both need the same number, at least 1"
            )
        self.name = name
        self.inputs, self.targets = inputs.detach().contiguous(), targets.detach().contiguous()

    def __len__(self) -> int:
        return len(self.inputs)

    @functools.cached_property
    def checksum(self) -> str:
        """sha256 of the tensors' dtypes, shapes and bytes."""
        return sha256_of(self.inputs, self.targets)

    def allocate(self, rows: int) -> Batch:
        inputs, targets = (t.new_empty((rows, *t.shape[1:])) for t in (self.inputs, self.targets))
        return inputs, targets

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        # A copy, because torch rejects read-only arrays, and the arrays of SampleOrder are read-only.
        rows = torch.from_numpy(check_indices(indices, self).copy())
        inputs, targets = output_rows(out, len(rows), self)
        torch.index_select(self.inputs, 0, rows, out=inputs)
        torch.index_select(self.targets, 0, rows, out=targets)
        return inputs, targets


PROBES = 16
"""Number of samples that enter a checksum: reading all may take longer than an epoch."""

_GENERATOR = threading.Lock()
"""Lock of torch's CPU generator, one per process: two threads that load at the same time would disturb each other's
draws."""


class MapStyle(Protocol):
    """The interface of ``torch.utils.data.Dataset``; a list of pairs has it too."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class MapData:
    """A map-style dataset whose samples are pairs of input and target, loaded one by one.

    Before each sample torch's generator is seeded by a hash of (seed, epoch, sample). So random transforms that draw
    from torch do not depend on the device that loads a sample, or on the order of loading.
    """

    fixed = False
    """Samples may differ from epoch to epoch: transforms may be random."""

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
        """The checksum given by the user, or sha256 of the length and of 16 evenly spaced samples."""
        if self._checksum:
            return self._checksum
        probes = np.unique(np.linspace(0, len(self) - 1, PROBES).astype(np.int64))
        inputs, targets = self.batch(probes, epoch=0, seed=0)
        return sha256_of(np.array([len(self)]), inputs, targets)

    def allocate(self, rows: int) -> Batch:
        inputs, targets = (t.new_empty((rows, *t.shape)) for t in self._template)
        return inputs, targets

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        samples = check_indices(indices, self)
        inputs, targets = output_rows(out, len(samples), self)
        with _GENERATOR, torch.random.fork_rng(devices=[]):
            for row, (sample, bits) in enumerate(
                zip(samples.tolist(), random_draws(samples, seed, epoch, ITEM).tolist(), strict=True)
            ):
                torch.default_generator.manual_seed(bits >> 1)
                _copy_sample(self._pair(sample), (inputs[row], targets[row]), f"{self.name}[{sample}]")
        return inputs, targets

    @functools.cached_property
    def _template(self) -> Batch:
        """Sample 0, for shapes and dtypes."""
        with _GENERATOR, torch.random.fork_rng(devices=[]):
            return self._pair(0)

    def _pair(self, sample: int) -> Batch:
        item = self.dataset[sample]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InvalidArgument(
                f"dataset: {self.name}[{sample}] is not a pair of input and target, but {type(item).__name__}; give "
                "(inputs, targets) as two tensors or NumPy arrays, or a dataset whose samples are such pairs"
            )
        inputs, targets = (
            _as_tensor(part, f"the {field} of {self.name}[{sample}]")
            for field, part in zip(("input", "target"), item, strict=True)
        )
        return inputs, targets


def _as_tensor(value: Any, what: str) -> torch.Tensor:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(
            f"dataset: {what}, {type(value).__name__}, is no tensor, array or number: {error}; transform it to one"
        ) from None


def _copy_sample(item: Batch, rows: Batch, what: str) -> None:
    for field, value, row in zip(("input", "target"), item, rows, strict=True):
        if value.shape != row.shape:
            raise InvalidArgument(
                f"dataset: the {field} of {what} is {list(value.shape)}, that of the first {list(row.shape)}; "
                f"samples of one shape make a batch"
            )
        row.copy_(value)
