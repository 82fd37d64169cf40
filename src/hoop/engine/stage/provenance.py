"""Provenance: which device contributed which samples to each update, carried in the summed gradient itself.

    a shard's slot   | gradient … | tail | 0 0 | 65536 + device, fingerprint | 0 0 | …     two elements a shard
    the total        | gradient … | tail |  the elements of all shards, each in its own place  |

The device that computes a shard writes its number and a 24-bit fingerprint of the sample numbers into the two elements
of that shard. All other elements of its slot are 0. The all-reduce that sums the gradients sums these elements too. In
the total, a shard that was added once shows its device, a missing shard shows 0, and a shard that was added twice shows
a count of 2. Every rank that has the total therefore knows what the update was made of, also if the device that
computed a shard dies right after.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from hoop.collectives.reduction import Array

if TYPE_CHECKING:
    from hoop.data.dataset import Indices

ELEMENTS_PER_SHARD = 2
"""Number of elements of the provenance row that belong to one shard."""
_ONCE = 1 << 16
"""Mark of one contribution of a shard; the value below it is the device. Sums are exact: float32 counts to 2**24."""
MAX_STEPS = 4096
"""Number of steps that are kept: the rows that ``progress_reporter`` keeps, and the steps in progress."""

StepProvenance = tuple[list[int], str]
"""Device of each shard (0: missing; -2: added twice), and all fingerprints in hexadecimal, six digits each."""


def sample_fingerprint(samples: Indices) -> int:
    """Return a 24-bit checksum of sample numbers, in their order. Never 0, which means no samples."""
    return (zlib.crc32(np.ascontiguousarray(samples, np.int64).data) & 0xFFFFFF) or 1


def mark(slot: Array, shard: int, device: int, fingerprint: int) -> None:
    """Write into a provenance row that ``device`` computed ``shard`` from the samples with this fingerprint."""
    slot[ELEMENTS_PER_SHARD * shard] = _ONCE + device % _ONCE
    slot[ELEMENTS_PER_SHARD * shard + 1] = fingerprint


class Provenance:
    """The provenance rows of the last updates, by step (0 is the first)."""

    def __init__(self, shards: int) -> None:
        self.width = ELEMENTS_PER_SHARD * shards
        """Number of elements of a row."""
        self._rows: dict[int, Array] = {}
        self._empty_row: Array = np.zeros(self.width, np.float32)

    def record(self, step: int, summed: Array, more: bool = False) -> None:
        """Record the row of an update from ``summed``, the provenance part of a total.

        ``more``: add to the step's row, where a step makes several updates.
        """
        found = summed[: self.width]
        if more and step in self._rows:
            found = self._rows[step] + found
        self._rows[step] = found.copy()
        if len(self._rows) > MAX_STEPS:
            del self._rows[next(iter(self._rows))]

    def forget(self, step: int) -> None:
        """Drop this step and the later ones, which will be run again."""
        self._rows = {one: found for one, found in self._rows.items() if one < step}

    def row(self, step: int) -> Array:
        """Return the row of a step; zeros if it is unknown."""
        return self._rows.get(step, self._empty_row)

    def rows(self, first: int, count: int) -> Array:
        """Return the rows of ``count`` steps from ``first`` on, as a matrix."""
        return np.array([self.row(step) for step in range(first, first + count)]).reshape(count, self.width)

    def set_rows(self, first: int, rows: Iterable[Array]) -> None:
        """Replace the rows of the steps from ``first`` on by those of another rank."""
        for step, row in enumerate(rows, start=first):
            self.record(step, row)

    def as_events(self, first: int, count: int) -> list[StepProvenance | None]:
        """Return the rows of ``count`` steps in the form that events carry; None for an unknown step."""
        known = [step for step in range(first, first + count) if step in self._rows]
        if not known:
            return [None] * count
        summed = np.nan_to_num(np.stack([self._rows[step] for step in known]), posinf=0, neginf=0)
        numbers = summed.astype(np.int64)
        times, device = np.divmod(numbers[:, ::ELEMENTS_PER_SHARD], _ONCE)
        devices = np.where(times == 1, device, -times).tolist()
        fingerprints = (
            numbers[:, 1::ELEMENTS_PER_SHARD].astype(">u4").view(np.uint8).reshape(len(known), -1, 4)[:, :, 1:]
        )
        found: dict[int, StepProvenance] = {
            step: (each, one.tobytes().hex()) for step, each, one in zip(known, devices, fingerprints, strict=True)
        }
        return [found.get(step) for step in range(first, first + count)]
