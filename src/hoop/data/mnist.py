"""MNIST, which ships with the package, and Fashion-MNIST, which has the same shape.

Both are published as IDX files (a header with sizes, then bytes), gzipped or not. The files of both have the same
names, so a folder with them is recognised by the checksum of its training labels.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import lzma
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from hoop.data.dataset import Splits
from hoop.data.download import Progress, cache_dir, existing_paths, new_digest, not_found, read_bounded, verify
from hoop.data.download import download as fetch
from hoop.data.images import ImageData
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument
from hoop.files import write_bytes

Bytes = npt.NDArray[np.uint8]

MAX_IDX_BYTES = 64 << 20
"""Maximum size in bytes of an unpacked IDX file; the largest has 47 MB."""
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


class Arrays(NamedTuple):
    """Images (samples, height, width) and labels of both splits, in the order of ``NAMES``."""

    train_images: Bytes
    train_labels: Bytes
    test_images: Bytes
    test_labels: Bytes


def idx_path(folder: Path, name: str) -> Path | None:
    """The path of an IDX file, plain or gzipped; some unpackers write ``.idx3`` in place of ``-idx3``."""
    names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
    return next((folder / name for name in names if (folder / name).is_file()), None)


def has_idx_files(folder: Path) -> bool:
    """Whether the folder has all four IDX files."""
    return all(idx_path(folder, name) for name in NAMES)


def read_unpacked(path: Path) -> bytes:
    """The bytes of an IDX file, decompressed if it is gzipped."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return read_bounded(cast("BinaryIO", file), MAX_IDX_BYTES, path)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise FailedPrecondition(f"{path} is damaged ({error}); remove it and fetch it again") from error


