"""Datasets whose samples stay in the memory of the device that trains: a batch is gathered there, by sample index.

    host     rows(samples)   int64: the index of each sample, then its augmentation draws     ── copied to the device
    device   inputs(rows)    the batch, made by tensor operations only: a CUDA graph can record it
             targets(rows)

The draws are those of ``Dataset.batch`` and the arithmetic is the same, so both give the same bits. ``make_resident``
knows Hoop's own datasets; the batches of others are made on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hoop.data.dataset import Dataset, Indices
from hoop.data.images import ImageData, draw_flips, draw_offsets
from hoop.data.tensors import TensorData
from hoop.data.text import TextData

Rows = npt.NDArray[np.int64]


class ResidentData(ABC):
    """The samples of a dataset on one device."""

    columns = 1
    """Number of columns of ``rows``."""

    def rows(self, samples: Indices, *, epoch: int, seed: int) -> Rows:
        """What the device needs to know of each sample: its index, in column 0, and its augmentation draws."""
        return samples.reshape(-1, 1)

    @abstractmethod
    def inputs(self, rows: Tensor) -> Tensor:
        """The inputs of these rows, which are on the device."""

    @abstractmethod
    def targets(self, rows: Tensor) -> Tensor:
        """Their targets."""


class ResidentTensors(ResidentData):
    def __init__(self, inputs: Tensor, targets: Tensor, device: torch.device) -> None:
        self._inputs, self._targets = inputs.to(device), targets.to(device)

    def inputs(self, rows: Tensor) -> Tensor:
        return self._inputs.index_select(0, rows[:, 0])

    def targets(self, rows: Tensor) -> Tensor:
        return self._targets.index_select(0, rows[:, 0])


class ResidentText(ResidentData):
    """Windows of tokens, stored as small integers and widened in each batch."""

    def __init__(self, data: TextData, device: torch.device) -> None:
        end = len(data) * data.context
        tokens = torch.from_numpy(data.tokens[: end + 1].copy()).to(device)
        self._inputs, self._targets = (part.view(-1, data.context) for part in (tokens[:-1], tokens[1:]))

    def inputs(self, rows: Tensor) -> Tensor:
        return self._inputs.index_select(0, rows[:, 0]).long()

    def targets(self, rows: Tensor) -> Tensor:
        return self._targets.index_select(0, rows[:, 0]).long()


class ResidentImages(ResidentData):
    """Images, padded as the augmentation wants it. Crop and flip are one gather of pixels.

    They are normalised once, if there is memory for float32 pixels, otherwise in each batch.
    """

    def __init__(self, data: ImageData, device: torch.device, floats: bool) -> None:
        augment = data.augment
        self._padding = augment.crop if augment else 0
        self._flips = augment is not None and augment.flip
        self._enlarge = data.enlarge
        self._shape = data.images.shape[1:]
        images, pad = data.images, self._padding
        if pad:
            images = np.pad(images, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        self._images = torch.from_numpy(images.copy() if images is data.images else images).to(device)
        self._labels = torch.from_numpy(data.labels.copy()).to(device)
        self._mean, self._scale = (torch.from_numpy(one.copy()).to(device) for one in data.normalisation)
        if floats:
            self._images = self._normalise(self._images)
        channels, height, width = self._shape
        self._channel = torch.arange(channels, device=device).view(1, -1, 1, 1)
        self._row, self._column = (torch.arange(size, device=device) for size in (height, width))
        self.columns = 4 if self._padding or self._flips else 1

    def _normalise(self, pixels: Tensor) -> Tensor:
        return pixels.float().sub_(self._mean).mul_(self._scale)

    def rows(self, samples: Indices, *, epoch: int, seed: int) -> Rows:
        if self.columns == 1:
            return super().rows(samples, epoch=epoch, seed=seed)
        rows = np.zeros((len(samples), self.columns), np.int64)
        rows[:, 0] = samples
        if self._padding:
            rows[:, 1], rows[:, 2] = draw_offsets(samples, self._padding, epoch=epoch, seed=seed)
        if self._flips:
            rows[:, 3] = draw_flips(samples, epoch=epoch, seed=seed)
        return rows

    def targets(self, rows: Tensor) -> Tensor:
        return self._labels.index_select(0, rows[:, 0])

    def inputs(self, rows: Tensor) -> Tensor:
        index = rows[:, 0]
        if self.columns == 1:
            pixels = self._images.index_select(0, index)
        else:
            top, left, flip = (rows[:, column].view(-1, 1) for column in (1, 2, 3))
            column = torch.where(flip > 0, self._column.flip(0), self._column) + left
            row = self._row + top
            pixels = self._images[index.view(-1, 1, 1, 1), self._channel, row[:, None, :, None], column[:, None, None]]
        inputs = pixels if pixels.is_floating_point() else self._normalise(pixels)
        if self._enlarge > 1:
            inputs = inputs.repeat_interleave(self._enlarge, 2).repeat_interleave(self._enlarge, 3)
        return inputs


def resident_bytes(data: Dataset) -> int | None:
    """Bytes that ``make_resident`` needs on the device; None if it does not know this kind of dataset."""
    # type(), not isinstance(): a subclass may override ``batch``.
    if type(data) is TensorData:
        return data.inputs.nbytes + data.targets.nbytes
    if type(data) is TextData:
        return data.tokens.nbytes
    if type(data) is ImageData:
        pad = 2 * data.augment.crop if data.augment else 0
        samples, channels, height, width = data.images.shape
        return int(samples * channels * (height + pad) * (width + pad) + data.labels.nbytes)
    return None


def make_resident(data: Dataset, device: torch.device, free: int) -> ResidentData | None:
    """Copy the samples to a device, if they fit in ``free`` bytes there and the kind of dataset is known."""
    needed = resident_bytes(data)
    if needed is None or needed > free:
        return None
    if type(data) is TensorData:
        return ResidentTensors(data.inputs, data.targets, device)
    if type(data) is TextData:
        return ResidentText(data, device)
    assert type(data) is ImageData, "resident_bytes knows this dataset"
    return ResidentImages(data, device, floats=4 * needed <= free)
