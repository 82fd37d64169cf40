"""Which device put which samples into each update, as the summed gradient itself tells.

    a shard's slot   | gradient … | tail | 0 0 | 65536 + device, print of its samples | 0 0 | …     two places a shard
    the sum          | gradient … | tail |         everybody's, each in its own places           |

Whoever computes a shard writes its own number and a 24-bit print of the sample numbers it read into that shard's
places, and nothing into the others'. They are added up with the gradient, by the same operation: a shard that is in
the sum once shows its device, one that is missing shows nothing, one that is in it twice shows a count of two. So the
update knows what went into it, and so does every survivor of a device that died right after.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import numpy as np

from hoop.collectives.reduction import Array
from hoop.data.dataset import Indices

PLACES = 2
"""Elements a shard has."""
_ONCE = 1 << 16
"""One shard in the sum; what is below is its device. Sums stay exact: float32 counts to 2**24."""
KEPT = 4096
"""Updates that are remembered: the rows that ``progress_reporter`` keeps, and steps that are under way."""

Fed = tuple[list[int], str]
"""For each shard the device (0: none; -2: it is there twice), and all prints in hexadecimal, six digits each."""


def sample_fingerprint(samples: Indices) -> int:
    """24 bits of a checksum of sample numbers, in their order; never 0, which is for no samples."""
    return (zlib.crc32(np.ascontiguousarray(samples, np.int64).data) & 0xFFFFFF) or 1


def mark(slot: Array, shard: int, device: int, fed: int) -> None:
    """Writes into a slot's part for evidence: this device computed this shard, of samples with this print."""
    slot[PLACES * shard] = _ONCE + device % _ONCE
    slot[PLACES * shard + 1] = fed


class Provenance:
    """What the last updates were made of."""

    def __init__(self, shards: int) -> None:
        self.places = PLACES * shards
        self._steps: dict[int, Array] = {}
        self._nothing: Array = np.zeros(self.places, np.float32)

    def note(self, step: int, summed: Array, more: bool = False) -> None:
        """What stands in these places of the sum that an update was made with; ``more``: one of several of a step."""
        found = summed[: self.places]
        if more and step in self._steps:
            found = self._steps[step] + found
        self._steps[step] = found.copy()
        if len(self._steps) > KEPT:
            del self._steps[next(iter(self._steps))]

    def forget(self, step: int) -> None:
        """These steps and later ones are done again."""
        self._steps = {one: found for one, found in self._steps.items() if one < step}

    def row(self, step: int) -> Array:
        """Of one step, as a sum; zeros where nothing is known."""
        return self._steps.get(step, self._nothing)

    def rows(self, first: int, count: int) -> Array:
        """Of so many steps."""
        return np.array([self.row(step) for step in range(first, first + count)]).reshape(count, self.places)

    def adopt(self, first: int, rows: Iterable[Array]) -> None:
        """What another rank knows of these steps."""
        for step, row in enumerate(rows, start=first):
            self.note(step, row)

    def told(self, first: int, count: int) -> list[Fed | None]:
        """Of so many steps, what an event says; None where nothing is known."""
        known = [step for step in range(first, first + count) if step in self._steps]
        if not known:
            return [None] * count
        summed = np.nan_to_num(np.stack([self._steps[step] for step in known]), posinf=0, neginf=0)
        numbers = summed.astype(np.int64)
        times, device = np.divmod(numbers[:, ::PLACES], _ONCE)
        by = np.where(times == 1, device, -times).tolist()
        prints = numbers[:, 1::PLACES].astype(">u4").view(np.uint8).reshape(len(known), -1, 4)[:, :, 1:]
        found: dict[int, Fed] = {
            step: (each, one.tobytes().hex()) for step, each, one in zip(known, by, prints, strict=True)
        }
        return [found.get(step) for step in range(first, first + count)]