def parse_idx(data: bytes, what: object) -> Bytes:
    """The array in an IDX file of unsigned bytes; ``what``: the file, for errors."""
    ndim = data[3] if data[:3] == b"\0\0\x08" and len(data) > 3 else 0
    start = 4 + 4 * ndim
    shape = struct.unpack_from(f">{ndim}I", data, 4) if len(data) >= start else ()
    if not shape or len(data) - start != np.prod(shape, dtype=np.int64):
        raise FailedPrecondition(f"{what} is not an IDX file of bytes: {len(data)} B, begins {data[:8].hex(' ')}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def read_idx_files(folder: Path, checksums: Mapping[str, str]) -> Arrays:
    """Reads and verifies the four IDX files of a folder; ``checksums``: of the decompressed files."""
    arrays = []
    for name in NAMES:
        path = idx_path(folder, name)
        if path is None:
            raise FailedPrecondition(f"{folder}: {name} is missing; fetch it again")
        arrays.append(parse_idx(verify(read_unpacked(path), path, checksums[name]), path))
    return Arrays._make(arrays)


PACKAGED = Path(__file__).parent / "files" / "mnist-u8.xz"
PACKAGED_CHECKSUM = "sha256:e9b40985d011bd5a36195bdeb447f26b7824f3acd02e51a1636098d784d5fe98"
UNPACKED = "mnist-u8"
"""Name of the decompressed file in the cache directory."""
UNPACKED_BYTES = 54_950_000
UNPACKED_CHECKSUM = "sha256:c2069063c1105f2bf96266aef1ff68c6e13bdda7a54e37bf19c16f1db24efc83"

# Checksums of the decompressed files, because gzip headers differ between packers.
MNIST = {
    "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
}
FASHION = {
    "train-images-idx3-ubyte": "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "md5:9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "md5:8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "md5:15d484375f8d13e6eb1aabb0c3f46965",
}
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
FASHION_GZIPPED = {
    "train-images-idx3-ubyte": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
DEBIAN = Path("/usr/share/datasets")
"""Directory of Debian's package dataset-fashion-mnist."""


def mnist(*, size: int = 28) -> Splits:
    """Loads MNIST. ``size``: image size; 56 or 112 enlarges the images by a whole factor, pixel by pixel.

    IDX files in ``HOOP_DATA`` are preferred (the bytes are the same, and verified). Without them the file in the
    package is decompressed, once: a copy stays in the cache directory, which later processes read in a tenth of the
    time.
    """
    if size < 28 or size % 28:
        raise InvalidArgument(f"size: {size} is not a multiple of 28; e.g. 28, 56, 112")
    folder = next(_folders(("mnist", "MNIST/raw", "."), other=FASHION), None)
    arrays = _packaged() if folder is None else _mnist_in(folder)
    return _splits("mnist", arrays, 0.1307, 0.3081, size // 28)


def fashion_mnist(*, download: bool = False, progress: Progress | None = None) -> Splits:
    """Loads Fashion-MNIST. ``download``: download it (31 MB) if not found."""
    folders = ("fashion-mnist", "FashionMNIST/raw", ".")
    folder = next(_folders(folders, other=MNIST, also=[DEBIAN]), None)
    if folder is None and download:
        folder = cache_dir() / "fashion-mnist"
        for name, checksum in FASHION_GZIPPED.items():
            fetch(f"{FASHION_URL}/{name}.gz", folder / f"{name}.gz", checksum, progress=progress)
    if folder is None:
        raise not_found(
            "fashion-mnist",
            f"the folder fashion-mnist with {', '.join(NAMES)} (gzipped or not)",
            "load it with download=True, which downloads 31 MB",
        )
    return _splits("fashion-mnist", _fashion_in(folder), 0.2860, 0.3530, 1)


def _folders(names: Iterable[str], other: dict[str, str], also: Iterable[Path] = ()) -> Iterator[Path]:
    """Folders that have the four IDX files, except those with the files of the ``other`` dataset."""
    labels = "train-labels-idx1-ubyte"
    for folder in existing_paths(names, also):
        if has_idx_files(folder) and (path := idx_path(folder, labels)):
            actual = new_digest(other[labels])
            actual.update(read_unpacked(path))
            if not other[labels].endswith(actual.hexdigest()):
                yield folder


@functools.lru_cache(maxsize=1)
def _packaged() -> Arrays:
    if not PACKAGED.is_file():
        wanted = f"the folder mnist with {', '.join(NAMES)} (gzipped or not)"
        raise not_found("mnist", wanted, f"install Hoop again, with its {PACKAGED.name}")
    data = _cached_copy() or _decompressed()
    flat, train, pixels = np.frombuffer(data, np.uint8), 60_000, 28 * 28
    images, labels = flat[: 70_000 * pixels].reshape(-1, 28, 28), flat[70_000 * pixels :]
    return Arrays(images[:train], labels[:train], images[train:], labels[train:])


def _cached_copy() -> bytes | None:
    """The decompressed file from the cache directory; None if there is none, or it is damaged."""
    path = cache_dir() / UNPACKED
    try:
        if path.stat().st_size == UNPACKED_BYTES:
            return verify(path.read_bytes(), path, UNPACKED_CHECKSUM)
    except (OSError, FailedPrecondition):
        pass
    return None


def _decompressed() -> bytes:
    """The decompressed file of the package; a copy is left in the cache directory, if it can be written."""
    data = lzma.decompress(verify(PACKAGED.read_bytes(), PACKAGED, PACKAGED_CHECKSUM))
    with contextlib.suppress(OSError, HoopError):
        write_bytes(cache_dir() / UNPACKED, data)
    return data


@functools.lru_cache(maxsize=1)
def _mnist_in(folder: Path) -> Arrays:
    return read_idx_files(folder, MNIST)


@functools.lru_cache(maxsize=1)
def _fashion_in(folder: Path) -> Arrays:
    return read_idx_files(folder, FASHION)


def _splits(name: str, arrays: Arrays, mean: float, std: float, enlarge: int) -> Splits:
    train, test = (
        ImageData(f"{name}/{split}", images[:, None], labels, mean=[mean], std=[std], enlarge=enlarge)
        for split, images, labels in (
            ("train", arrays.train_images, arrays.train_labels),
            ("test", arrays.test_images, arrays.test_labels),
        )
    )
    return Splits(train, test)
