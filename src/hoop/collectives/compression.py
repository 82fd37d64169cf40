"""All-reduce with fewer bytes: a float32 vector is sent in fewer bits, and what that loses is not lost for good.

    Cast      float16 or bfloat16           1/2 of the bytes   relative error of one rounding, each way
    Int8      8 bits and a scale a block    about 1/4          at most 1/254 of a block's largest value, each way
    TopK      the k largest entries         8k·n bytes         the rest waits
    PowerSGD  a matrix of low rank          r(a+b) of a·b      the rest waits

All but Cast keep what they did not send as a residual and add it to the next vector (error feedback), so every bit of a
gradient arrives in the end. A compressor belongs to one vector: ``compressed`` keeps one for each. A vector with a NaN
or an infinity spoils its own sum only: what is not finite is not kept.

The sum is made in float32 by the owner of each slice (Cast, Int8), so errors do not add up from hop to hop; all
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

MOST_IN_A_BLOCK = 1 << 16
"""A vector is filled up to whole blocks, one a rank at least."""


class Peers(Protocol):
    """What a compressor asks of the other ranks."""

    size: int

    def exchange(self, collective: str, source: Array) -> Array:
        """all_to_all or all_gather of plain bytes."""

    def total(self, part: Array) -> Array:
        """The exact sum of everybody's part."""


class Compressor(ABC):
    """A lossy all-reduce of one float32 vector, step after step."""

    @abstractmethod
    def all_reduce(self, peers: Peers, vector: Vector) -> None:
        """Replaces the vector by (nearly) the sum of everybody's."""


def _padded(vector: Vector, multiple: int) -> Vector:
    rest = -vector.size % multiple
    return np.concatenate([vector, np.zeros(rest, np.float32)]) if rest else vector


def _finite(rest: Vector) -> Vector:
    """What is kept for the next step."""
    rest[~np.isfinite(rest)] = 0
    return rest


class Cast(Compressor):
    """Every value in 16 bits: ``float16`` (more precise) or ``bfloat16`` (float32's range)."""

    def __init__(self, kind: str = "bfloat16") -> None:
        if kind not in ("float16", "bfloat16"):
            raise InvalidArgument(f"kind: {kind!r} is neither float16 nor bfloat16")
        self._brain = kind == "bfloat16"

    def _pack(self, values: Vector) -> Array:
        if self._brain:
            return float32_to_bfloat16(np.ascontiguousarray(values))
        with np.errstate(over="ignore"):
            return values.astype(np.float16)

    def _unpack(self, data: Array) -> Vector:
        return (
            bfloat16_to_float32(data.view(np.uint16))
            if self._brain
            else data.view(np.float16).astype(np.float32)
        )

    def all_reduce(self, peers: Peers, vector: Vector) -> None:
        n = peers.size
        packed = self._pack(_padded(vector, n))
        slices = self._unpack(peers.exchange("all_to_all", packed)).reshape(n, -1)
        mine = self._pack(slices.sum(axis=0, dtype=np.float32))
        vector[:] = self._unpack(peers.exchange("all_gather", mine))[: vector.size]


class Int8(Compressor):
    """Blocks of values as 8-bit steps of the block's own scale, with error feedback."""

    def __init__(self, block: int = 256) -> None:
        if not 1 <= block <= MOST_IN_A_BLOCK:
            raise InvalidArgument(f"block: {block} values are not in 1..{MOST_IN_A_BLOCK}")
        self._block = block
        self._residual: Vector | None = None
        self._owned: Vector | None = None

    def _pack(self, values: Vector) -> tuple[Array, Vector]:
        """Steps then scales, as bytes; and what they stand for."""
        blocks = values.reshape(-1, self._block)
        scales = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        with np.errstate(all="ignore"):
            steps = np.rint(np.where(scales > 0, blocks / scales, 0)).astype(np.int8)
        exact = (steps * scales).astype(np.float32).reshape(-1)
        return np.concatenate([steps.reshape(-1).view(np.uint8), scales.reshape(-1).view(np.uint8)]), exact

    def _unpack(self, data: Array, count: int) -> Vector:
        steps = data[:count].view(np.int8).reshape(-1, self._block)
        scales = data[count:].copy().view(np.float32).reshape(-1, 1)
        result: Vector = (steps * scales).astype(np.float32).reshape(-1)
        return result

    def all_reduce(self, peers: Peers, vector: Vector) -> None:
        n = peers.size
        values = _padded(vector, n * self._block)
        if self._residual is None or self._owned is None:
            self._residual = np.zeros_like(values)
            self._owned = np.zeros(values.size // n, np.float32)
        values = values + self._residual
        packed = [self._pack(part) for part in values.reshape(n, -1)]
        self._residual = _finite(values - np.concatenate([exact for _, exact in packed]))
        arrived = peers.exchange("all_to_all", np.concatenate([data for data, _ in packed]))
        count = values.size // n
        total = np.sum(
            [self._unpack(data, count) for data in arrived.reshape(n, -1)], axis=0, dtype=np.float32
        )
        total += self._owned
        mine, exact = self._pack(total)
        self._owned = _finite(total - exact)
        result = peers.exchange("all_gather", mine).reshape(n, -1)
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
            places = np.argpartition(np.abs(values), values.size - k)[values.size - k :].astype(np.int32)
            sent = np.concatenate([places.view(np.uint8), values[places].view(np.uint8)])
            values[places] = 0
        else:
            sent = np.empty(0, np.uint8)
        self._residual = _finite(values)
        vector[:] = 0
        for data in peers.exchange("all_gather", sent).reshape(peers.size, -1):
            # Places are distinct within one rank's, so adding by index is exact and in rank order.
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
            # The same on every rank, and kept from step to step: it converges to the gradient's own directions.
            self._right = (
                np.random.default_rng(self._seed).standard_normal((columns, rank)).astype(np.float32)
            )
        left = peers.total(matrix @ self._right)
        left = np.linalg.qr(left.astype(np.float64))[0].astype(np.float32)
        mine = matrix.T @ left
        self._residual = _finite(values - (left @ mine.T).reshape(-1)[: values.size])
        self._right = peers.total(mine)
        vector[:] = (left @ self._right.T).reshape(-1)[: vector.size]


_KINDS: dict[str, tuple[Callable[..., Compressor], Callable[[str], float] | None]] = {
    "float16": (partial(Cast, "float16"), None),
    "bfloat16": (partial(Cast, "bfloat16"), None),
    "int8": (Int8, int),
    "top_k": (TopK, float),
    "powersgd": (PowerSGD, int),
}
"""How each is made, and of what type its setting is: values a block, a fraction, a rank."""


def compressor(name: str) -> Compressor:
    """One of ``float16 bfloat16 int8 top_k powersgd``; ``top_k:0.05`` gives it a setting of its own."""
    kind, colon, setting = name.partition(":")
    if kind not in _KINDS:
        raise InvalidArgument(f"compression: {name!r} is unknown; known: {', '.join(_KINDS)}")
    make, takes = _KINDS[kind]
    if not colon:
        return make()
    if takes is None:
        raise InvalidArgument(f"compression: {name!r}: {kind} has no setting")
    try:
        return make(takes(setting))
    except ValueError as error:
        raise InvalidArgument(f"compression: {name!r}: {error}") from None
