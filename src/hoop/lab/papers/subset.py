"""The first samples of a dataset, for short runs."""

from __future__ import annotations

from hoop.data.dataset import Batch, Dataset, Indices, Splits


class Subset:
    """The first ``count`` samples of a dataset, unchanged."""

    def __init__(self, whole: Dataset, count: int) -> None:
        self._whole, self._count = whole, min(count, len(whole))

    @property
    def name(self) -> str:
        return f"{self._whole.name}[:{self._count}]"

    @property
    def checksum(self) -> str:
        return self._whole.checksum

    @property
    def fixed(self) -> bool:
        return self._whole.fixed

    def __len__(self) -> int:
        return self._count

    def allocate(self, rows: int) -> Batch:
        return self._whole.allocate(rows)

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        return self._whole.batch(indices, epoch=epoch, seed=seed, out=out)


def subset_of(splits: Splits, train: int, test: int) -> Splits:
    return Splits(Subset(splits.train, train), Subset(splits.test, test))
