"""Sanitizing of untrusted text and JSON, and numbers of things in words.

Names, errors, file names and JSON from another process, a user or a file may hold anything: half of a surrogate pair,
which protobuf cannot encode; escape characters, which a terminal executes; a megabyte of text; JSON nested too deep to
parse. Every text that leaves a process in an answer, an event, the journal or on a terminal passes through
``printable``; ``HoopError`` and ``EventLog`` do that themselves. JSON is parsed with ``parse_json``.
"""

from __future__ import annotations

import json
from typing import Any

MAX_TEXT_BYTES = 8192
"""Maximum bytes of one text: a stack trace fits, and a log of ten thousand events stays below 80 MiB."""


def printable(text: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
    """Escape unprintable characters except newline and tab, and cut the middle out to fit ``max_bytes`` of UTF-8.

    A printable, short text is returned unchanged.
    """
    if len(text) > 2 * max_bytes:  # avoids a loop over a megabyte
        text = text[:max_bytes] + text[-max_bytes:]
    if not text.isprintable():
        text = "".join(one if one.isprintable() or one in "\n\t" else _escape(one) for one in text)
    data = text.encode()
    if len(data) <= max_bytes:
        return text
    ellipsis = " [...] "
    kept = max(0, max_bytes - len(ellipsis))
    head, tail = data[: kept - kept // 2], data[len(data) - kept // 2 :]
    return f"{head.decode(errors='ignore')}{ellipsis}{tail.decode(errors='ignore')}"[:max_bytes]


def counted(count: int, thing: str) -> str:
    """``1 device``, ``1,024 devices``, ``2 recoveries``: a number of things in words. ``thing``: a regular noun."""
    if count == 1:
        return f"1 {thing}"
    return f"{count:,} {thing[:-1]}ies" if thing.endswith("ry") else f"{count:,} {thing}s"


def _escape(one: str) -> str:
    return one.encode("unicode_escape").decode()


def parse_json(text: str | bytes) -> Any:
    """``json.loads`` for untrusted input: raises ``ValueError`` and no other exception."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def parse_printable_json(text: str) -> Any:
    """``parse_json`` with ``printable`` applied to every text in it. Raises ``ValueError`` and no other exception.

    Most JSON has no text that ``printable`` would change; then only the characters are looked at, not every value: a
    job's steps come several times a second, each with the fingerprints of its samples.
    """
    value = parse_json(text)
    plain = text.isascii() and text.isprintable() and "\\" not in text
    if plain and max(map(len, text.split('"'))) <= MAX_TEXT_BYTES:
        return value
    return printable_json(value)


def printable_json(value: Any) -> Any:
    """Apply ``printable`` to every text in parsed JSON, keys included."""
    match value:
        case str():
            return printable(value)
        case dict():
            return {printable(key): printable_json(one) for key, one in value.items()}
        case list():
            return [printable_json(one) for one in value]
    return value
