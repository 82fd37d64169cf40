"""Compressors: lossy all-reduce of a float32 vector in fewer bytes.

              sent                          bytes          error of one step
    Cast      float16 or bfloat16           1/2            one rounding, each way
    Int8      8 bits and a scale a block    about 1/4      at most 1/254 of a block's largest value, each way
    TopK      the k largest entries         k·n/d          all other entries are deferred
    PowerSGD  two matrices of rank r        r(a+b)/(a·b)   the residual of the approximation is deferred

``bytes`` is what a rank sends, as a ratio to a ring all-reduce of the uncompressed vector. d: entries of the vector,
which PowerSGD reads as a matrix of a rows and b columns; n: ranks.

All but Cast keep the difference between the vector and the sent values as a residual and add it to the next vector
(error feedback), so every part of a gradient arrives in the end. A compressor belongs to one vector:
``CompressedAllReduce`` has one for each. A vector with a NaN or an infinity spoils only its own sum: residuals that
are not finite are set to 0.

With Cast and Int8 the owner of each slice sums it in float32, so rounding errors do not accumulate from hop to hop. All
ranks end with the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hoop.collectives.reduction import Array
from hoop.errors import InvalidArgument
from hoop.memory.dtypes import bfloat16_to_float32, float32_to_bfloat16

Vector = npt.NDArray[np.float32]

MAX_BLOCK = 1 << 16
"""The most values of a block. A vector is padded to whole blocks, at least one for each rank."""


class Peers(Protocol):
    """The communication that a compressor needs."""

    size: int

    def run_collective(self, collective: str, source: Array) -> Array:
        """An ``all_to_all`` or ``all_gather`` of the array's bytes."""

    def all_reduce_sum(self, part: Array) -> Array:
        """The exact sum of all ranks' arrays."""


class Compressor(ABC):
    """A lossy all-reduce of one float32 vector, called once for each step."""

    @abstractmethod
    def all_reduce(self, peers: Peers, vector: Vector) -> None:
        """Replaces the vector by an approximation of the sum over all ranks."""


def _padded(vector: Vector, multiple: int) -> Vector:
    padding = -vector.size % multiple
    return np.concatenate([vector, np.zeros(padding, np.float32)]) if padding else vector


def _finite(residual: Vector) -> Vector:
    """Sets entries that are not finite to 0, in place."""
    residual[~np.isfinite(residual)] = 0
    return residual


class Cast(Compressor):
    """Every value in 16 bits: ``float16`` (more precise) or ``bfloat16`` (the range of float32)."""

    def __init__(self, kind: str = "bfloat16") -> None:
        if kind not in ("float16", "bfloat16"):
            raise InvalidArgument(f"kind: {kind!r} is neither float16 nor bfloat16")
        self._is_bfloat16 = kind == "bfloat16"

    def _pack(self, values: Vector) -> Array:
        if self._is_bfloat16:
            return float32_to_bfloat16(np.ascontiguousarray(values))
        with np.errstate(over="ignore"):
            return values.astype(np.float16)

    def _unpack(self, data: Array) -> Vector:
        return (
            bfloat16_to_float32(data.view(np.uint16)) if self._is_bfloat16 else data.view(np.float16).astype(np.float32)
        )

    def all_reduce(self, peers: Peers, vector: Vector) -> None:
        n = peers.size
        packed = self._pack(_padded(vector, n))
        slices = self._unpack(peers.run_collective("all_to_all", packed)).reshape(n, -1)
        own = self._pack(slices.sum(axis=0, dtype=np.float32))
        vector[:] = self._unpack(peers.run_collective("all_gather", own))[: vector.size]


