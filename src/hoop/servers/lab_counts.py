"""The unit of ``count`` in the lab's AllReduce calls: bytes to some clients, float64 elements to others.

A client copies a vector to a device before it reduces it. So the length of the last copy to the vector's address shows
the unit: ``CopyLengths`` remembers those lengths, and ``find_unit`` compares them with a count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

FLOAT64_BYTES = 8
MAX_COPIES = 65536
"""Addresses whose last copy is remembered; the oldest are forgotten first."""


class CopyLengths:
    """By device and address, the length in bytes of the last copy to that address."""

    def __init__(self, most: int = MAX_COPIES) -> None:
        self._lengths: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._most = most

    def record(self, device_id: int, address: int, length: int) -> None:
        self._lengths.pop((device_id, address), None)
        self._lengths[device_id, address] = length
        if len(self._lengths) > self._most:
            self._lengths.popitem(last=False)

    def of(self, places: Iterable[tuple[int, int]]) -> list[int]:
        """The lengths that are known for these pairs of device and address."""
        return [length for place in places if (length := self._lengths.get(place)) is not None]


def find_unit(count: int, lengths: Iterable[int]) -> str:
    """``bytes`` or ``elements``, if the lengths of the ranks' last copies show which one it is; else empty.

    A length shows the unit if it is the whole vector in that unit, or if the vector in elements would be longer.
    """
    shown = set()
    for length in lengths:
        if length == FLOAT64_BYTES * count:
            shown.add("elements")
        elif count <= length < FLOAT64_BYTES * count:
            shown.add("bytes")
    if "bytes" in shown and count % FLOAT64_BYTES:  # not whole elements, so it is neither
        return ""
    return shown.pop() if len(shown) == 1 else ""
