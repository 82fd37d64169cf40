"""Augmentation as a function of (seed, epoch, sample): the same whoever loads the sample, in any batch.

Images kept as the bytes they came in, made floats a batch at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hoop.data.dataset import Batch, BatchBuffers, Indices, checked, frozen, sha256_of
from hoop.data.sampler import CROP, FLIP, random_draws
from hoop.errors import InvalidArgument

Images = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Augment:
    """What is done to training images, before they become floats."""

    flip: bool = False
    """Mirror left to right, every second one."""
    crop: int = 0
    """Pad by so many black pixels on each side, then cut the old size out at random."""

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise InvalidArgument(f"crop: {self.crop} pixels of padding is not 0 or more")

    def __call__(self, images: Images, samples: Indices, *, epoch: int, seed: int) -> Images:
        """The images (samples, channels, height, width) changed; the ones that came in may be overwritten."""
        if self.crop:
            images = cropped(images, *offsets(samples, self.crop, epoch=epoch, seed=seed), self.crop)
        if self.flip:
            chosen = np.flatnonzero(flips(samples, epoch=epoch, seed=seed))
            images[chosen] = images[chosen, :, :, ::-1]
        return images


def flips(samples: Indices, *, epoch: int, seed: int) -> npt.NDArray[np.bool_]:
    """Which samples are mirrored."""
    return (random_draws(samples, seed, epoch, FLIP) >> np.uint64(63)).astype(np.bool_)


def offsets(samples: Indices, padding: int, *, epoch: int, seed: int) -> tuple[Indices, Indices]:
    """Where each sample is cut out of its padded image, from the top and from the left."""
    bits, places = random_draws(samples, seed, epoch, CROP), np.uint64(2 * padding + 1)
    halves = bits >> np.uint64(32), bits & np.uint64(0xFFFFFFFF)
    top, left = ((half % places).astype(np.int64) for half in halves)
    return top, left


def cropped(images: Images, top: Indices, left: Indices, padding: int) -> Images:
    """Each image moved by its offset, black where nothing is left of it."""
    height, width = images.shape[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    taken: Images = windows[np.arange(len(images)), :, top, left]
    return taken


Floats = npt.NDArray[np.float32]


class ImageData:
    """uint8 images (samples, channels, height, width) with a label each; a batch is normalised float32.

    A pixel p becomes (p - 255 mean) / (255 std). The two operations are rounded separately, so that a pixel
    comes out the same on every machine and wherever in a batch it stands.
    """

    def __init__(
        self,
        name: str,
        images: npt.NDArray[np.uint8],
        labels: npt.NDArray[np.integer],
        *,
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
        augment: Augment | None = None,
        enlarge: int = 1,
    ) -> None:
        if images.ndim != 4 or images.dtype != np.uint8:
            raise InvalidArgument(
                f"images: {images.dtype} {list(images.shape)} is not uint8 (samples, channels, height, width)"
            )
        if labels.shape != images.shape[:1]:
            raise InvalidArgument(f"labels: {list(labels.shape)} is not one for each of {len(images)} images")
        if not {len(mean), len(std)} <= {1, images.shape[1]} or min(std) <= 0:
            raise InvalidArgument(
                f"mean, std: {list(mean)}, {list(std)} are not one for all or one for each of "
                f"{images.shape[1]} channels, with std above 0"
            )
        if enlarge < 1:
            raise InvalidArgument(f"enlarge: {enlarge} is not a whole factor of at least 1")
        self.name = name
        self.augment = augment
        self.images = frozen(images)
        self.labels = frozen(labels.astype(np.int64))
        self.enlarge = enlarge
        self._mean = _per_channel([255 * value for value in mean])
        self._scale = _per_channel([1 / (255 * value) for value in std])
        self._landing = BatchBuffers()

    def __len__(self) -> int:
        return len(self.images)

    @property
    def fixed(self) -> bool:
        return self.augment is None

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    @functools.cached_property
    def checksum(self) -> str:
        """The sha256 of the images and labels as they are kept, before any augmentation."""
        return sha256_of(self.images, self.labels)

    def allocate(self, rows: int) -> Batch:
        _, channels, height, width = self.images.shape
        shape = (rows, channels, height * self.enlarge, width * self.enlarge)
        return torch.empty(shape), torch.empty(rows, dtype=torch.int64)

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        indices = checked(indices, self)
        batch, (inputs, targets) = self._landing.rows(out, len(indices), self)
        # mode="clip" because the default copies its result once more; the indices are known to be right.
        pixels = self._landing.room(len(indices), self.images.shape[1:])
        self.images.take(indices, axis=0, out=pixels, mode="clip")
        self.labels.take(indices, out=targets, mode="clip")
        if self.augment is not None:
            pixels = self.augment(pixels, indices, epoch=epoch, seed=seed)
        self._convert(pixels, inputs)
        return batch

    def _convert(self, pixels: npt.NDArray[np.uint8], floats: Floats) -> None:
        """Normalised, and each pixel a square of ``enlarge`` by ``enlarge``."""
        if self.enlarge == 1:
            self._normalise(pixels, floats)
            return
        width, factor = pixels.shape[-1], self.enlarge
        small = np.empty(pixels.shape, np.float32)
        self._normalise(pixels, small)
        lines = floats.reshape(-1, factor, width * factor)
        for column in range(factor):
            lines[:, 0, column::factor] = small.reshape(-1, width)
        lines[:, 1:] = lines[:, :1]

    def _normalise(self, pixels: npt.NDArray[np.uint8], floats: Floats) -> None:
        np.subtract(pixels, self._mean, out=floats, dtype=np.float32)
        np.multiply(floats, self._scale, out=floats)


def _per_channel(values: Sequence[float]) -> Floats:
    """For every pixel (a scalar: the fastest), or down the channels."""
    array = np.array(values, np.float32)
    return array.reshape(()) if len(values) == 1 else array.reshape(-1, 1, 1)
