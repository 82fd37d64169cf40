"""Reductions: torch's operators and types as those of Hoop, and what Hoop's links do not reduce, folded here.

Everything is decided when the operation is called, so a mistake is the caller's error and nothing has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce as fold_left
from typing import Any

import torch
from torch.distributed import ReduceOp

from hoop.collectives.reduction import OPERATIONS
from hoop.errors import InvalidArgument
from hoop.memory.dtypes import DType, dtype
from hoop.torch_backend.tensors import ELEMENTS

_NAMES: dict[Any, str] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
    ReduceOp.PREMUL_SUM: "premul_sum",
}
_FOLDS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_OF_TRUTHS = {"sum": "max", "prod": "min", "min": "min", "max": "max", "band": "min", "bor": "max"}
"""What an operator means for booleans, as one of bytes that are 0 or 1."""


class Reduce:
    """One operator on one type of tensor."""

    def __init__(self, title: str, op: Any, kind: torch.dtype) -> None:
        self.name = _NAMES[op.op]
        self.factor: Any = op.__getstate__()[1] if self.name == "premul_sum" else None
        self.kind = kind
        self.complex = kind.is_complex
        _check(title, self.name, kind)
        self.op = "sum" if self.name == "premul_sum" else self.name
        self.element: DType | None = ELEMENTS.get(kind)
        if self.complex:
            # The sum of pairs is the pair of sums; nothing else is that simple.
            self.element = ELEMENTS.get(kind.to_real()) if self.op in ("sum", "avg") else None
        elif kind is torch.bool:
            self.element = dtype("uint8") if self.name in _OF_TRUTHS else None
            self.op = _OF_TRUTHS.get(self.name, self.name)
        self.by_links = self.element is not None and self.op in OPERATIONS
        """Whether Hoop's links reduce it; else tensors are gathered, and folded here."""
        if not self.by_links:
            self._check_foldable(title)
        self.as_is = self.by_links and self.factor is None and kind in ELEMENTS
        """Whether a contiguous tensor is reduced where it lies, without any conversion."""

    def _check_foldable(self, title: str) -> None:
        """Some types torch moves and converts, and nothing else."""
        one = torch.zeros(1).to(self.kind)
        try:
            self.fold([one, one])
        except RuntimeError as error:
            raise InvalidArgument(f"{title}: torch has no {self.name} of {self.kind}: {error}") from None

    def scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank contributes: for PREMUL_SUM a multiple."""
        return tensor * self.factor if self.factor is not None else tensor

    def plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor as the type that the links reduce; the same memory."""
        if self.complex:
            return torch.view_as_real(tensor)
        return tensor.view(torch.uint8) if self.kind is torch.bool else tensor

    def fold(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """All ranks' tensors as one, in rank order."""
        total = fold_left(_FOLDS[self.name], tensors)
        if self.name != "avg":
            return total
        size = len(tensors)
        if self.kind.is_floating_point or self.complex:
            return total / size
        return torch.div(total, size, rounding_mode="trunc")


_made: dict[tuple[Any, torch.dtype], Reduce] = {}
_sums: dict[torch.dtype, Reduce] = {}


def reduce_by(title: str, op: Any, kind: torch.dtype) -> Reduce:
    """An operator on a type; those without a factor of their own are made once, and sums found at once."""
    if op == ReduceOp.SUM:
        how = _sums.get(kind)
        if how is None:
            how = _sums[kind] = Reduce(title, op, kind)
        return how
    key = (op.op, kind)
    how = _made.get(key) or Reduce(title, op, kind)
    if how.factor is None:
        _made[key] = how
    return how


def _check(title: str, name: str, kind: torch.dtype) -> None:
    floating = kind.is_floating_point or kind.is_complex
    if floating and name in ("band", "bor", "bxor"):
        raise InvalidArgument(f"{title}: {name} needs integers or booleans, the tensor is {kind}")
    if kind.is_complex and name in ("min", "max"):
        raise InvalidArgument(f"{title}: {name} needs an order, which {kind} has not")
    if kind is torch.bool and name in ("avg", "premul_sum"):
        raise InvalidArgument(f"{title}: {name} makes no sense for booleans")
    if name == "premul_sum" and not floating:
        raise InvalidArgument(f"{title}: premul_sum needs floating point, the tensor is {kind}")
