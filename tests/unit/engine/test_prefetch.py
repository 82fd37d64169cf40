"""Samples of the next step that are loaded while a rank waits: the same as without, wanted or not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from hoop.data.dataset import Batch, Indices
from hoop.data.images import Augment, ImageData
from hoop.data.sampler import SampleOrder, shard
from hoop.engine.data_feed import DataFeed, Position
from hoop.engine.prefetched_batch import MIN_ROWS, PIECES, PrefetchedBatch, SampleBuffer
from hoop.engine.prefetcher import Prefetcher
from hoop.engine.settings import Settings
from hoop.engine.step_schedule import StepSchedule, StepWork

SAMPLES, SEED = 1000, 3
AUGMENT = Augment(flip=True, crop=1)


class CountingData(ImageData):
    """Counts the samples that are read, and the batches that are allocated; raises where a test says."""

    read = allocated = 0
    damaged = -1
    """A sample that cannot be read."""

    def allocate(self, rows: int) -> Batch:
        self.allocated += rows > 0
        return super().allocate(rows)

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        self.read += len(indices)
        if self.damaged in indices:
            raise OSError("a damaged sample")
        return super().batch(indices, epoch=epoch, seed=seed, out=out)


def data(samples: int = SAMPLES, augment: Augment | None = AUGMENT) -> CountingData:
    images = np.random.default_rng(5).integers(0, 256, (samples, 1, 4, 4), np.uint8)
    return CountingData("few", images, np.arange(samples) % 10, augment=augment)


def check(found: Batch, source: ImageData, samples: Indices, epoch: int) -> None:
    expected = ImageData.batch(source, samples, epoch=epoch, seed=SEED)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("rows", [1, MIN_ROWS - 1, MIN_ROWS, MIN_ROWS + 1, PIECES * MIN_ROWS, 100, 257])
@pytest.mark.parametrize("pieces", range(PIECES + 1))
def test_a_batch_in_pieces_has_the_samples_of_a_batch_at_once(rows: int, pieces: int) -> None:
    source, samples = data(), SampleOrder(1, SAMPLES).indices(2, 0, rows)
    batch = PrefetchedBatch(source, samples, 2, SEED, SampleBuffer(source.allocate(rows + 5)))
    for _ in range(pieces):
        if not batch.complete:
            batch.load_piece()
    check(batch.finish(), source, samples, 2)
    assert batch.complete
    assert source.read == rows, "every sample is read once"


def begin(feed: DataFeed, step: int, batch_size: int, microbatches: int) -> Indices:
    samples = SampleOrder(1, SAMPLES).indices(1, step, batch_size)
    feed.begin(Position(1, step, step), samples, microbatches)
    return samples


def prefetch(feed: DataFeed, step: int, batch_size: int, which: Sequence[int], count: int) -> int:
    """Loads all pieces of a step's first batch; returns their number."""
    samples = SampleOrder(1, SAMPLES).indices(1, step, batch_size)
    pieces = 0
    while feed.prefetch_piece(Position(1, step, step), samples, which, count):
        pieces += 1
    return pieces


@pytest.mark.parametrize(
    ("batch_size", "which"), [(256, [2, 3]), (256, [0, 1, 2, 3]), (254, [2, 3]), (3, [1]), (SAMPLES, [0])]
)
def test_the_next_step_gets_what_was_prefetched(batch_size: int, which: list[int]) -> None:
    """Of 254 samples not all shards are full, so the first is read alone; of 3 samples some shards are empty."""
    source, rows = data(), -(-batch_size // 4)
    feed = DataFeed(source, SEED, rows)
    steps = SampleOrder(1, SAMPLES).steps(batch_size)
    batched = all(len(shard(np.arange(batch_size), one, 4)) == rows for one in which)
    for step in range(min(3, steps)):
        samples = begin(feed, step, batch_size, 4)
        already, source.read = source.read, 0
        if batched and len(which) > 1 and len(samples) == batch_size:
            wanted = np.concatenate([shard(samples, one, 4) for one in which])
            check(feed.read_batched(which), source, wanted, 1)
            feed.release(which[0])
            assert source.read + already == (len(wanted) if step == 0 else already), "nothing is read again"
        else:
            for one in which:
                if not feed.empty(one):
                    check((feed.inputs(one), feed.targets(one)), source, shard(samples, one, 4), 1)
                    feed.release(one)
        source.read = 0
        if step + 1 < steps:
            prefetch(feed, step + 1, batch_size, which, 4)


def test_a_batch_for_another_step_or_shard_is_discarded_and_its_buffer_used_again() -> None:
    source = data()
    feed = DataFeed(source, SEED, 64)
    begin(feed, 0, 256, 4)
    assert prefetch(feed, 1, 256, [0], 4) == PIECES
    for step, micro in [(0, 0), (1, 2), (2, 0)]:  # the step is repeated; a shard has moved; a step was skipped
        samples = begin(feed, step, 256, 4)
        check((feed.inputs(micro), feed.targets(micro)), source, shard(samples, micro, 4), 1)
        feed.release(micro)
        prefetch(feed, 1, 256, [0], 4)
    assert source.allocated == 1 + 3, "one buffer, and one for each comparison"


def test_a_sample_that_cannot_be_read_raises_where_it_is_needed() -> None:
    source = data()
    feed = DataFeed(source, SEED, 64)
    begin(feed, 0, 256, 4)
    source.damaged = int(SampleOrder(1, SAMPLES).indices(1, 1, 256)[40])
    assert prefetch(feed, 1, 256, [0], 4) < PIECES
    begin(feed, 0, 256, 4)
    feed.inputs(0)
    feed.release(0)
    begin(feed, 1, 256, 4)
    with pytest.raises(OSError, match="damaged"):
        feed.inputs(0)


def test_samples_that_stay_in_the_cache_are_not_prefetched() -> None:
    source = data(augment=None)
    feed = DataFeed(source, SEED, SAMPLES)
    samples = np.arange(SAMPLES)
    assert not feed.prefetch_piece(Position(1, 0, 1), samples, [0], 1)
    assert source.read == 0


def test_a_rank_without_shards_loads_nothing_and_time_is_counted_by_step() -> None:
    feed, works = DataFeed(data(), SEED, 64), []

    def next_step(done: int) -> StepWork | None:
        works.append(done)
        position = Position(1, done, done)
        return StepWork(position, SampleOrder(1, SAMPLES).indices(1, done, 256), 0.1) if done < 2 else None

    prefetcher = Prefetcher(feed, next_step)
    prefetcher.begin(1, [], 4)
    assert not prefetcher()
    prefetcher.begin(1, [0, 1], 4)
    assert sum(prefetcher() for _ in range(3 * PIECES)) == PIECES
    assert works == [1]
    assert prefetcher.seconds > 0
    prefetcher.begin(2, [0, 1], 4)
    assert prefetcher.seconds == 0
    assert not prefetcher()
    assert works == [1, 2]


def test_nothing_is_loaded_across_the_end_of_an_epoch_or_of_the_run() -> None:
    schedule = StepSchedule(Settings(batch_size=300, epochs=2, max_steps=7), SAMPLES)
    found = [schedule.next_in_epoch(done) for done in range(9)]
    assert [one.position.step if one is not None else None for one in found] == [
        None, 1, 2, 3, None, 1, 2, None, None,
    ]  # fmt: skip
