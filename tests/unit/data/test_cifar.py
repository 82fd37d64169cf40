"""CIFAR-10: the real dataset where it is present, and a small one in every source format."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoop.data import ImageData, cifar, load
from hoop.errors import FailedPrecondition, NotFound

HAS_PILLOW = importlib.util.find_spec("PIL") is not None
needs_pillow = pytest.mark.skipif(not HAS_PILLOW, reason="Pillow is not installed: pip install 'hoop[cifar]'")

RANDOM = np.random.default_rng(1)
BATCHES = {name: RANDOM.integers(0, 10, (3, cifar.RECORD), dtype=np.uint8) for name in cifar.CHECKSUMS}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the checksums by those of batches of three records."""
    sums = {name: f"md5:{hashlib.md5(records.tobytes()).hexdigest()}" for name, records in BATCHES.items()}
    monkeypatch.setattr(cifar, "CHECKSUMS", sums)


def write_batches(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, records in BATCHES.items():
        (folder / f"{name}.bin").write_bytes(records.tobytes())
    return folder / "data_batch_2.bin"


def write_tar(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    with tarfile.open(folder / cifar.ARCHIVE, "w:gz") as archive:
        for name, records in {"readme": np.zeros(3, np.uint8), **BATCHES}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = records.nbytes
            archive.addfile(member, io.BytesIO(records.tobytes()))
    return folder / cifar.ARCHIVE


def write_webp_zip(folder: Path) -> Path:
    from PIL import Image

    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / cifar.ZIP, "w") as archive:
        for name, records in BATCHES.items():
            archive.writestr(f"{name}/labels.u8", records[:, 0].tobytes())
            pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            for number, strip in enumerate((pixels[:2], pixels[2:])):
                file = io.BytesIO()
                Image.fromarray(strip.reshape(-1, 32, 3)).save(file, "webp", lossless=True)
                archive.writestr(f"{name}/{number:02}.webp", file.getvalue())
    return folder / cifar.ZIP


SOURCES = [write_batches, write_tar, pytest.param(write_webp_zip, marks=needs_pillow)]
Source = Callable[[Path], Path]


def images_of(dataset: Any) -> ImageData:
    assert isinstance(dataset, ImageData)
    return dataset


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("folder", [".", "cifar10", "cifar-10-batches-bin"])
def test_every_source_gives_the_same_dataset(data_dir: Path, source: Source, folder: str) -> None:
    source(data_dir / folder)
    train, test = (images_of(split) for split in load("cifar10"))
    records = np.concatenate([BATCHES[f"data_batch_{number}"] for number in range(1, 6)])
    assert np.array_equal(train.images.reshape(15, -1), records[:, 1:])
    assert train.labels.tolist() == records[:, 0].tolist()
    assert np.array_equal(test.images.reshape(3, -1), BATCHES["test_batch"][:, 1:])
    assert train.augment is not None
    assert test.augment is None
    assert images_of(load("cifar10", augment=False).train).augment is None


def test_normalisation_is_per_channel(data_dir: Path, tiny: None) -> None:
    write_batches(data_dir)
    test = images_of(load("cifar10").test)
    inputs, _ = test.batch(np.arange(3), epoch=0, seed=0)
    mean, std = (np.array(values).reshape(3, 1, 1) for values in (cifar.MEAN, cifar.STD))
    assert np.allclose(inputs.numpy(), (test.images / 255 - mean) / std, atol=1e-6)


@pytest.mark.parametrize("source", SOURCES)
def test_a_checksum_mismatch_reports_both_checksums(
    data_dir: Path, source: Source, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = source(data_dir)
    actual = cifar.CHECKSUMS["data_batch_2"].removeprefix("md5:")
    expected = "0" * 32
    monkeypatch.setitem(cifar.CHECKSUMS, "data_batch_2", f"md5:{expected}")
    with pytest.raises(FailedPrecondition, match=f"md5 expected {expected}, found {actual}") as caught:
        load("cifar10")
    assert str(caught.value).startswith(str(path))
    assert "data_batch_2" in str(caught.value)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("source", [write_tar, pytest.param(write_webp_zip, marks=needs_pillow)])
def test_a_truncated_archive_is_rejected(data_dir: Path, source: Source) -> None:
    path = source(data_dir)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(FailedPrecondition, match=f"{path} is damaged"):
        load("cifar10")


ZEROS = bytes(1 << 20)


def write_large_batch(folder: Path) -> Path:
    write_batches(folder)
    (folder / "data_batch_1.bin").write_bytes(ZEROS)
    return folder / "data_batch_1.bin"


def write_tar_with(folder: Path, kind: bytes, name: str, size: int = len(ZEROS)) -> Path:
    with tarfile.open(folder / cifar.ARCHIVE, "w:gz") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.size = kind, size
        archive.addfile(member, io.BytesIO(ZEROS))
    return folder / cifar.ARCHIVE


def write_large_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / cifar.ZIP, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data_batch_1/labels.u8", ZEROS)
    return folder / cifar.ZIP


def write_zip_with_a_large_image(folder: Path) -> Path:
    from PIL import Image

    with zipfile.ZipFile(folder / cifar.ZIP, "w") as archive:
        archive.writestr("data_batch_1/labels.u8", b"\0")
        file = io.BytesIO()
        Image.fromarray(np.zeros((2048, 32, 3), np.uint8)).save(file, "webp", lossless=True)
        archive.writestr("data_batch_1/00.webp", file.getvalue())
    return folder / cifar.ZIP


@pytest.mark.parametrize(
    "source",
    [
        write_large_batch,
        lambda folder: write_tar_with(folder, tarfile.REGTYPE, "data_batch_1.bin"),
        lambda folder: write_tar_with(folder, tarfile.REGTYPE, "a file before the batches"),
        lambda folder: write_tar_with(folder, tarfile.GNUTYPE_LONGNAME, "a name of a megabyte"),
        pytest.param(write_large_zip, marks=needs_pillow),
        pytest.param(write_zip_with_a_large_image, marks=needs_pillow),
    ],
)
def test_a_file_that_unpacks_to_too_much_is_refused_before_it_is_in_memory(
    data_dir: Path, source: Source, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "BATCH_BYTES", 3 * cifar.RECORD)
    monkeypatch.setattr(cifar, "_ARCHIVE_BYTES", 100_000)
    path = source(data_dir)
    with pytest.raises(FailedPrecondition, match=rf"^{path}.* more than the \d+ bytes that it can have"):
        load("cifar10")


@pytest.mark.usefixtures("tiny")
def test_a_missing_file_is_named(data_dir: Path) -> None:
    write_batches(data_dir).unlink()
    with pytest.raises(FailedPrecondition, match=r"data_batch_2\.bin"):
        load("cifar10")


@pytest.mark.usefixtures("tiny")
def test_the_zip_without_pillow_says_what_to_install(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data_dir / cifar.ZIP).write_bytes(b"")
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(FailedPrecondition, match=r"needs Pillow: pip install 'hoop\[cifar\]'"):
        load("cifar10")


def test_missing_data_says_what_to_do() -> None:
    with pytest.raises(NotFound, match=r"dataset cifar10 is not in .*cifar-10-binary.tar.gz.*download=True"):
        load("cifar10")


@needs_pillow
@pytest.mark.usefixtures("real_datasets")
def test_the_real_dataset_decodes_to_the_official_bytes() -> None:
    try:
        train, test = load("cifar10")
    except NotFound as error:
        pytest.skip(str(error))
    assert (len(train), len(test)) == (50_000, 10_000)
    assert np.bincount(images_of(train).labels).tolist() == [5000] * 10
    assert images_of(test).labels[:5].tolist() == [3, 8, 8, 0, 6]
    inputs, _ = test.batch(np.arange(10_000), epoch=0, seed=0)
    assert abs(inputs.double().mean()) < 0.05
