"""Tensors as the plain vectors that links carry: contiguous, on the CPU, with their bytes in reach.

Nothing is copied for a contiguous tensor. Any other is copied before it is sent, and after it has arrived.

Reductions: torch's operators and types as those of Hoop, and what Hoop's links do not reduce, folded here.

Everything is decided when the operation is called, so a mistake is the caller's error and nothing has moved.
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
"""Types that Hoop reduces by itself."""
_BYTE = np.dtype(np.uint8)


def check(title: str, *tensors: torch.Tensor) -> None:
    """Whether these can travel: dense and on the CPU."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or not tensor.is_cpu:
            what = tensor.layout if tensor.layout is not torch.strided else f"on {tensor.device}"
            raise InvalidArgument(f"{title}: a tensor is {what}; Hoop moves dense tensors on the CPU")


def check_alike(title: str, like: torch.Tensor, others: Sequence[torch.Tensor], sizes: bool = True) -> None:
    """Whether others have the same type, and as many elements."""
    for index, other in enumerate(others):
        if other.dtype != like.dtype:
            raise InvalidArgument(f"{title}: tensor {index} is {other.dtype}, expected {like.dtype}")
        if sizes and other.numel() != like.numel():
            raise InvalidArgument(
                f"{title}: tensor {index} has {other.numel()} elements, expected {like.numel()}"
            )


def only(title: str, items: Sequence[Any]) -> Any:
    """The one item of torch's lists of one."""
    if len(items) != 1:
        raise InvalidArgument(f"{title}: {len(items)} tensors (or lists) where one is expected")
    return items[0]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its elements, one after the other, as they are."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def to_send(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy."""
    tensor = tensor.detach()
    return tensor if is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def elements_of(tensor: torch.Tensor) -> Array:
    """A contiguous tensor's elements as NumPy sees them: its memory, which the caller keeps by keeping the tensor."""
    count = tensor.numel()
    return (
        _memory(tensor.data_ptr(), count, ELEMENTS[tensor.dtype].numpy) if count else sized(0, tensor.dtype)
    )


def bytes_of(tensor: torch.Tensor) -> Array:
    """A contiguous tensor's bytes: its memory, which the caller keeps by keeping the tensor."""
    count = tensor.nbytes
    return _memory(tensor.data_ptr(), count, _BYTE) if count else sized(0)


@functools.lru_cache(maxsize=1024)
def _memory(address: int, count: int, kind: np.dtype[Any]) -> Array:
    """Memory as a vector that owns nothing. ``Tensor.numpy()`` takes ten times as long, and more in a cold cache."""
    memory: Any = (ctypes.c_char * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind)


def split(tensor: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Consecutive parts of dimension 0; the same memory."""
    return list(tensor.split(list(lengths)))  # type: ignore[no-untyped-call]


def sized(count: int, kind: torch.dtype = torch.uint8) -> Array:
    """New memory for so many elements."""
    return np.empty(count, ELEMENTS[kind].numpy)


class Described(NamedTuple):
    """A call of torch.distributed as all ranks must make it; its text is what they compare, and what errors name."""

    title: str
    kind: torch.dtype
    elements: int | tuple[int, ...] = ()
    """How many; of each tensor, where they may differ; nothing where ranks need not agree."""
    reduction: str = ""
    root: str = ""
    """``from 1`` or ``to 0``."""

    def __str__(self) -> str:
        how = f" {self.reduction}" if self.reduction else ""
        counts = self.elements if isinstance(self.elements, tuple) else (self.elements,)
        many = f"{' + '.join(map(str, counts))} " if counts else ""
        kind = str(self.kind).removeprefix("torch.")
        return f"{self.title}{how} of {many}{kind}{' ' if self.root else ''}{self.root}"


class ContiguousView:
    """Where results arrive: the tensor itself, or memory that is copied into it when all is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._target = tensor.detach()
        self._apart = not is_plain(self._target)
        self.flat = torch.empty(tensor.shape, dtype=tensor.dtype) if self._apart else self._target

    def fill(self) -> None:
        """What the tensor holds goes to where it is sent from."""
        if self._apart:
            self.flat.copy_(self._target)

    def settle(self) -> None:
        """What arrived goes to the tensor."""
        if self._apart:
            self._target.copy_(self.flat)


class FlatTensors:
    """A list of tensors as one contiguous piece of memory: n blocks in a row.

    Where they lie in a row already (chunks of one tensor), that is the memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], filled: bool) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._lengths = [tensor.numel() for tensor in tensors]
        row = _as_row(self._tensors)
        self._apart = row is None
        self.flat = torch.empty(sum(self._lengths), dtype=tensors[0].dtype) if row is None else row
        if self._apart and filled:
            for part, tensor in zip(split(self.flat, self._lengths), self._tensors, strict=True):
                part.view(tensor.shape).copy_(tensor)

    def settle(self) -> None:
        """What arrived goes to the tensors."""
        if self._apart:
            for part, tensor in zip(split(self.flat, self._lengths), self._tensors, strict=True):
                tensor.copy_(part.view(tensor.shape))


def _as_row(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    first = tensors[0]
    expected = first.data_ptr()
    for tensor in tensors:
        if not is_plain(tensor) or tensor.data_ptr() != expected:
            return None
        expected += tensor.numel() * tensor.element_size()
    base = first.untyped_storage()
    start = first.storage_offset() * first.element_size()
    total = sum(tensor.numel() for tensor in tensors)
    if start + total * first.element_size() > base.nbytes() or not total:
        return None
    return first.as_strided((total,), (1,))


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


class TorchReduction:
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


_made: dict[tuple[Any, torch.dtype], TorchReduction] = {}
_sums: dict[torch.dtype, TorchReduction] = {}


def reduce_by(title: str, op: Any, kind: torch.dtype) -> TorchReduction:
    """An operator on a type; those without a factor of their own are made once, and sums found at once."""
    if op == ReduceOp.SUM:
        how = _sums.get(kind)
        if how is None:
            how = _sums[kind] = TorchReduction(title, op, kind)
        return how
    key = (op.op, kind)
    how = _made.get(key) or TorchReduction(title, op, kind)
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
