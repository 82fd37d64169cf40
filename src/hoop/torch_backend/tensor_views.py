"""Tensors as the flat, contiguous CPU vectors that links carry, and torch's reductions as Hoop's.

A contiguous tensor is used in place. Any other tensor is copied to contiguous memory before sending, and back after
receiving.

A reduction that Hoop's executors support (dtype and operator) runs there; any other is done by gathering all tensors
and folding them with torch. All of this is decided when the operation is called, so a wrong argument raises in the
caller before any byte has moved.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from functools import reduce as fold_left
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import ReduceOp

from hoop.collectives.reduction import OPERATIONS
from hoop.errors import InvalidArgument
from hoop.memory.dtypes import DTYPES, DType, dtype

Array = npt.NDArray[Any]
ELEMENTS: dict[torch.dtype, DType] = {getattr(torch, name): kind for name, kind in DTYPES.items()}
"""Torch dtypes that Hoop's executors reduce."""
_BYTE = np.dtype(np.uint8)


def check_same(title: str, like: torch.Tensor, others: Sequence[torch.Tensor], sizes: bool = True) -> None:
    """Raises InvalidArgument unless ``others`` have the dtype of ``like`` and, with ``sizes``, its element count."""
    for index, other in enumerate(others):
        if other.dtype != like.dtype:
            raise InvalidArgument(f"{title}: tensor {index} is {other.dtype}, expected {like.dtype}")
        if sizes and other.numel() != like.numel():
            raise InvalidArgument(f"{title}: tensor {index} has {other.numel()} elements, expected {like.numel()}")


def only(title: str, items: Sequence[Any]) -> Any:
    """The item of a list of one; torch passes many arguments that way."""
    if len(items) != 1:
        raise InvalidArgument(f"{title}: {len(items)} tensors (or lists) where one is expected")
    return items[0]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory holds exactly its elements: contiguous, no lazy negation or conjugation."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def as_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """The detached tensor itself if it is plain, else a contiguous copy."""
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def elements_of(tensor: torch.Tensor) -> Array:
    """A contiguous tensor's memory as an array of its dtype. It does not own the memory: keep the tensor alive."""
    count = tensor.numel()
    return _memory(tensor.data_ptr(), count, ELEMENTS[tensor.dtype].numpy) if count else empty_array(0, tensor.dtype)


def bytes_of(tensor: torch.Tensor) -> Array:
    """A contiguous tensor's memory as an array of bytes. It does not own the memory: keep the tensor alive."""
    count = tensor.nbytes
    return _memory(tensor.data_ptr(), count, _BYTE) if count else empty_array(0)


@functools.lru_cache(maxsize=1024)
def _memory(address: int, count: int, kind: np.dtype[Any]) -> Array:
    """An array over an address. ``Tensor.numpy()`` takes ten times as long, and more with a cold cache."""
    memory: Any = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind)


