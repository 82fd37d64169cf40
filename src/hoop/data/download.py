"""Finds, verifies and downloads dataset files.

Datasets are searched in the directories of ``HOOP_DATA``, then in ``~/.cache/hoop``. A file with a wrong checksum is
rejected. A download appears complete and verified, or not at all.
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
from typing import BinaryIO, Protocol

from hoop.errors import FailedPrecondition, InvalidArgument, NotFound

VARIABLE = "HOOP_DATA"


def cache_dir() -> Path:
    """The directory for downloads, searched last."""
    return Path("~/.cache/hoop").expanduser()


def data_dirs() -> list[Path]:
    """Directories to search, in order; ``HOOP_DATA`` may list several, separated as in ``PATH``."""
    named = [Path(part).expanduser() for part in os.environ.get(VARIABLE, "").split(os.pathsep) if part]
    return [*named, cache_dir()]


def existing_paths(names: Iterable[str], also: Iterable[Path] = ()) -> Iterator[Path]:
    """The existing paths with these names in the data directories and then in ``also``, directory by directory."""
    names = list(names)
    for folder in [*data_dirs(), *also]:
        yield from (folder / name for name in names if (folder / name).exists())


def not_found(dataset: str, wanted: str, remedy: str) -> NotFound:
    """The error for a dataset that was not found; ``wanted``: files to provide, ``remedy``: another way to get it."""
    searched = ", ".join(f"{folder}{'' if folder.is_dir() else ' (no such directory)'}" for folder in data_dirs())
    return NotFound(
        f"dataset {dataset} is not in {searched}: put {wanted} into one of them, name its directory in {VARIABLE}, "
        f"or {remedy}"
    )


class Digest(Protocol):
    """The methods of hashlib's objects that this module uses."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


ALGORITHMS: dict[str, Callable[[], Digest]] = {
    "md5": lambda: hashlib.md5(usedforsecurity=False),  # most datasets publish md5 checksums
    "sha256": hashlib.sha256,
}


def new_digest(checksum: str) -> Digest:
    """A new digest of the algorithm named in ``md5:…`` or ``sha256:…``."""
    return ALGORITHMS[checksum.partition(":")[0]]()


def check_digest(what: object, expected: str, actual: Digest) -> None:
    """Raises unless the digest is the expected one; ``what``: the data, for the error."""
    algorithm, _, value = expected.partition(":")
    if actual.hexdigest() != value:
        raise FailedPrecondition(
            f"{what} is damaged or something else: {algorithm} expected {value}, found {actual.hexdigest()}; "
            f"remove it and fetch it again"
        )


def verify(data: bytes, what: object, expected: str) -> bytes:
    """Returns the data if its checksum is the expected one; raises otherwise."""
    actual = new_digest(expected)
    actual.update(data)
    check_digest(what, expected, actual)
    return data


def read_bounded(file: BinaryIO, most: int, what: object) -> bytes:
    """The rest of a file. FailedPrecondition if it is longer than ``most`` bytes, before more of it is read.

    A few bytes of an archive can unpack to gigabytes; they must not be in memory before the checksum is known.
    """
    data = file.read(most + 1)
    if len(data) > most:
        raise too_large(what, most)
    return data


def too_large(what: object, most: int) -> FailedPrecondition:
    """The error for data that is longer than it can be."""
    return FailedPrecondition(
        f"{what} is damaged or something else: more than the {most} bytes that it can have; remove it and fetch it "
        "again"
    )


class BoundedStream:
    """A readable file that raises FailedPrecondition after ``most`` bytes."""

    def __init__(self, file: BinaryIO, most: int, what: object) -> None:
        self._file, self._most, self._left, self._what = file, most, most, what

    def read(self, size: int = -1) -> bytes:
        wanted = self._left + 1 if size < 0 else min(size, self._left + 1)
        data = self._file.read(wanted)
        self._left -= len(data)
        if self._left < 0:
            raise too_large(self._what, self._most)
        return data


Progress = Callable[[int, int], None]
"""Callback with the bytes received and the total bytes (0: unknown)."""

CHUNK = 1 << 20
MAX_DOWNLOAD_BYTES = 1 << 30


def download(
    url: str,
    path: Path,
    checksum: str,
    *,
    max_bytes: int = MAX_DOWNLOAD_BYTES,
    progress: Progress | None = None,
    timeout_s: float = 30.0,
) -> Path:
    """Downloads a file of at most ``max_bytes`` to ``path`` unless it exists.

    ``timeout_s``: how long the server may be silent.

    The download goes to a temporary file in the same directory, which is renamed once its checksum is right. So no
    reader and no later run sees a partial file. A broken download restarts from the beginning.
    """
    if not url.startswith(("https://", "http://")):
        raise InvalidArgument(f"url: {url!r} is not http or https")
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(url, timeout=timeout_s) as response:  # noqa: S310
            total, actual = int(response.headers.get("Content-Length") or 0), new_digest(checksum)
            while chunk := response.read(CHUNK):
                file.write(chunk)
                actual.update(chunk)
                if file.tell() > max_bytes:
                    raise too_large(url, max_bytes)
                if progress:
                    progress(file.tell(), total)
            file.flush()
            os.fsync(file.fileno())
        check_digest(url, checksum, actual)
        os.replace(partial, path)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # the error holds the response and its socket
        raise FailedPrecondition(
            f"{url} could not be downloaded ({error}); try again, or put the file at {path} yourself"
        ) from error
    finally:
        Path(partial).unlink(missing_ok=True)
    return path