class Int8(Compressor):
    """Each value as an 8-bit multiple of its block's scale, with error feedback."""

    def __init__(self, block: int = 256) -> None:
        if not 1 <= block <= MAX_BLOCK:
            raise InvalidArgument(f"block: {block} values are not in 1..{MAX_BLOCK}")
        self._block = block
        self._residual: Vector | None = None
        self._total_residual: Vector | None = None
        """The residual of the slice that this rank sums."""

    def _pack(self, values: Vector) -> tuple[Array, Vector]:
        """The steps and then the scales as bytes, and the values that they decode to."""
        blocks = values.reshape(-1, self._block)
        scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        with np.errstate(all="ignore"):
            steps = np.rint(np.where(scales > 0, blocks / scales, 0)).astype(np.int8)
        decoded = (steps * scales).astype(np.float32).reshape(-1)
        return np.concatenate([steps.reshape(-1).view(np.uint8), scales.reshape(-1).view(np.uint8)]), decoded

    def _unpack(self, data: Array, count: int) -> Vector:
        steps = data[:count].view(np.int8).reshape(-1, self._block)
        scales = data[count:].copy().view(np.float32).reshape(-1, 1)
        result: Vector = (steps * scales).astype(np.float32).reshape(-1)
        return result

    def all_reduce(self, peers: Peers, vector: Vector) -> None:
        n = peers.size
        values = _padded(vector, n * self._block)
        if self._residual is None or self._total_residual is None:
            self._residual = np.zeros_like(values)
            self._total_residual = np.zeros(values.size // n, np.float32)
        values = values + self._residual
        packed = [self._pack(part) for part in values.reshape(n, -1)]
        self._residual = _finite(values - np.concatenate([decoded for _, decoded in packed]))
        received = peers.run_collective("all_to_all", np.concatenate([data for data, _ in packed]))
        count = values.size // n
        total = np.sum([self._unpack(data, count) for data in received.reshape(n, -1)], axis=0, dtype=np.float32)
        total += self._total_residual
        own, decoded = self._pack(total)
        self._total_residual = _finite(total - decoded)
        result = peers.run_collective("all_gather", own).reshape(n, -1)
        vector[:] = np.concatenate([self._unpack(data, count) for data in result])[: vector.size]


class TopK(Compressor):
    """Only the largest entries, with error feedback."""

    def __init__(self, fraction: float = 0.01) -> None:
        if not 0 < fraction <= 1:
            raise InvalidArgument(f"fraction: {fraction} is not in (0, 1]")
        self._fraction = fraction
        self._residual: Vector | None = None

    def all_reduce(self, peers: Peers, vector: Vector) -> None:
        residual = np.zeros_like(vector) if self._residual is None else self._residual
        values = vector + residual
        k = max(1, int(values.size * self._fraction)) if values.size else 0
        if k:
            indices = np.argpartition(np.abs(values), values.size - k)[values.size - k :].astype(np.int32)
            sent = np.concatenate([indices.view(np.uint8), values[indices].view(np.uint8)])
            values[indices] = 0
        else:
            sent = np.empty(0, np.uint8)
        self._residual = _finite(values)
        vector[:] = 0
        for data in peers.run_collective("all_gather", sent).reshape(peers.size, -1):
            # The indices of one rank are distinct, so adding by index adds every entry, in rank order.
            vector[data[: 4 * k].view(np.int32)] += data[4 * k :].view(np.float32)


class PowerSGD(Compressor):
    """The vector as a matrix, approximated by one of low rank, with error feedback (Vogels et al., 2019)."""

    def __init__(self, rank: int = 4, seed: int = 0) -> None:
        if rank < 1:
            raise InvalidArgument(f"rank: {rank} is not positive")
        self._rank = rank
        self._seed = seed
        self._residual: Vector | None = None
        self._right: Array | None = None

    def all_reduce(self, peers: Peers, vector: Vector) -> None:
        if not vector.size:
            return
        columns = int(np.ceil(np.sqrt(vector.size)))
        residual = np.zeros_like(vector) if self._residual is None else self._residual
        values = vector + residual
        matrix = _padded(values, columns).reshape(-1, columns)
        rank = min(self._rank, *matrix.shape)
        if self._right is None or not np.isfinite(self._right).all():
            # The same on every rank. It is kept between steps and converges to the gradient's dominant directions.
            self._right = np.random.default_rng(self._seed).standard_normal((columns, rank)).astype(np.float32)
        left = peers.all_reduce_sum(matrix @ self._right)
        left = np.linalg.qr(left.astype(np.float64))[0].astype(np.float32)
        own = matrix.T @ left
        self._residual = _finite(values - (left @ own.T).reshape(-1)[: values.size])
        self._right = peers.all_reduce_sum(own)
        vector[:] = (left @ self._right.T).reshape(-1)[: vector.size]


_KINDS: dict[str, tuple[Callable[..., Compressor], Callable[[str], float] | None]] = {
    "float16": (partial(Cast, "float16"), None),
    "bfloat16": (partial(Cast, "bfloat16"), None),
    "int8": (Int8, int),
    "top_k": (TopK, float),
    "powersgd": (PowerSGD, int),
}
"""The constructor of each compressor, and the type of its setting (values a block, fraction, rank) if it has one."""


def compressor(name: str) -> Compressor:
    """A new compressor: ``float16 bfloat16 int8 top_k powersgd``; a setting follows a colon: ``top_k:0.05``."""
    kind, colon, setting = name.partition(":")
    if kind not in _KINDS:
        raise InvalidArgument(f"compression: {name!r} is unknown; known: {', '.join(_KINDS)}")
    make, parse = _KINDS[kind]
    if not colon:
        return make()
    if parse is None:
        raise InvalidArgument(f"compression: {name!r}: {kind} has no setting")
    try:
        return make(parse(setting))
    except ValueError as error:
        raise InvalidArgument(f"compression: {name!r}: {error}") from None