def split(tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive views of dimension 0."""
    return list(tensor.split(list(lengths)))  # type: ignore[no-untyped-call]


def empty_array(count: int, kind: torch.dtype = torch.uint8) -> Array:
    """A new array of ``count`` uninitialized elements."""
    return np.empty(count, ELEMENTS[kind].numpy)


class Described(NamedTuple):
    """A call of torch.distributed, with the arguments that must be equal on all ranks.

    Its text is what ranks compare and what mismatch errors show.
    """

    title: str
    kind: torch.dtype
    elements: int | tuple[int, ...] = ()
    """Number of elements of the tensor, or of each tensor of a list; empty where ranks may differ."""
    reduction: str = ""
    root: str = ""
    """Text of the root argument: ``from 1`` or ``to 0``; empty: there is none."""
    place: str = ""
    """Type of the device that the tensors are on; empty: the CPU."""

    def __str__(self) -> str:
        reduction = f" {self.reduction}" if self.reduction else ""
        counts = self.elements if isinstance(self.elements, tuple) else (self.elements,)
        elements = f"{' + '.join(map(str, counts))} " if counts else ""
        kind = str(self.kind).removeprefix("torch.")
        place = f" on {self.place}" if self.place else ""
        return f"{self.title}{reduction} of {elements}{kind}{' ' if self.root else ''}{self.root}{place}"


class ContiguousView:
    """Contiguous memory for one tensor: the tensor itself if it is plain, else a buffer beside it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._is_copy = not is_plain(self._tensor)
        self.flat = tensor.new_empty(tensor.shape, requires_grad=False) if self._is_copy else self._tensor

    def copy_in(self) -> None:
        """Copies the tensor to ``flat``, before sending."""
        if self._is_copy:
            self.flat.copy_(self._tensor)

    def copy_back(self) -> None:
        """Copies ``flat`` to the tensor, after receiving."""
        if self._is_copy:
            self._tensor.copy_(self.flat)


class FlatTensors:
    """A list of tensors as one contiguous block of memory.

    Tensors that are adjacent in memory already (chunks of one tensor) are used in place; others get a buffer.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], copy_in: bool) -> None:
        """``copy_in``: a buffer starts with the tensors' elements, else uninitialized."""
        self._tensors = [tensor.detach() for tensor in tensors]
        self._lengths = [tensor.numel() for tensor in tensors]
        in_place = adjacent(self._tensors)
        self._is_copy = in_place is None
        self.flat = tensors[0].new_empty(sum(self._lengths)) if in_place is None else in_place
        if self._is_copy and copy_in:
            for part, tensor in zip(split(self.flat, self._lengths), self._tensors, strict=True):
                part.view(tensor.shape).copy_(tensor)

    def copy_back(self) -> None:
        """Copies ``flat`` to the tensors, after receiving."""
        if self._is_copy:
            for part, tensor in zip(split(self.flat, self._lengths), self._tensors, strict=True):
                tensor.copy_(part.view(tensor.shape))


def adjacent(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one flat view, if they are plain and follow one another in one storage; else None."""
    first = tensors[0]
    expected = first.data_ptr()
    for tensor in tensors:
        if not is_plain(tensor) or tensor.data_ptr() != expected:
            return None
        expected += tensor.numel() * tensor.element_size()
    storage = first.untyped_storage()
    start = first.storage_offset() * first.element_size()
    total = sum(tensor.numel() for tensor in tensors)
    if start + total * first.element_size() > storage.nbytes() or not total:
        return None
    return first.as_strided((total,), (1,))


# ---- reductions

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
_BOOL_OPS = {"sum": "max", "prod": "min", "min": "min", "max": "max", "band": "min", "bor": "max"}
"""Operator on bytes that are 0 or 1 for each operator on booleans."""


class TorchReduction:
    """One torch reduction operator on one dtype, and how Hoop carries it out."""

    def __init__(self, title: str, op: Any, kind: torch.dtype) -> None:
        """Raises InvalidArgument if torch defines no such reduction; ``title`` names the collective in the error."""
        self.name = _NAMES[op.op]
        self.factor: Any = op.__getstate__()[1] if self.name == "premul_sum" else None
        self.kind = kind
        self.complex = kind.is_complex
        _check(title, self.name, kind)
        self.op = "sum" if self.name == "premul_sum" else self.name
        self.element: DType | None = ELEMENTS.get(kind)
        """The dtype that Hoop's executors see; None if they cannot reduce it."""
        if self.complex:
            # A complex sum is the sums of the real and imaginary parts; no other operator decomposes so simply.
            self.element = ELEMENTS.get(kind.to_real()) if self.op in ("sum", "avg") else None
        elif kind is torch.bool:
            self.element = dtype("uint8") if self.name in _BOOL_OPS else None
            self.op = _BOOL_OPS.get(self.name, self.name)
        self.native = self.element is not None and self.op in OPERATIONS
        """Whether Hoop's executors reduce it; otherwise tensors are gathered and folded with torch."""
        if not self.native:
            self._check_foldable(title)
        self.in_place = self.native and self.factor is None and kind in ELEMENTS
        """Whether a contiguous tensor is reduced in its own memory, without any conversion."""

    def _check_foldable(self, title: str) -> None:
        """Raises InvalidArgument for dtypes that torch can only move and convert."""
        one = torch.zeros(1, device="cpu").to(self.kind)
        try:
            self.fold([one, one])
        except RuntimeError as error:
            raise InvalidArgument(f"{title}: torch has no {self.name} of {self.kind}: {error}") from None

    def prescale(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's contribution: for PREMUL_SUM the tensor times its factor, else the tensor."""
        return tensor * self.factor if self.factor is not None else tensor

    def native_view(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor's memory viewed as ``element``."""
        if self.complex:
            return torch.view_as_real(tensor)
        return tensor.view(torch.uint8) if self.kind is torch.bool else tensor

    def combine(self, left: torch.Tensor, right: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        """``into = left op right`` on the tensors' device; without the division of AVG."""
        return _FOLDS[self.name](left, right, out=into)  # type: ignore[call-arg]

    def divide(self, total: torch.Tensor, divisor: torch.Tensor) -> None:
        """The division of AVG, in place; ``divisor``: the number of ranks, on the tensor's device."""
        rounding = None if self.kind.is_floating_point or self.complex else "trunc"
        torch.div(total, divisor, rounding_mode=rounding, out=total)

    def fold(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Reduces all ranks' tensors with torch, in rank order."""
        total = fold_left(_FOLDS[self.name], tensors)
        if self.name != "avg":
            return total
        size = len(tensors)
        if self.kind.is_floating_point or self.complex:
            return total / size
        return torch.div(total, size, rounding_mode="trunc")


_reductions: dict[tuple[Any, torch.dtype], TorchReduction] = {}
_sums: dict[torch.dtype, TorchReduction] = {}


def reduction_for(title: str, op: Any, kind: torch.dtype) -> TorchReduction:
    """The reduction of an operator on a dtype. Cached unless it has a factor; sums have a cache of their own, because
    its key is cheaper to make."""
    if op == ReduceOp.SUM:
        reduction = _sums.get(kind)
        if reduction is None:
            reduction = _sums[kind] = TorchReduction(title, op, kind)
        return reduction
    key = (op.op, kind)
    reduction = _reductions.get(key) or TorchReduction(title, op, kind)
    if reduction.factor is None:
        _reductions[key] = reduction
    return reduction


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
