"""Parsing and formatting of sizes and durations."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from fractions import Fraction

from hoop.errors import InvalidArgument

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_TIME_UNITS: Mapping[str, int | Fraction] = {
    "us": Fraction(1, 10**6),
    "ms": Fraction(1, 1000),
    "s": 1,
    "": 1,
    "min": 60,
}
_MAX_DIGITS = 30
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def _quantity(text: str, units: Mapping[str, int | Fraction], what: str, field: str, *, fold: bool = False) -> Fraction:
    """Parse a number with a unit exactly; raises InvalidArgument. ``fold`` ignores the case of the unit."""
    match = _QUANTITY.fullmatch(text)
    unit = "" if match is None else match[2].lower() if fold else match[2]
    if match is None or unit not in units or len(match[1]) > _MAX_DIGITS:
        raise InvalidArgument(f"{field}: {text[:40]!r} is not {what}")
    return Fraction(match[1]) * units[unit]


def parse_size(text: str | int, field: str = "size") -> int:
    """Bytes from ``1048576``, ``"256MiB"`` or ``"1.5 GB"``; rounded up to whole bytes."""
    what = "a size; write bytes or e.g. 256MiB, 1.5GB"
    if isinstance(text, str):
        units = {unit.lower(): factor for unit, factor in _SIZE_UNITS.items()}
        size = math.ceil(_quantity(text, units, what, field, fold=True))
    else:
        try:
            size = operator.index(text)  # a file, or a caller, may give anything
        except TypeError:
            raise InvalidArgument(f"{field}: {text!r:.40} is not {what}") from None
    if not 0 <= size < 2**63:
        raise InvalidArgument(f"{field}: {str(text)[:40]} is not in 0..2^63 bytes")
    return size


def format_size(size: int) -> str:
    """``268435456`` as ``256 MiB``: exact if it is a multiple of the unit, else with one decimal."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _SIZE_UNITS[unit]
        if size >= factor:
            return f"{size // factor} {unit}" if size % factor == 0 else f"{size / factor:.1f} {unit}"
    return f"{size} B"


def parse_duration(text: str | float, field: str = "duration") -> float:
    """Seconds from ``2``, ``"500ms"`` or ``"1.5s"``."""
    try:
        seconds = float(
            _quantity(text, _TIME_UNITS, "a duration; write seconds or e.g. 500ms, 2s", field)
            if isinstance(text, str)
            else text
        )
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidArgument):
            raise
        raise InvalidArgument(f"{field}: {str(text)[:40]} is neither seconds nor a duration such as 500ms") from None
    if not 0 <= seconds < math.inf:
        raise InvalidArgument(f"{field}: {str(text)[:40]} is not a finite duration of zero or more")
    return seconds
