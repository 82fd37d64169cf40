"""A user's own tensors as a dataset."""

from __future__ import annotations

import functools

import torch

from hoop.data.dataset import Batch, Indices, checked, sha256_of
from hoop.data.landing import rows_of
from hoop.errors import InvalidArgument


class TensorData:
    """Inputs and targets, a row a sample, handed out as they are.

    They are not copied: do not change them afterwards. (uint8 images are better off as ``ImageData``.)
    """

    fixed = True

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, *, name: str = "tensors") -> None:
        for field, tensor in (("inputs", inputs), ("targets", targets)):
            if tensor.dim() < 1 or tensor.device.type != "cpu":
                raise InvalidArgument(
                    f"{field}: {list(tensor.shape)} on {tensor.device} is not rows on the CPU"
                )
        if not len(inputs) == len(targets) > 0:
            raise InvalidArgument(
                f"inputs, targets: {len(inputs)} and {len(targets)} rows are not as many, or none"
            )
        self.name = name
        self.inputs, self.targets = inputs.detach().contiguous(), targets.detach().contiguous()

    def __len__(self) -> int:
        return len(self.inputs)

    @functools.cached_property
    def checksum(self) -> str:
        """The sha256 of the tensors: types, shapes and bytes."""
        return sha256_of(self.inputs, self.targets)

    def allocate(self, rows: int) -> Batch:
        inputs, targets = (t.new_empty((rows, *t.shape[1:])) for t in (self.inputs, self.targets))
        return inputs, targets

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        # A copy, because torch takes no read-only array, and an order's are.
        rows = torch.from_numpy(checked(indices, self).copy())
        inputs, targets = rows_of(out, len(rows), self)
        torch.index_select(self.inputs, 0, rows, out=inputs)
        torch.index_select(self.targets, 0, rows, out=targets)
        return inputs, targets
