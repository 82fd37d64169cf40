"""JSON that every reader takes: numbers that are not finite become the words that protobuf's JSON uses.

Python would write a bare ``NaN``, on which JavaScript, Perfetto and most others stop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import PurePath
from typing import Any

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Compact unless an indent is given; NumPy's and torch's numbers are numbers, dataclasses objects."""
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(
            value,
            allow_nan=False,
            default=_plain,
            ensure_ascii=False,
            indent=indent,
            separators=separators,
        )
    except ValueError:  # something is not finite: rare, so only then is all of it walked through
        return json.dumps(_worded(value), ensure_ascii=False, indent=indent, separators=separators)


def loads(text: str | bytes) -> Any:
    """What ``dumps`` was given, the words turned back into numbers; raises ``ValueError`` for anything else."""
    try:
        return _numbered(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # an array, a tensor, or one of their scalars
        return value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r:.80}")


def _worded(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {key: _worded(item) for key, item in value.items()}
        case list() | tuple():
            return [_worded(item) for item in value]
    return _worded(_plain(value))


def _numbered(value: Any) -> Any:
    match value:
        case str():
            return _WORDS.get(value, value)
        case dict():
            return {key: _numbered(item) for key, item in value.items()}
        case list():
            return [_numbered(item) for item in value]
    return value
