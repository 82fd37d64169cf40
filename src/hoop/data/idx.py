"""IDX files, the format MNIST was published in: a header of sizes, then bytes. Gzipped or not."""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hoop.data.checksum import verified
from hoop.errors import FailedPrecondition

Bytes = npt.NDArray[np.uint8]

NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class Arrays(NamedTuple):
    """Images (samples, height, width) and labels of both splits, in the order of ``NAMES``."""

    train_images: Bytes
    train_labels: Bytes
    test_images: Bytes
    test_labels: Bytes


def file_of(folder: Path, name: str) -> Path | None:
    """The file of this name, plain or gzipped; some unpackers write ``idx3`` with a dot before it."""
    names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def is_in(folder: Path) -> bool:
    """Whether all four files are there."""
    return all(file_of(folder, name) for name in NAMES)


def contents(path: Path) -> bytes:
    """The file's bytes, unpacked."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        return gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FailedPrecondition(f"{path} is damaged ({error}); remove it and fetch it again") from error


def parsed(data: bytes, what: object) -> Bytes:
    """The array in an IDX file of bytes."""
    rank = data[3] if data[:3] == b"\0\0\x08" and len(data) > 3 else 0
    start = 4 + 4 * rank
    shape = struct.unpack_from(f">{rank}I", data, 4) if len(data) >= start else ()
    if not shape or len(data) - start != np.prod(shape, dtype=np.int64):
        raise FailedPrecondition(
            f"{what} is not an IDX file of bytes: {len(data)} B, begins {data[:8].hex(' ')}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read(folder: Path, checksums: Mapping[str, str]) -> Arrays:
    """The four files of a folder; ``checksums`` are of what they unpack to."""
    arrays = []
    for name in NAMES:
        path = file_of(folder, name)
        if path is None:
            raise FailedPrecondition(f"{folder}: {name} is gone; fetch it again")
        arrays.append(parsed(verified(contents(path), path, checksums[name]), path))
    return Arrays(*arrays)
