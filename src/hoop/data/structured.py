"""Samples of any structure: arrays in dicts and tuples (``NestedData``), or any map-style dataset (``SampleData``).

A batch is what the user's model and loss take: a tensor, or any nesting of dicts, tuples and named tuples. Both classes
have the interface of ``StructuredDataset``. Hoop's own datasets, whose batches are two tensors, have ``Dataset``'s.
"""

from __future__ import annotations

import functools
import hashlib
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hoop.data.dataset import Dataset, Indices, check_indices
from hoop.data.sampler import ITEM, random_draws
from hoop.errors import InvalidArgument

Collate = Callable[[list[Any]], Any]
"""Function that makes a batch of a list of samples, as ``DataLoader``'s ``collate_fn`` does."""
PROBES = 16
"""Number of samples that enter a checksum: reading all may take longer than an epoch."""
_RANDOM = threading.Lock()
"""Lock of the random generators: Python, NumPy and torch have one a process, and two threads that load would disturb
each other's draws."""
_COLLATE = 0x636F6C6C
"""Number combined with the seed of collate functions, so that their random numbers differ from those of samples."""


class StructuredDataset(ABC):
    """Samples by index, in batches of any structure. A sample is a function of (seed, epoch, index)."""

    name: str
    """Name of the dataset for users."""
    num_workers: int = 0
    """Number of processes that load batches ahead; 0: the training thread loads them."""

    @property
    @abstractmethod
    def checksum(self) -> str:
        """sha256 of the content: devices with equal checksums have equal data."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, indices: Indices, *, epoch: int, seed: int) -> Any:
        """The batch of these samples, in the given order."""


class PairData(StructuredDataset):
    """A dataset whose batches are two tensors, inputs and targets, as a structured one."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset, self.name = dataset, dataset.name

    def __len__(self) -> int:
        return len(self._dataset)

    @property
    def checksum(self) -> str:
        return self._dataset.checksum

    def load(self, indices: Indices, *, epoch: int, seed: int) -> Any:
        return self._dataset.batch(indices, epoch=epoch, seed=seed)


def structured(data: Dataset | StructuredDataset) -> StructuredDataset:
    """The dataset itself, or a ``PairData`` of it."""
    return data if isinstance(data, StructuredDataset) else PairData(data)


def leaves(tree: Any) -> Iterator[Any]:
    """The values in nested dicts, tuples and lists, in order."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from leaves(value)
    else:
        yield tree


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nesting of dicts, tuples and lists, with ``function`` of each value. Other objects are values."""
    if isinstance(tree, Mapping):
        mapped = {key: map_tree(function, value) for key, value in tree.items()}
        return mapped if type(tree) is dict else _like_mapping(tree, mapped)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tree(function, value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tree(function, value) for value in tree)
    return function(tree)


