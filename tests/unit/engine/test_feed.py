"""The data feed: which micro-batches it caches between steps, and which it reads again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hoop.data.dataset import Batch, Indices
from hoop.data.images import Augment, ImageData
from hoop.data.sampler import SampleOrder, shard
from hoop.engine.data_feed import DataFeed, Position

SAMPLES, MICROS = 30, 4
SHARD_BYTES = 8 * (16 * 4 + 8)
"""Size of the largest shard: eight images of 16 floats, each with a label."""


class CountingImageData(ImageData):
    """Counts its reads."""

    reads = 0

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        self.reads += 1
        return super().batch(indices, epoch=epoch, seed=seed, out=out)


def data(augment: Augment | None = None) -> CountingImageData:
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (SAMPLES, 1, 4, 4), np.uint8)
    return CountingImageData("few", images, np.arange(SAMPLES) % 10, augment=augment)


def read_all(feed: DataFeed, source: CountingImageData, batch_size: int, epochs: int) -> None:
    """Read every micro-batch of every step, and compare it with the samples themselves."""
    order = SampleOrder(1, SAMPLES)
    for epoch in range(epochs):
        for step in range(order.steps(batch_size)):
            samples = order.indices(epoch, step, batch_size)
            feed.begin(Position(epoch, step, epoch), samples, MICROS)
            for micro in range(MICROS):
                inputs, targets = feed.inputs(micro), feed.targets(micro)
                expected = ImageData.batch(source, shard(samples, micro, MICROS), epoch=epoch, seed=1)
                assert torch.equal(inputs, expected[0])
                assert torch.equal(targets, expected[1])
                feed.release(micro)


@pytest.mark.parametrize(
    ("room", "reads"),
    [(0, 12), (2 * SHARD_BYTES, 4 + 2 * 2), (4 * SHARD_BYTES, 4)],
    ids=["nothing fits", "two shards fit", "all fit"],
)
def test_a_batch_of_all_samples_is_read_once_if_the_cache_is_large_enough(room: int, reads: int) -> None:
    source = data()
    feed = DataFeed(source, 1, 8)
    feed.cache_bytes = room
    read_all(feed, source, SAMPLES, 3)
    assert source.reads == reads


@pytest.mark.parametrize("batch_size", [7, 29])
def test_smaller_batches_are_never_cached(batch_size: int) -> None:
    source = data()
    feed = DataFeed(source, 1, 8)
    feed.cache_bytes = 1 << 20
    read_all(feed, source, batch_size, 2)
    assert source.reads == 2 * MICROS * SampleOrder(1, SAMPLES).steps(batch_size)


def test_augmented_samples_are_never_cached() -> None:
    source = data(Augment(flip=True))
    feed = DataFeed(source, 1, 8)
    feed.cache_bytes = 1 << 20
    read_all(feed, source, SAMPLES, 3)
    assert source.reads == 3 * MICROS


def test_batched_micro_batches_are_cached_as_one() -> None:
    source = data()
    feed = DataFeed(source, 1, 8)
    feed.cache_bytes = 1 << 20
    for epoch in range(3):
        samples = SampleOrder(1, SAMPLES).indices(epoch, 0, SAMPLES)
        feed.begin(Position(epoch, 0, epoch), samples, MICROS)
        inputs, _ = feed.read_batched([1, 2])
        assert torch.equal(inputs, ImageData.batch(source, samples[7:22], epoch=0, seed=1)[0])
        feed.release(1)
    assert source.reads == 1
