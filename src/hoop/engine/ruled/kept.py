"""A slice of the weights as a server keeps it: weights, optimizer state, and room for gradients, in the arena."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.reduction import Array
from hoop.engine.ruled.slices import Slice
from hoop.engine.stages.optimizer import OptimizerSettings, go_on, updating
from hoop.engine.stages.weights import Layout, Vectors
from hoop.engine.survival.parts import Flat, Live
from hoop.engine.survival.snapshot import MOMENT


class Kept:
    """One server's slice."""

    def __init__(
        self, vectors: Vectors, layout: Layout, part: Slice, optimizer: OptimizerSettings, rows: int
    ) -> None:
        """``rows``: how many gradients it has room for."""
        self.part = part
        self.weights: Array = vectors.new("slice.weights", part.weights)
        self._trained = torch.from_numpy(self.weights[: part.trained])
        self.moments = [
            torch.from_numpy(vectors.new(f"slice.moment{index}", part.trained))
            for index in range(optimizer.slots)
        ]
        self.rows: Array = vectors.new("slice.gradients", rows * part.width).reshape(rows, part.width)
        self._update = updating(optimizer, self._trained, self.moments)
        self.adopt(layout)

    def adopt(self, layout: Layout) -> None:
        """Takes the weights of the model that is here."""
        whole = torch.zeros(layout.state)
        with torch.no_grad():
            for view, tensor in zip(layout.views(whole), layout.tensors, strict=True):
                view.copy_(tensor)
        np.copyto(self.weights, whole[self.part.low : self.part.high].numpy())

    def load_moments(self, wholes: list[Tensor]) -> None:
        for moment, whole in zip(self.moments, wholes, strict=True):
            moment.copy_(whole[self.part.low : self.part.low + self.part.trained])

    def state(self, layout: Layout, names: Mapping[int, str]) -> list[Live]:
        """Weights and optimizer state, as pieces of the tensors that lie in this slice."""
        found = []
        part, vectors = self.part, [torch.from_numpy(self.weights), *self.moments]
        for index, (place, tensor) in enumerate(zip(layout.places, layout.tensors, strict=True)):
            low, high = max(place, part.low), min(place + tensor.numel(), part.high)
            trained = index < len(layout.parameters)
            for number, vector in enumerate(vectors if trained else vectors[:1]):
                prefix = f"{MOMENT}{number - 1}." if number else ""
                if low < high:
                    elements = vector[low - part.low : high - part.low]
                    found.append(Live(prefix + names[id(tensor)], low - place, elements))
        return found

    def cut(self, row: int, scale: float) -> None:
        """Multiplies the gradient in this row."""
        if scale != 1.0:
            torch.from_numpy(self.rows[row, : self.part.trained]).mul_(scale)

    def apply(self, row: int, rate: float, step: int) -> None:
        """An update with the gradient in this row."""
        go_on(self._update, self.weights, self.part.trained, self.rows[row], rate, step)

    def flat(self, row: int) -> Flat:
        return Flat(self.weights, self.part.trained, self.moments, self.rows[row, : self.part.weights])

    def tail(self, row: int) -> Array:
        """What the shards of a gradient measured: in the last slice alone."""
        return self.rows[row, self.part.weights :]