def _like_mapping(tree: Mapping[Any, Any], mapped: dict[Any, Any]) -> Any:
    """A mapping of the type of ``tree`` (an OrderedDict, a transformers.BatchEncoding), or a dict."""
    try:
        return type(tree)(mapped)  # type: ignore[call-arg]
    except TypeError:
        return mapped


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``."""
    return map_tree(lambda one: one.to(device) if isinstance(one, Tensor) else one, batch)


def as_tensor(values: Any, field: str) -> Tensor:
    """A tensor or an array as a contiguous tensor in host memory.

    NumPy's float64 becomes float32, as NumPy makes it of every list of numbers; a tensor keeps its type.
    """
    if isinstance(values, Tensor):
        return values.detach().cpu().contiguous()
    array = np.asarray(values)
    kind = np.dtype(np.float32) if array.dtype == np.float64 else array.dtype.newbyteorder("=")
    if kind.kind not in "biuf":
        raise InvalidArgument(f"data: {field} is an array of {array.dtype}; give an array of numbers")
    array = array.astype(kind, order="C", copy=not array.flags.writeable)  # torch takes no read-only arrays
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise InvalidArgument(f"data: {field} is an array that PyTorch does not take: {error}") from None


def is_array(values: Any) -> bool:
    """Whether these are a tensor, or what NumPy takes for an array."""
    return isinstance(values, Tensor) or hasattr(values, "__array__")


class NestedData(StructuredDataset):
    """Arrays in nested dicts and tuples, each with a row for each sample. A batch has the same nesting."""

    def __init__(self, columns: Any, *, name: str = "arrays") -> None:
        self.name = name
        self.columns = _as_columns(columns, "data")
        rows = {len(one) for one in leaves(self.columns)}
        if not rows:
            raise InvalidArgument("data: there is no array in it")
        if len(rows) > 1 or rows == {0}:
            raise InvalidArgument(
                f"data: its arrays have {', '.join(map(str, sorted(rows)))} rows; each needs a row a sample, the same "
                "number in all, at least 1"
            )
        self._length = rows.pop()

    def __len__(self) -> int:
        return self._length

    @functools.cached_property
    def checksum(self) -> str:
        """sha256 of the nesting, and of the types, shapes and bytes of the arrays."""
        digest = hashlib.sha256(repr(map_tree(lambda one: None, self.columns)).encode())
        for one in leaves(self.columns):
            _add_tensor(digest, one)
        return digest.hexdigest()

    def load(self, indices: Indices, *, epoch: int, seed: int) -> Any:
        # A copy, because torch rejects read-only arrays, and those of SampleOrder are read-only.
        rows = torch.from_numpy(check_rows(indices, self).copy())
        return map_tree(lambda one: torch.index_select(one, 0, rows), self.columns)


def _as_columns(tree: Any, path: str) -> Any:
    if is_array(tree):
        return as_tensor(tree, path)
    if isinstance(tree, Mapping):
        return {key: _as_columns(value, f"{path}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, tuple | list) and tree and all(_is_columns(one) for one in tree):
        return tuple(_as_columns(value, f"{path}[{index}]") for index, value in enumerate(tree))
    raise InvalidArgument(
        f"{path}: {type(tree).__name__} is no array; give tensors or NumPy arrays in dicts and tuples, or a map-style "
        "dataset"
    )


def _is_columns(tree: Any) -> bool:
    return is_array(tree) or isinstance(tree, Mapping | tuple | list)


def is_columns(tree: Any) -> bool:
    """Whether this is a nesting of dicts and tuples with an array as every value."""
    if isinstance(tree, Mapping | tuple | list):
        return bool(tree) and all(is_columns(one) for one in (tree.values() if isinstance(tree, Mapping) else tree))
    return is_array(tree)


class SampleData(StructuredDataset):
    """A map-style dataset whose samples are loaded one by one and made a batch by a collate function.

    Before each sample, and before each call of the collate function, the generators of Python, NumPy and torch are
    seeded by a hash of (seed, epoch, sample). So random transforms do not depend on the device that loads a sample, or
    on the order of loading.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Collate | None = None,
        name: str = "",
        checksum: str = "",
        num_workers: int = 0,
    ) -> None:
        """``collate``: by default PyTorch's, after lists of numbers in samples were made tensors."""
        if len(dataset) < 1:
            raise InvalidArgument("data: the dataset has no samples")
        if num_workers < 0:
            raise InvalidArgument(f"num_workers: {num_workers} is not 0 or more")
        self.dataset, self.num_workers = dataset, num_workers
        self.name = name or type(dataset).__name__
        self._collate: Collate = collate or default_batch
        self._checksum = checksum

    def __len__(self) -> int:
        return len(self.dataset)

    @functools.cached_property
    def checksum(self) -> str:
        """The checksum given by the user, or sha256 of the length and of batches of 16 evenly spaced samples."""
        if self._checksum:
            return self._checksum
        digest = hashlib.sha256(str(len(self)).encode())
        for index in np.unique(np.linspace(0, len(self) - 1, PROBES).astype(np.int64)):
            for one in leaves(self.load(np.array([index]), epoch=0, seed=0)):
                _add_tensor(digest, one) if isinstance(one, Tensor) else digest.update(repr(one).encode())
        return digest.hexdigest()

    def load(self, indices: Indices, *, epoch: int, seed: int) -> Any:
        samples = check_rows(indices, self)
        draws = random_draws(samples, seed, epoch, ITEM).tolist()
        with _RANDOM, generators_restored():
            items = []
            for sample, bits in zip(samples.tolist(), draws, strict=True):
                seed_generators(bits)
                items.append(self.dataset[sample])
            seed_generators(draws[0] ^ _COLLATE if draws else 0)
            return self._collate(items)


def check_rows(indices: Indices, data: StructuredDataset) -> Indices:
    """The indices if they are valid for the dataset; raises otherwise."""
    as_dataset: Dataset = data  # type: ignore[assignment]  # name and length are all that is asked of it
    return check_indices(indices, as_dataset)


def seed_generators(bits: int) -> None:
    """Seeds the generators of Python, NumPy and torch (on the CPU)."""
    torch.default_generator.manual_seed(bits >> 1)
    random.seed(bits)
    np.random.seed(bits & 0xFFFFFFFF)


class generators_restored:  # noqa: N801 - reads like a statement
    """Context manager that restores the generators of Python, NumPy and torch (on the CPU)."""

    def __enter__(self) -> None:
        self._states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()

    def __exit__(self, *_: object) -> None:
        python, numpy, torchs = self._states
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torchs)


def default_batch(items: list[Any]) -> Any:
    """A batch of samples by PyTorch's rules; a list of numbers in a sample is an array. Raises if shapes differ."""
    made = [_with_arrays(one) for one in items]
    try:
        return default_collate(made)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        raise InvalidArgument(
            f"data: {len(items)} samples do not make a batch ({error}); give collate_fn, a function of a list of "
            "samples that returns a batch, for example one that pads"
        ) from None


def _with_arrays(sample: Any) -> Any:
    if isinstance(sample, list) and sample and all(isinstance(one, int | float) for one in sample):
        return torch.tensor(sample)
    if isinstance(sample, Mapping):
        return {key: _with_arrays(value) for key, value in sample.items()}
    if isinstance(sample, tuple) and not hasattr(sample, "_fields"):
        return tuple(map(_with_arrays, sample))
    return [_with_arrays(one) for one in sample] if isinstance(sample, list) else sample


def _add_tensor(digest: Any, tensor: Tensor) -> None:
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)


def split_pair(batch: Any, name: str) -> tuple[Any, Any]:
    """Inputs and targets of a batch, which must be a pair; raises with the remedy otherwise."""
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
        return batch[0], batch[1]
    found = f"a dict with {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else type(batch).__name__
    raise InvalidArgument(
        f"loss: a batch of {name} is {found}, not a pair of inputs and targets; give a loss that takes the batch as it "
        "is: def loss(model, batch)"
    )
