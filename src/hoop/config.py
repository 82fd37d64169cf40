"""How people write sizes and durations, and how Hoop writes them back."""

from __future__ import annotations

import re

from hoop.errors import InvalidArgument

_SIZE_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int, field: str = "size") -> int:
    """Bytes from ``1048576``, ``"256MiB"`` or ``"1.5 GB"``."""
    if isinstance(text, int):
        size = text
    else:
        match = _QUANTITY.fullmatch(text)
        units = {unit.lower(): factor for unit, factor in _SIZE_UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise InvalidArgument(f"{field}: {text!r} is not a size; write bytes or e.g. 256MiB, 1.5GB")
        size = (
            int(float(match[1]) * units[match[2].lower()])
            if "." in match[1]
            else int(match[1]) * units[match[2].lower()]
        )
    if size < 0:
        raise InvalidArgument(f"{field}: {text!r} is negative")
    return size


def format_size(size: int) -> str:
    """``268435456`` as ``256 MiB``: exact where it divides, else one decimal."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _SIZE_UNITS[unit]
        if size >= factor:
            return f"{size // factor} {unit}" if size % factor == 0 else f"{size / factor:.1f} {unit}"
    return f"{size} B"


def parse_duration(text: str | float, field: str = "duration") -> float:
    """Seconds from ``2``, ``"500ms"`` or ``"1.5s"``."""
    if isinstance(text, int | float):
        seconds = float(text)
    else:
        match = _QUANTITY.fullmatch(text)
        if match is None or match[2] not in _TIME_UNITS:
            raise InvalidArgument(f"{field}: {text!r} is not a duration; write seconds or e.g. 500ms, 2s")
        seconds = float(match[1]) * _TIME_UNITS[match[2]]
    if not 0 <= seconds < float("inf"):
        raise InvalidArgument(f"{field}: {text!r} is not a finite duration of zero or more")
    return seconds
