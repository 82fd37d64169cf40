"""Random numbers by name instead of by turn: a draw is a hash of what it is for.

A generator's numbers depend on how many were taken before, so on who took them. A draw here depends on its
key and on the sample alone: any device, in any batch, in any order, draws the same. It is integer arithmetic
modulo 2^64 (the output function of splitmix64), so also on any machine and with any version of NumPy, whose
generators' methods may change between releases.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hoop.errors import InvalidArgument

ORDER, FLIP, CROP, ITEM = range(4)
"""What a draw is for: the last part of its key, so that no two uses share their numbers."""

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MASK = 2**64 - 1


def _mixed(value: int) -> int:
    """splitmix64 of one number: the next output of a generator in this state."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _FACTORS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _FACTORS[1]) & _MASK
    return value ^ (value >> 31)


def key_of(*parts: int) -> int:
    """One key of several numbers, each in 0..2^64-1; their order counts."""
    key = 0
    for part in parts:
        if not 0 <= part <= _MASK:
            raise InvalidArgument(f"seed or epoch: {part} is not in 0..2^64-1")
        key = _mixed(key ^ part)
    return key


def draws(samples: npt.NDArray[np.int64], *parts: int) -> npt.NDArray[np.uint64]:
    """64 random bits for each sample, under the key of these numbers.

    Different samples get different values (splitmix64 permutes the 64-bit numbers), so sorting has no ties.
    """
    state = samples.astype(np.uint64)
    state *= np.uint64(_GOLDEN)
    state += np.uint64((key_of(*parts) + _GOLDEN) & _MASK)
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1])):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    state ^= state >> np.uint64(31)
    return state
