"""Bytes that are what they should be, or are refused by name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

from hoop.errors import FailedPrecondition


class Digest(Protocol):
    """The part of hashlib's objects that is used."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


ALGORITHMS: dict[str, Callable[[], Digest]] = {
    "md5": lambda: hashlib.md5(usedforsecurity=False),  # what most datasets were published with
    "sha256": hashlib.sha256,
}


def digest(checksum: str) -> Digest:
    """An empty digest of the kind that ``md5:…`` or ``sha256:…`` names."""
    return ALGORITHMS[checksum.partition(":")[0]]()


def refuse(what: object, expected: str, actual: Digest) -> None:
    """Raises unless the digest is the expected one."""
    algorithm, _, value = expected.partition(":")
    if actual.hexdigest() != value:
        raise FailedPrecondition(
            f"{what} is damaged or something else: {algorithm} expected {value}, found {actual.hexdigest()}; "
            f"remove it and fetch it again"
        )


def verified(data: bytes, what: object, expected: str) -> bytes:
    """The data, if its checksum is the expected one."""
    actual = digest(expected)
    actual.update(data)
    refuse(what, expected, actual)
    return data
