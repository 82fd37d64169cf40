"""Augmentation as a function of (seed, epoch, sample): the same whoever loads the sample, in any batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hoop.data.dataset import Indices
from hoop.data.draws import CROP, FLIP, draws
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
    return (draws(samples, seed, epoch, FLIP) >> np.uint64(63)).astype(np.bool_)


def offsets(samples: Indices, padding: int, *, epoch: int, seed: int) -> tuple[Indices, Indices]:
    """Where each sample is cut out of its padded image, from the top and from the left."""
    bits, places = draws(samples, seed, epoch, CROP), np.uint64(2 * padding + 1)
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
