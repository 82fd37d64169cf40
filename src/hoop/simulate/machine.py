"""What a core, its memory and its links cost beyond the arithmetic of a model.

A copy or a sum of small vectors stays in the caches and costs less a byte than one of large vectors. So both may be
curves, points of (bytes of a vector, seconds a byte), between which is interpolated; without points they are flat.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Machine:
    """One machine's costs, in seconds of a core."""

    instruction_s: float = 12e-6
    """Any instruction, beside what it does."""
    message_s: float = 45e-6
    """A message, for who sends it and again for who receives it."""
    copy_s: float = 1 / 6e9
    """A byte copied."""
    add_s: float = 1 / 4e9
    """A byte of a sum of two vectors."""
    meeting_s: float = 6e-6
    """A meeting of devices that share memory, for each of them."""
    step_s: float = 75e-6
    """What a step costs beside its instructions."""
    crowding: float = 1.0
    """How many times slower a core is when all cores of its host are at work: they share caches and memory."""
    byte_s: float | None = None
    """A byte of a message, for who sends it and again for who receives it; None: it is copied, no more."""
    agree_s: float = 180e-6
    """A word that all ranks agree on after a step, where no sum of gradients carries it, for each of them."""
    copy_at: Points = ()
    add_at: Points = ()

    def copy(self, count: float, of: float | None = None) -> float:
        """So many bytes copied, of vectors of ``of`` bytes (if that is more) that are worked through."""
        return count * rate(self.copy_at, of or count, self.copy_s)

    def add(self, count: float, of: float | None = None) -> float:
        """So many bytes of a sum."""
        return count * rate(self.add_at, of or count, self.add_s)

    def message(self, size: float) -> float:
        """A message of so many bytes, at one of its ends."""
        return self.message_s + (self.copy(size) if self.byte_s is None else self.byte_s * size)


USUAL = Machine()
FREE = Machine(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, agree_s=0.0)
"""A machine that adds nothing: what is left is the plan."""


def rate(points: Points, size: float, flat: float) -> float:
    """Seconds a byte of vectors of so many bytes: on straight lines between the points, over the size's logarithm."""
    if not points:
        return flat
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if size <= high:
            return first + (second - first) * math.log(size / low) / math.log(high / low)
    return points[-1][1]


def read_machine(data: Mapping[str, Any]) -> Machine:
    """From JSON; what is no cost is named."""
    known = {field.name for field in fields(Machine)}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"machine: no {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return Machine(**{name: _value(name, value) for name, value in data.items()})


def _value(name: str, value: Any) -> Any:
    if name in ("copy_at", "add_at"):
        return _points(name, value)
    return None if name == "byte_s" and value is None else _number(value, name)


def _points(name: str, value: Sequence[Sequence[Any]]) -> Points:
    found = tuple((_number(size, name), _number(seconds, name)) for size, seconds in value)
    if any(low >= high for (low, _), (high, _) in itertools.pairwise(((0.0, 0.0), *found))):
        raise ValueError(f"{name}: sizes {[size for size, _ in found]} do not go up from above 0")
    return found


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}, not a number of 0 or more")
    return float(value)
