"""Pixels as normalised floats: ``ImageData`` converts every batch with it.

A pixel p becomes (p - mean) * factor. The two operations are rounded separately, so the result is the same on every
machine, at every position in a batch, and with or without the native core.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from hoop.data.dataset import Indices
from hoop.native.library import NativeLibrary, load

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class PixelNormaliser:
    """Normalises images (samples, channels, height, width) with constants for all channels, or for each of them."""

    def __init__(self, mean: Floats, factor: Floats) -> None:
        """``mean`` and ``factor``: scalars, or one value a channel in the shape (channels, 1, 1)."""
        self.mean, self.factor = mean, factor
        channels = max(mean.size, factor.size)
        self._channels = channels
        self._means = np.ascontiguousarray(np.broadcast_to(mean.reshape(-1), channels))
        self._factors = np.ascontiguousarray(np.broadcast_to(factor.reshape(-1), channels))

    def convert(self, pixels: Pixels, floats: Floats) -> None:
        """Writes the floats of all images."""
        if self._library is not None and pixels.flags.c_contiguous and floats.flags.c_contiguous:
            self._run(self._library, pixels, None, len(pixels), floats)
            return
        np.copyto(floats, pixels)  # faster than a subtraction that converts its operands block by block
        np.subtract(floats, self.mean, out=floats)
        np.multiply(floats, self.factor, out=floats)

    def convert_rows(self, images: Pixels, rows: Indices, floats: Floats) -> bool:
        """Writes the floats of the images with these numbers, which the caller has checked; False: it cannot."""
        if self._library is None or not (rows.flags.c_contiguous and floats.flags.c_contiguous):
            return False
        self._run(self._library, images, rows.ctypes.data, len(rows), floats)
        return True

    @functools.cached_property
    def _library(self) -> NativeLibrary | None:
        return load()

    def _run(self, library: NativeLibrary, images: Pixels, rows: int | None, count: int, floats: Floats) -> None:
        library.normalise(
            images.ctypes.data,
            rows,
            count,
            images[0].size if len(images) else 0,
            self._channels,
            self._means.ctypes.data,
            self._factors.ctypes.data,
            floats.ctypes.data,
        )
