"""One file from the network: whole and with the right checksum, or not at all."""

from __future__ import annotations

import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from hoop.data.checksum import digest, refuse
from hoop.errors import FailedPrecondition, InvalidArgument

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
