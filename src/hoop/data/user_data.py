"""The data that a program gives to ``hoop.train``, as ``Splits``, with the settings that a ``DataLoader`` states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hoop.data.dataset import Splits
from hoop.data.structured import NestedData, SampleData, StructuredDataset, as_tensor, is_array, is_columns
from hoop.data.tensors import MapData, TensorData
from hoop.errors import InvalidArgument


class TrainAndTest(NamedTuple):
    """Training and test data as a program gives them, each of any form."""

    train: Any
    test: Any


class UserData(NamedTuple):
    """Training and test data, and the settings that they state."""

    splits: Splits
    settings: dict[str, Any]


def user_data(
    data: Any, collate_fn: Callable[[list[Any]], Any] | None = None, num_workers: int | None = None
) -> UserData:
    """Data of any form: see ``hoop.train``. ``collate_fn`` and ``num_workers`` are for map-style datasets."""
    if isinstance(data, Splits):
        return UserData(data, {})
    loading = _Loading(collate_fn, num_workers)
    if isinstance(data, TrainAndTest) or _is_pair_of_splits(data):
        train, settings = loading.dataset(data[0], "train")
        test, _ = loading.dataset(data[1], "test")
        return UserData(Splits(train, test), settings)
    one, settings = loading.dataset(data, "train")
    return UserData(Splits(one, one), settings)


def _is_pair_of_splits(data: Any) -> bool:
    """Whether data is (train, test): a pair that is not (inputs, targets), whose second element is an array."""
    return isinstance(data, tuple | list) and len(data) == 2 and not is_array(data[1]) and not is_array(data[0])


class _Loading:
    """Makes datasets of user's data."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None, num_workers: int | None) -> None:
        if collate_fn is not None and not callable(collate_fn):
            raise InvalidArgument(f"collate_fn: {collate_fn!r:.80} is not a function of a list of samples")
        if num_workers is not None and (not isinstance(num_workers, int) or num_workers < 0):
            raise InvalidArgument(f"num_workers: {num_workers!r} is not a whole number of at least 0")
        self._collate, self._workers = collate_fn, num_workers

    def dataset(self, data: Any, name: str) -> tuple[Any, dict[str, Any]]:
        """A dataset, and the settings that it states."""
        if isinstance(data, DataLoader):
            return self._from_loader(data, name)
        if isinstance(data, IterableDataset):
            raise InvalidArgument(
                f"data: {type(data).__name__} is an IterableDataset: its samples have no numbers, so the samples of a "
                "lost device could not be read again. Give a map-style dataset (__getitem__ and __len__), or, if it "
                "fits in memory, list(dataset)"
            )
        if isinstance(data, StructuredDataset) or (hasattr(data, "batch") and hasattr(data, "checksum")):
            return data, {}
        if _is_two_arrays(data):
            inputs, targets = (as_tensor(one, field) for one, field in zip(data, ("inputs", "targets"), strict=True))
            return TensorData(inputs, targets, name=name), {}
        if isinstance(data, Mapping | tuple) and is_columns(data):
            return NestedData(data, name=name), {}
        if isinstance(data, tuple) and len(data) == 2 and is_array(data[0]):
            raise InvalidArgument(f"data: targets are {type(data[1]).__name__}; give a tensor or a NumPy array")
        if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | tuple | Mapping):
            return self._map_style(data, name), {}
        raise InvalidArgument(
            f"data: {type(data).__name__} is neither arrays nor a dataset; give tensors or NumPy arrays in dicts and "
            "tuples, a map-style torch Dataset, a DataLoader, or a pair of them for training and test"
        )

    def _map_style(self, data: Any, name: str) -> Any:
        if not len(data):
            raise InvalidArgument("data: the dataset has no samples")
        if self._collate is None and not self._workers and _has_pairs(data):
            return MapData(data, name=name)
        return SampleData(data, collate=self._collate, name=name, num_workers=self._workers or 0)

    def _from_loader(self, loader: DataLoader[Any], name: str) -> tuple[Any, dict[str, Any]]:
        dataset, sampler = loader.dataset, loader.sampler
        if isinstance(dataset, IterableDataset):
            return self.dataset(dataset, name)
        if loader.batch_size is None:
            raise InvalidArgument(
                "data: the DataLoader has no batch_size: Hoop makes the batches; give it one, or pass its dataset"
            )
        shuffles = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(dataset)  # type: ignore[arg-type]
        if not shuffles and type(sampler) is not SequentialSampler:
            raise InvalidArgument(
                f"data: the DataLoader has a sampler of its own, {type(sampler).__name__}: Hoop orders the samples, so "
                "that every device finds its shards. Pass the dataset (of the samples that you want), or use shuffle"
            )
        if self._collate is not None and self._collate is not loader.collate_fn:
            raise InvalidArgument("collate_fn: the DataLoader has its own; leave it out here")
        workers = loader.num_workers if self._workers is None else self._workers
        made = SampleData(dataset, collate=loader.collate_fn, name=name, num_workers=workers)
        return made, {"batch_size": loader.batch_size, "shuffle": shuffles, "drop_last": loader.drop_last}


def _is_two_arrays(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) == 2 and all(map(is_array, data))


def _has_pairs(data: Any) -> bool:
    """Whether the samples are pairs of an array, or a number, and another one: Hoop's ``MapData`` loads these."""
    first = data[0]
    return (
        isinstance(first, tuple | list)
        and len(first) == 2
        and all(is_array(one) or isinstance(one, int | float) for one in first)
    )
