"""The sampler: which samples each step takes, and counter-based random numbers for shuffling and augmentation.

An epoch is one permutation of the samples, cut into steps; each step is cut into shards:

    permutation(epoch)   17 3 42 8 | 5 0 11 29 | 2 31      without replacement: every sample once per epoch
    step                     0     |     1     |   2       the last may be short; nothing dropped or repeated
    shard(…, s, 2)        0  | 1   |  0  |  1  | 0 | 1     contiguous, sizes differ by one at most

Which rank computes which shard: ``strategies/data_parallel.py``.

A step that takes every sample takes them in storage order: a shuffle would give the same samples at a higher cost of
gathering. A position in the data is (epoch, step); its samples follow by arithmetic, so resuming costs nothing.

Random numbers are counter-based: a draw is a hash of its key and the sample index, not the next output of a stateful
generator. So it does not depend on the device, the batch or the order of draws. The hash is the output function of
splitmix64, integer arithmetic modulo 2^64: equal on every machine and with every version of NumPy, whose generator
methods may change between releases.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hoop.errors import InvalidArgument, OutOfRange

if TYPE_CHECKING:
    from hoop.data.dataset import Indices

ORDER, FLIP, CROP, ITEM = range(4)
"""Purposes of a draw: the last part of its key, so that two uses never share random numbers."""

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1


def _splitmix64(value: int) -> int:
    """The output of a splitmix64 generator in state ``value``."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FACTORS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _FACTORS[1]) & _MASK
    return value ^ (value >> 31)


def make_key(*parts: int) -> int:
    """Hashes numbers in 0..2^64-1 into one key; their order matters."""
    key = 0
    for part in parts:
        if not 0 <= part <= _MASK:
            raise InvalidArgument(f"seed or epoch: {part} is not in 0..2^64-1")
        key = _splitmix64(key ^ part)
    return key


def random_draws(samples: npt.NDArray[np.int64], *parts: int) -> npt.NDArray[np.uint64]:
    """64 random bits for each sample, under the key ``make_key(*parts)``.

    Different samples get different values (splitmix64 is a bijection on 64-bit numbers), so sorting has no ties.
    """
    state = samples.astype(np.uint64)
    state *= np.uint64(_GOLDEN)
    state += np.uint64((make_key(*parts) + _GOLDEN) & _MASK)
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1])):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state


@dataclass(frozen=True)
class SampleOrder:
    """The order of samples: a function of (seed, epoch, length), equal on every machine.

    The permutation of an epoch sorts the samples by a hash of (seed, epoch, length, sample): see ``random_draws``.
    """

    seed: int
    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InvalidArgument(f"length: {self.length} samples cannot be ordered; at least 1")
        if not 0 <= self.seed < 2**64:
            raise InvalidArgument(f"seed: {self.seed} is not in 0..2^64-1")

    def permutation(self, epoch: int) -> Indices:
        """Every sample index once, in the order of this epoch; read-only."""
        if epoch < 0:
            raise InvalidArgument(f"epoch: {epoch} is not 0 or more")
        return _permutation(self.seed, epoch, self.length)

    def steps(self, batch_size: int) -> int:
        """Number of steps per epoch."""
        if batch_size < 1:
            raise InvalidArgument(f"batch_size: {batch_size} is not at least 1")
        return -(-self.length // batch_size)

    def batches(self, batch_size: int) -> list[slice]:
        """The slice of the permutation that each step takes."""
        starts = range(0, self.steps(batch_size) * batch_size, batch_size)
        return [slice(start, min(start + batch_size, self.length)) for start in starts]

    def indices(self, epoch: int, step: int, batch_size: int) -> Indices:
        """The sample indices of one step."""
        steps = self.steps(batch_size)
        if not 0 <= step < steps:
            raise OutOfRange(f"step: an epoch of {self.length} by {batch_size} has 0..{steps - 1}, not {step}")
        if steps == 1:
            return _storage_order(self.length)
        return self.permutation(epoch)[step * batch_size : (step + 1) * batch_size]


def shard(indices: Indices, shard: int, shards: int) -> Indices:
    """One of ``shards`` nearly equal contiguous parts; may be empty if there are fewer indices than shards."""
    if not 0 <= shard < shards:
        raise OutOfRange(f"shard: {shard} is not in 0..{shards - 1}")
    count = len(indices)
    return indices[count * shard // shards : count * (shard + 1) // shards]


@functools.lru_cache(maxsize=4)
def _storage_order(length: int) -> Indices:
    """0..length-1, read-only. The same array object at every step, so that the engine can cache batches by identity."""
    order = np.arange(length, dtype=np.int64)
    order.flags.writeable = False
    return order


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, length: int) -> Indices:
    """Cached for a few epochs, because every step takes a slice of it."""
    keys = random_draws(np.arange(length, dtype=np.int64), seed, epoch, length, ORDER)
    order = sorting_order(keys)
    order.flags.writeable = False
    return order


def sorting_order(keys: npt.NDArray[np.uint64]) -> Indices:
    """What ``np.argsort(keys)`` returns for keys without ties, in a third of the time.

    Each key gives its low bits to its index, and the numbers are sorted themselves. Keys with equal high bits, of which
    there are few as long as there are far fewer than 2^32 keys, are put in order afterwards.
    """
    bits = np.uint64(max(1, (len(keys) - 1).bit_length()))
    low = np.uint64((1 << int(bits)) - 1)
    packed = keys & ~low
    packed |= np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    order = (packed & low).view(np.int64)
    packed >>= bits
    tied = np.flatnonzero(packed[1:] == packed[:-1])
    if len(tied):
        places = np.union1d(tied, tied + 1)
        among = order[places]
        order[places] = among[np.argsort(keys[among])]
    return order
