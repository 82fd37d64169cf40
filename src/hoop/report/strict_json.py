"""JSON that every parser accepts: non-finite numbers are written as strings, as in protobuf's JSON.

Python's ``json`` would write a bare ``NaN``, which JavaScript, Perfetto and most other parsers reject.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import PurePath
from typing import Any

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Encode, compactly unless ``indent`` is given. Accepts numbers of NumPy and torch, and dataclasses."""
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(
            value, allow_nan=False, default=_plain, ensure_ascii=False, indent=indent, separators=separators
        )
    except ValueError:  # a number is not finite; rare, so the whole value is traversed only now
        return json.dumps(_encode_non_finite(value), ensure_ascii=False, indent=indent, separators=separators)


def loads(text: str | bytes) -> Any:
    """Decode the output of ``dumps``, with non-finite numbers restored; raises ``ValueError`` for invalid JSON."""
    try:
        return _decode_non_finite(json.loads(text))
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


def _encode_non_finite(value: Any) -> Any:
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
        case None | bool() | int() | float() | str():
            return value
        case Mapping():
            return {key: _encode_non_finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_encode_non_finite(item) for item in value]
    return _encode_non_finite(_plain(value))


def _decode_non_finite(value: Any) -> Any:
    match value:
        case str():
            return _NON_FINITE.get(value, value)
        case dict():
            return {key: _decode_non_finite(item) for key, item in value.items()}
        case list():
            return [_decode_non_finite(item) for item in value]
    return value
