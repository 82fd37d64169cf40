"""The reductions of ``op=``, with Horovod's names."""

from __future__ import annotations

from enum import Enum

import torch
import torch.distributed as dist

from hoop.errors import InvalidArgument


class Reduction(Enum):
    """How the values of the ranks become one."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"

    def torch_op(self, dtype: torch.dtype) -> dist.ReduceOp.RedOpType:
        """The reduction of torch.distributed. The average of whole numbers is their sum, divided afterwards."""
        if self is Reduction.AVERAGE and not dtype.is_floating_point and not dtype.is_complex:
            return dist.ReduceOp.SUM
        return _TORCH[self]

    def neutral(self, dtype: torch.dtype) -> float | int | bool:
        """The value that changes no result: what a rank that has joined (``hvd.join``) contributes."""
        if self is Reduction.PRODUCT:
            return 1
        if self not in (Reduction.MIN, Reduction.MAX) or dtype.is_complex:
            return 0
        if dtype is torch.bool:
            return self is Reduction.MIN
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        largest = float("inf") if dtype.is_floating_point else limits.max
        smallest = float("-inf") if dtype.is_floating_point else limits.min
        return largest if self is Reduction.MIN else smallest


_TORCH = {
    Reduction.AVERAGE: dist.ReduceOp.AVG,
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
    Reduction.PRODUCT: dist.ReduceOp.PRODUCT,
}
Average, Sum, Adasum = Reduction.AVERAGE, Reduction.SUM, Reduction.ADASUM
Min, Max, Product = Reduction.MIN, Reduction.MAX, Reduction.PRODUCT


def chosen(op: Reduction | None, average: bool | None = None) -> Reduction:
    """The reduction of a call: ``op``, or Horovod's older ``average=``; neither: the average."""
    if op is not None and average is not None:
        raise InvalidArgument(f"average: {average}, and op is {op}; give op alone")
    if op is None:
        return Average if average in (None, True) else Sum
    if not isinstance(op, Reduction):
        raise InvalidArgument(f"op: {op!r} is not one of hvd.Average, Sum, Min, Max, Product")
    if op is Adasum:
        raise InvalidArgument(
            "op: Adasum is not offered; use hvd.Average and scale the learning rate with hvd.size(), or not at all"
        )
    return op
