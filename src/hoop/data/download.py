"""Where datasets are: the directories of ``HOOP_DATA``, then ``~/.cache/hoop``.

Bytes that are what they should be, or are refused by name.

One file from the network: whole and with the right checksum, or not at all.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from hoop.errors import FailedPrecondition, InvalidArgument, NotFound

VARIABLE = "HOOP_DATA"


def cache() -> Path:
    """Where downloads go, and where everyone looks last."""
    return Path("~/.cache/hoop").expanduser()


def places() -> list[Path]:
    """Directories to look in, in order; ``HOOP_DATA`` has several like ``PATH`` does."""
    named = [Path(part).expanduser() for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return [*named, cache()]


def found(names: Iterable[str], also: Iterable[Path] = ()) -> Iterator[Path]:
    """What exists of these names, place by place; the places that only some datasets know come last."""
    names = list(names)
    for place in [*places(), *also]:
        yield from (place / name for name in names if (place / name).exists())


def missing(dataset: str, wanted: str, remedy: str) -> NotFound:
    """The error that says where was looked and what to do."""
    looked = ", ".join(f"{place}{'' if place.is_dir() else ' (no such directory)'}" for place in places())
    return NotFound(
        f"dataset {dataset} is not in {looked}: put {wanted} into one of them, name its directory in {VARIABLE}, "
        f"or {remedy}"
    )


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


Progress = Callable[[int, int], None]
"""Told bytes that arrived and bytes in all (0: the server did not say)."""

CHUNK = 1 << 20


def download(
    url: str, path: Path, checksum: str, *, progress: Progress | None = None, timeout_s: float = 30.0
) -> Path:
    """The file at ``path``, fetched unless it is there; ``timeout_s`` is how long the server may be silent.

    It is written beside its place and moved there once its checksum is right, so that no reader, and no
    later run, ever sees half a file. A broken download starts again from nothing.
    """
    if not url.startswith(("https://", "http://")):
        raise InvalidArgument(f"url: {url!r} is not http or https")
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(url, timeout=timeout_s) as answer:  # noqa: S310
            total, actual = int(answer.headers.get("Content-Length") or 0), digest(checksum)
            while chunk := answer.read(CHUNK):
                file.write(chunk)
                actual.update(chunk)
                if progress:
                    progress(file.tell(), total)
            file.flush()
            os.fsync(file.fileno())
        refuse(url, checksum, actual)
        os.replace(partial, path)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is the server's answer too, with a socket
        raise FailedPrecondition(
            f"{url} could not be downloaded ({error}); try again, or put the file at {path} yourself"
        ) from error
    finally:
        Path(partial).unlink(missing_ok=True)
    return path
