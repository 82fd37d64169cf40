"""A layer's product with a transposed copy of its weight, where that is faster and gives the same bits.

MKL's product with a transposed right operand of few columns spends most of its time on packing that operand: on some
processors 150 us for the first layer of the MNIST model, of 250 us for 64 samples. The native core transposes the
weight in 17 us, and the plain product that follows has nothing to pack.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from hoop.native.library import NativeLibrary, load

MAX_OUTPUTS = 128
"""Maximum number of outputs of a layer; MKL packs wider ones well."""
MIN_ELEMENTS, MAX_ELEMENTS = 1 << 12, 1 << 20
"""Number of elements of a weight: the copy of a smaller one saves nothing, a trial with a larger one takes too long."""
MAX_ROWS = 1024
"""Maximum number of samples. With more of them the packing is a small part of the product."""
MAX_TRIALS = 16
"""Maximum number of batch sizes that are tried."""
TRIAL_RUNS = 3
MAX_RATIO = 0.95
"""The product with the copy must take at most this part of the other one's time."""
ALIGNMENT = 64
"""Bytes; the kernel that MKL selects may depend on it, so operands of a trial and of a step are aligned alike."""


class TransposedWeight:
    """Products ``values @ weight.t()`` of one layer on the CPU; ``ChainStage`` calls it in each forward.

    For each number of samples, a trial with random operands decides once between the two ways. They are only exchanged
    if they give the same bits, so ranks that decide differently, by their times, still agree. The weight changes in
    each step and is transposed in each call.
    """

    @classmethod
    def of(cls, weight: Tensor | None) -> TransposedWeight | None:
        """None if the layer has no weight, or one for which the copy cannot pay; or without the native core."""
        if weight is None or weight.is_cuda or weight.dtype != torch.float32 or not weight.is_contiguous():
            return None
        if len(weight) > MAX_OUTPUTS or not MIN_ELEMENTS <= weight.numel() <= MAX_ELEMENTS:
            return None
        library = load()
        return cls(weight, library) if library is not None else None

    def __init__(self, weight: Tensor, library: NativeLibrary) -> None:
        self._weight, self._library = weight, library
        self._rows, self._columns = weight.shape
        self._copy = torch.empty(self._columns, self._rows)
        self._pays: dict[int, bool] = {}
        """Whether the copy is used, by number of samples."""

    def product(self, values: Tensor) -> Tensor:
        """Return ``values @ weight.t()``."""
        pays = self._pays.get(len(values))
        if pays is None:
            pays = self._try(len(values))
        weight = self._weight
        if not pays or values.data_ptr() % ALIGNMENT or weight.data_ptr() % ALIGNMENT or not values.is_contiguous():
            return torch.mm(values, weight.t())
        return self._with_copy(values, weight)

    def _with_copy(self, values: Tensor, weight: Tensor) -> Tensor:
        self._library.transpose(weight.data_ptr(), self._rows, self._columns, self._copy.data_ptr())
        return torch.mm(values, self._copy)

    def _try(self, count: int) -> bool:
        """Return whether the copy is faster for this many samples, and gives the same bits."""
        if count > MAX_ROWS or len(self._pays) == MAX_TRIALS:
            return False
        generator = torch.Generator().manual_seed(1)
        weight = torch.randn(self._rows, self._columns, generator=generator)
        values = torch.randn(count, self._columns, generator=generator)
        pays = torch.equal(torch.mm(values, weight.t()), self._with_copy(values, weight))
        if pays:
            seconds = [self._seconds(values, weight) for _ in range(TRIAL_RUNS)]
            pays = min(one for one, _ in seconds) <= MAX_RATIO * min(other for _, other in seconds)
        self._pays[count] = pays
        return pays

    def _seconds(self, values: Tensor, weight: Tensor) -> tuple[float, float]:
        """Return the seconds of the product with the copy, and without it."""
        began = time.perf_counter()
        self._with_copy(values, weight)
        middle = time.perf_counter()
        torch.mm(values, weight.t())
        return middle - began, time.perf_counter() - middle
