"""PixelNormaliser: the native core and NumPy give the same bits, for images as stored, by number and converted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.data.images import Augment, ImageData
from hoop.data.pixels import PixelNormaliser
from hoop.native import library

needs_core = pytest.mark.skipif(library.load() is None, reason=f"the native core is {library.status()}")
MEANS = {1: (0.1307,), 3: (0.4914, 0.4822, 0.4465)}
STDS = {1: (0.3081,), 3: (0.247, 0.2435, 0.2616)}


def images(count: int, channels: int, width: int, **options: object) -> ImageData:
    pixels = np.random.default_rng(1).integers(0, 256, (count, channels, 5, width), np.uint8)
    labels = np.arange(count) % 10
    return ImageData("random", pixels, labels, mean=MEANS[channels], std=STDS[channels], **options)  # type: ignore[arg-type]


def with_numpy(data: ImageData, monkeypatch: pytest.MonkeyPatch, rows: np.ndarray, epoch: int) -> np.ndarray:
    """The inputs of a batch, converted by NumPy."""
    with monkeypatch.context() as patched:
        patched.setenv("HOOP_NATIVE", "0")
        other = images(
            len(data), data.images.shape[1], data.images.shape[3], augment=data.augment, enlarge=data.enlarge
        )
        return other.batch(rows, epoch=epoch, seed=3)[0].numpy()


@needs_core
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("width", [1, 7, 28])
@pytest.mark.parametrize("augment", [None, Augment(flip=True, crop=2)])
@pytest.mark.parametrize("enlarge", [1, 2])
def test_a_batch_has_the_bits_of_numpy(
    monkeypatch: pytest.MonkeyPatch, channels: int, width: int, augment: Augment | None, enlarge: int
) -> None:
    data = images(40, channels, width, augment=augment, enlarge=enlarge)
    for rows in ([], [7], [3, 3, 39, 0, 12], list(range(40))[::-1]):
        indices = np.array(rows, np.int64)
        expected = with_numpy(data, monkeypatch, indices, epoch=2)
        assert np.array_equal(data.batch(indices, epoch=2, seed=3)[0].numpy(), expected)


@needs_core
def test_every_byte_has_the_bits_of_numpy() -> None:
    data = images(1, 1, 1)
    normaliser = PixelNormaliser(*data.normalisation)
    pixels = np.arange(256, dtype=np.uint8).reshape(256, 1, 1, 1)
    floats = np.empty(pixels.shape, np.float32)
    assert normaliser.convert_rows(pixels, np.arange(256), floats)
    mean, factor = data.normalisation
    assert np.array_equal(floats, (pixels.astype(np.float32) - mean) * factor)


def test_indices_that_are_a_view_with_gaps_are_read_as_they_are() -> None:
    data = images(20, 1, 7)
    every_third = np.arange(20)[::3]
    assert not every_third.flags.c_contiguous
    expected = data.batch(every_third.copy(), epoch=0, seed=0)[0]
    assert np.array_equal(data.batch(every_third, epoch=0, seed=0)[0], expected)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.integers(0, 3))
def test_only_the_first_rows_of_the_output_are_written(rows: list[int], spare: int) -> None:
    data = images(31, 3, 7)
    out = data.allocate(len(rows) + spare)
    out[0].fill_(-1)
    data.batch(np.array(rows), epoch=0, seed=0, out=out)
    assert (out[0][len(rows) :] == -1).all()
    assert (out[0][: len(rows)] != -1).all()
