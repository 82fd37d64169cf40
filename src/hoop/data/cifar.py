"""CIFAR-10: 32x32 colour images in ten classes, from any of three sources.

    data_batch_1.bin … test_batch.bin     the official binary files, unpacked
    cifar-10-binary.tar.gz                the official archive of these files
    cifar10-lossless-webp.zip             the same pixels in 60 % of the space; needs Pillow

Each batch is converted to the official binary format and verified against the official md5.
"""

from __future__ import annotations

import functools
import gzip
import importlib
import io
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from hoop.data.dataset import Splits
from hoop.data.download import (
    BoundedStream,
    Progress,
    cache_dir,
    existing_paths,
    not_found,
    read_bounded,
    too_large,
    verify,
)
from hoop.data.download import download as fetch
from hoop.data.images import Augment, ImageData
from hoop.errors import FailedPrecondition

CHECKSUMS = {
    "data_batch_1": "md5:5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2": "md5:5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3": "md5:942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4": "md5:ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5": "md5:53f37980c15c3d472c316c40844f3f0d",
    "test_batch": "md5:803d5f7f4d78ea53de84dbe85f74fb6d",
}
ARCHIVE, ZIP, FOLDER = "cifar-10-binary.tar.gz", "cifar10-lossless-webp.zip", "cifar-10-batches-bin"
URL, URL_CHECKSUM = f"https://www.cs.toronto.edu/~kriz/{ARCHIVE}", "md5:c32a1d4ab5d03f1284b67883e8d87530"

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE
"""Bytes per sample: a label, then the red, green and blue pixels."""

BATCH_BYTES = 10_000 * RECORD
_ARCHIVE_BYTES = 6 * BATCH_BYTES + (1 << 20)
"""Upper limit of the archive's size in bytes, packed or unpacked: six batches, names and headers."""

Bytes = npt.NDArray[np.uint8]


def cifar10(*, augment: bool = True, download: bool = False, progress: Progress | None = None) -> Splits:
    """Loads CIFAR-10. ``augment``: flip and crop training images. ``download``: download it (170 MB) if not found."""
    sources = ("data_batch_1.bin", ARCHIVE, ZIP)
    names = [f"{folder}{name}" for folder in (f"{FOLDER}/", "", "cifar10/", f"cifar10/{FOLDER}/") for name in sources]
    source = next(existing_paths(names), None)
    if source is None and download:
        source = fetch(
            URL, cache_dir() / "cifar10" / ARCHIVE, URL_CHECKSUM, max_bytes=_ARCHIVE_BYTES, progress=progress
        )
    if source is None:
        raise not_found(
            "cifar10",
            f"{ARCHIVE} (or what it unpacks to, or {ZIP})",
            "load it with download=True, which downloads 170 MB",
        )
    augmentation = Augment(flip=True, crop=4) if augment else None
    train, test = (
        ImageData(f"cifar10/{split}", images, labels, mean=MEAN, std=STD, augment=transform)
        for split, (images, labels), transform in zip(
            ("train", "test"), _arrays(source), (augmentation, None), strict=True
        )
    )
    return Splits(train, test)


@functools.lru_cache(maxsize=1)
def _arrays(source: Path) -> tuple[tuple[Bytes, Bytes], tuple[Bytes, Bytes]]:
    """Images and labels of both splits, every batch verified; cached, because unpacking takes seconds."""
    reader = _READERS[source.suffix]
    try:
        batches = {name: verify(data, what, CHECKSUMS[name]) for name, what, data in reader(source)}
    except (KeyError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, OSError, ValueError) as error:
        raise FailedPrecondition(f"{source} is damaged ({error}); remove it and fetch it again") from error
    if absent := sorted(set(CHECKSUMS) - set(batches)):
        raise FailedPrecondition(f"{source} has no {', '.join(absent)}; remove it and fetch it again")
    *train, test = (np.frombuffer(batches[name], np.uint8).reshape(-1, RECORD) for name in CHECKSUMS)
    return _split(train), _split([test])


def _split(batches: list[Bytes]) -> tuple[Bytes, Bytes]:
    """Splits records into images and labels."""
    images = np.concatenate([records[:, 1:] for records in batches])
    return images.reshape(-1, 3, SIDE, SIDE), np.concatenate([records[:, 0] for records in batches])


Batches = Iterator[tuple[str, str, bytes]]
"""One tuple for each batch file: its name, its description for errors, its bytes."""


def _from_files(first: Path) -> Batches:
    for name in CHECKSUMS:
        path = first.with_name(f"{name}.bin")
        with path.open("rb") as file:
            yield name, str(path), read_bounded(file, BATCH_BYTES, path)


def _from_archive(path: Path) -> Batches:
    with gzip.open(path) as unpacked:
        stream = BoundedStream(cast("BinaryIO", unpacked), _ARCHIVE_BYTES, path)
        with tarfile.open(fileobj=cast("BinaryIO", stream), mode="r|") as archive:
            for member in archive:
                name, what = Path(member.name).stem, f"{path}, {member.name}"
                if name in CHECKSUMS and member.size > BATCH_BYTES:
                    raise too_large(what, BATCH_BYTES)
                if name in CHECKSUMS and (file := archive.extractfile(member)):
                    yield name, what, file.read()


def _from_zip(path: Path) -> Batches:
    try:
        image = importlib.import_module("PIL.Image")
    except ImportError as error:
        raise FailedPrecondition(f"{path} needs Pillow: pip install 'hoop[cifar]'") from error
    with zipfile.ZipFile(path) as archive:
        strips = sorted(name for name in archive.namelist() if name.endswith(".webp"))
        for name in CHECKSUMS:
            labels = np.frombuffer(_unzipped(archive, f"{name}/labels.u8", path), np.uint8)
            records = np.empty((len(labels), RECORD), np.uint8)
            records[:, 0] = labels
            pixels = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
            start = 0
            for strip in (strip for strip in strips if strip.startswith(f"{name}/")):
                opened = image.open(io.BytesIO(_unzipped(archive, strip, path)))  # reads the header only
                if 3 * opened.width * opened.height > BATCH_BYTES:
                    raise too_large(f"{path}, {strip}", BATCH_BYTES)
                column = np.asarray(opened.convert("RGB"))
                images = column.reshape(-1, SIDE, SIDE, 3).transpose(0, 3, 1, 2)
                pixels[start : start + len(images)] = images
                start += len(images)
            yield name, f"{path}, {name}", records.tobytes()


def _unzipped(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    with archive.open(name) as file:
        return read_bounded(cast("BinaryIO", file), BATCH_BYTES, f"{path}, {name}")


_READERS: dict[str, Callable[[Path], Batches]] = {".bin": _from_files, ".gz": _from_archive, ".zip": _from_zip}
