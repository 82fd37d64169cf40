"""Image datasets: stored as uint8, converted to float32 a batch at a time, with optional augmentation.

Augmentation is a function of (seed, epoch, sample index), so a sample is the same on any device and in any batch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hoop.data.dataset import Batch, BatchBuffers, Indices, check_indices, read_only, sha256_of
from hoop.data.pixels import Floats, PixelNormaliser
from hoop.data.sampler import CROP, FLIP, random_draws
from hoop.errors import InvalidArgument

Images = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Augment:
    """Augmentation of training images, applied to uint8 pixels."""

    flip: bool = False
    """Whether images are mirrored left to right, each with probability 1/2."""
    crop: int = 0
    """Black pixels added to each side, before the original size is cropped at a random offset; 0: no crop."""

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise InvalidArgument(f"crop: {self.crop} pixels of padding is not 0 or more")

    def __call__(self, images: Images, samples: Indices, *, epoch: int, seed: int) -> Images:
        """The augmented images (samples, channels, height, width); the input may be overwritten."""
        if self.crop:
            top, left = draw_offsets(samples, self.crop, epoch=epoch, seed=seed)
            images = crop_images(images, top, left, self.crop)
        if self.flip:
            chosen = np.flatnonzero(draw_flips(samples, epoch=epoch, seed=seed))
            images[chosen] = images[chosen, :, :, ::-1]
        return images


def draw_flips(samples: Indices, *, epoch: int, seed: int) -> npt.NDArray[np.bool_]:
    """Whether each sample is mirrored."""
    return (random_draws(samples, seed, epoch, FLIP) >> np.uint64(63)).astype(np.bool_)


def draw_offsets(samples: Indices, padding: int, *, epoch: int, seed: int) -> tuple[Indices, Indices]:
    """Crop offsets of each sample in its padded image, from the top and from the left."""
    bits, num_offsets = random_draws(samples, seed, epoch, CROP), np.uint64(2 * padding + 1)
    halves = bits >> np.uint64(32), bits & np.uint64(0xFFFFFFFF)
    top, left = ((half % num_offsets).astype(np.int64) for half in halves)
    return top, left


def crop_images(images: Images, top: Indices, left: Indices, padding: int) -> Images:
    """Each image padded with black and cropped at its offset."""
    height, width = images.shape[2:]
    padded = np.pad(images, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(2, 3))
    cropped: Images = windows[np.arange(len(images)), :, top, left]
    return cropped


class ImageData:
    """uint8 images (samples, channels, height, width) with one label each; a batch is normalised float32.

    A pixel p becomes (p - 255 mean) / (255 std), with the bits that ``PixelNormaliser`` promises.
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
        """``enlarge``: whole factor by which images are enlarged, pixel by pixel."""
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
        self.images = read_only(images)
        self.labels = read_only(labels.astype(np.int64))
        self.enlarge = enlarge
        self._normaliser = PixelNormaliser(
            _per_channel([255 * value for value in mean]), _per_channel([1 / (255 * value) for value in std])
        )
        self._buffers = BatchBuffers()

    def __len__(self) -> int:
        return len(self.images)

    @property
    def fixed(self) -> bool:
        return self.augment is None

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    @property
    def normalisation(self) -> tuple[Floats, Floats]:
        """What is subtracted from a pixel, and the factor that follows; each is a scalar, or one value a channel."""
        return self._normaliser.mean, self._normaliser.factor

    @functools.cached_property
    def checksum(self) -> str:
        """sha256 of the stored images and labels, before augmentation."""
        return sha256_of(self.images, self.labels)

    def allocate(self, rows: int) -> Batch:
        _, channels, height, width = self.images.shape
        shape = (rows, channels, height * self.enlarge, width * self.enlarge)
        return torch.empty(shape), torch.empty(rows, dtype=torch.int64)

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        indices = check_indices(indices, self)
        batch, (inputs, targets) = self._buffers.rows(out, len(indices), self)
        # mode="clip" avoids the extra copy that the default mode makes; the indices are already checked.
        self.labels.take(indices, out=targets, mode="clip")
        as_stored = self.augment is None and self.enlarge == 1
        if as_stored and self._normaliser.convert_rows(self.images, indices, inputs):
            return batch
        pixels = self._buffers.scratch(len(indices), self.images.shape[1:])
        self.images.take(indices, axis=0, out=pixels, mode="clip")
        if self.augment is not None:
            pixels = self.augment(pixels, indices, epoch=epoch, seed=seed)
        self._convert(pixels, inputs)
        return batch

    def _convert(self, pixels: npt.NDArray[np.uint8], floats: Floats) -> None:
        """Normalises pixels and enlarges each to a square of ``enlarge`` by ``enlarge``."""
        if self.enlarge == 1:
            self._normaliser.convert(pixels, floats)
            return
        width, factor = pixels.shape[-1], self.enlarge
        small = np.empty(pixels.shape, np.float32)
        self._normaliser.convert(pixels, small)
        lines = floats.reshape(-1, factor, width * factor)
        for column in range(factor):
            lines[:, 0, column::factor] = small.reshape(-1, width)
        lines[:, 1:] = lines[:, :1]


def _per_channel(values: Sequence[float]) -> Floats:
    """Values shaped for broadcasting: a scalar for all channels (the fastest case), or one value per channel."""
    array = np.array(values, np.float32)
    return array.reshape(()) if len(values) == 1 else array.reshape(-1, 1, 1)
