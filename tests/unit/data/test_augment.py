"""Augmentation depends only on (seed, epoch, sample)."""

from __future__ import annotations

import numpy as np
import pytest

from hoop.data import Augment, ImageData, SampleOrder, shard
from hoop.data.images import crop_images, draw_flips, draw_offsets
from hoop.errors import InvalidArgument

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.integers(0, 256, (64, 3, 8, 8), dtype=np.uint8)
BOTH = Augment(flip=True, crop=2)


def data(augment: Augment | None = BOTH) -> ImageData:
    return ImageData("random", IMAGES, np.arange(64) % 10, augment=augment)


def reference(image: np.ndarray, sample: int, *, epoch: int, seed: int) -> np.ndarray:
    """One augmented sample, computed pixel by pixel."""
    one = np.array([sample])
    (top,), (left,) = draw_offsets(one, 2, epoch=epoch, seed=seed)
    (flip,) = draw_flips(one, epoch=epoch, seed=seed)
    out = np.zeros_like(image)
    for y in range(8):
        for x in range(8):
            source_y, source_x = y + top - 2, x + left - 2
            if 0 <= source_y < 8 and 0 <= source_x < 8:
                out[:, y, 7 - x if flip else x] = image[:, source_y, source_x]
    return out


def test_augment_matches_the_reference() -> None:
    samples = SampleOrder(3, 64).permutation(0)
    augmented = BOTH(IMAGES[samples], samples, epoch=4, seed=9)
    for image, sample in zip(augmented, samples.tolist(), strict=True):
        assert np.array_equal(image, reference(IMAGES[sample], sample, epoch=4, seed=9))


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 64])
def test_a_sample_is_the_same_in_any_batch_and_shard(shards: int) -> None:
    all_samples = np.arange(64)
    whole, _ = data().batch(all_samples, epoch=1, seed=2)
    samples = SampleOrder(7, 64).permutation(5)
    for number in range(shards):
        part = shard(samples, number, shards)
        inputs, targets = data().batch(part, epoch=1, seed=2)
        assert np.array_equal(inputs.numpy(), whole.numpy()[part])
        assert targets.tolist() == (part % 10).tolist()


def test_seed_and_epoch_each_change_the_augmentation() -> None:
    all_samples = np.arange(64)
    batches = [data().batch(all_samples, epoch=epoch, seed=seed)[0] for epoch in (0, 1) for seed in (0, 1)]
    for one in range(4):
        for other in range(one):
            assert not np.array_equal(batches[one].numpy(), batches[other].numpy())


def test_draws_are_uniform() -> None:
    samples = np.arange(90_000)
    assert abs(draw_flips(samples, epoch=0, seed=0).mean() - 0.5) < 0.01
    top, left = draw_offsets(samples, 4, epoch=0, seed=0)
    counts = np.bincount(top * 9 + left, minlength=81)
    assert len(counts) == 81
    assert abs(counts - 90_000 / 81).max() < 200


def test_a_centred_crop_keeps_the_image() -> None:
    middle = np.full(64, 2)
    assert np.array_equal(crop_images(IMAGES, middle, middle, 2), IMAGES)


def test_the_dataset_itself_is_not_changed() -> None:
    before = IMAGES.copy()
    plain, _ = data(None).batch(np.arange(64), epoch=0, seed=0)
    changed, _ = data().batch(np.arange(64), epoch=0, seed=0)
    assert np.array_equal(before, IMAGES)
    assert not np.array_equal(plain.numpy(), changed.numpy())
    assert data().checksum == data(None).checksum


def test_negative_padding_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="crop: -1 pixels"):
        Augment(crop=-1)
