"""Text from outside: made printable and short, and parsed without a crash.

Names, errors, file names and JSON that came from another process, a user or a file may hold anything: half of a
surrogate pair, which no protobuf string can carry; escape characters, which a terminal obeys; a megabyte; JSON that is
nested too deep to be parsed. Every text that leaves a process, in an answer, an event, the journal or on a terminal,
passes through ``printable``; errors (``HoopError``) and event logs do that by themselves. JSON comes in through
``parse_json``.
"""

from __future__ import annotations

import json
from typing import Any

LONGEST = 8192
"""Bytes of one text that goes out: a stack trace fits, and an event log of ten thousand stays below 80 MiB."""


def printable(text: str, longest: int = LONGEST) -> str:
    """The text with everything that cannot be shown written as an escape, at most ``longest`` bytes of UTF-8.

    Newlines and tabs stay. Of a longer text the middle is left out. What is printable and short comes back as it is.
    """
    if len(text) > 2 * longest:  # before a loop over a megabyte
        text = text[:longest] + text[-longest:]
    if not text.isprintable():
        text = "".join(one if one.isprintable() or one in "\n\t" else _escape(one) for one in text)
    data = text.encode()
    if len(data) <= longest:
        return text
    mark = " [...] "
    room = max(0, longest - len(mark))
    head, tail = data[: room - room // 2], data[len(data) - room // 2 :]
    return f"{head.decode(errors='ignore')}{mark}{tail.decode(errors='ignore')}"[:longest]


def _escape(one: str) -> str:
    return one.encode("unicode_escape").decode()


def parse_json(text: str | bytes) -> Any:
    """``json.loads`` of what anybody may have written: raises ``ValueError`` and nothing else."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def cleaned(value: Any) -> Any:
    """Parsed JSON with every text in it, keys included, made ``printable``."""
    match value:
        case str():
            return printable(value)
        case dict():
            return {printable(key): cleaned(one) for key, one in value.items()}
        case list():
            return [cleaned(one) for one in value]
    return value
