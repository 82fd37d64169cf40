"""MNIST from the package and from IDX files; Fashion-MNIST, whose files have the same names."""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoop.data import ImageData, load, mnist
from hoop.errors import FailedPrecondition, InvalidArgument, NotFound


def images_of(dataset: Any) -> ImageData:
    assert isinstance(dataset, ImageData)
    return dataset


def packaged() -> mnist.Arrays:
    return mnist._packaged()


def idx_file(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write(folder: Path, arrays: mnist.Arrays, *, zipped: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in zip(mnist.NAMES, arrays, strict=True):
        data = idx_file(array)
        path = folder / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(data, 0) if zipped else data)


def small(first: int) -> mnist.Arrays:
    """Four images of MNIST's shape."""
    images = np.full((4, 28, 28), first, np.uint8)
    labels = np.array([first, 1, 2, 3], np.uint8)
    return mnist.Arrays(images, labels, images[:2], labels[:2])


def checksums(arrays: mnist.Arrays) -> dict[str, str]:
    return {
        name: f"md5:{hashlib.md5(idx_file(array)).hexdigest()}" for name, array in zip(mnist.NAMES, arrays, strict=True)
    }


def test_mnist_ships_with_the_package() -> None:
    train, test = load("mnist")
    assert (len(train), len(test)) == (60_000, 10_000)
    assert (train.name, test.name) == ("mnist/train", "mnist/test")
    assert np.bincount(images_of(train).labels).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert images_of(test).labels[:5].tolist() == [7, 2, 1, 0, 4]


def test_the_packaged_file_has_the_published_checksums() -> None:
    assert checksums(packaged()) == mnist.MNIST


def test_images_are_normalised() -> None:
    train, _ = load("mnist")
    inputs, _ = train.batch(np.arange(60_000), epoch=0, seed=0)
    assert inputs.shape == (60_000, 1, 28, 28)
    assert abs(inputs.double().mean()) < 1e-3
    assert abs(inputs.double().std() - 1) < 1e-3


def test_the_arrays_are_read_only_and_shared_between_loads() -> None:
    one, other = images_of(load("mnist").train), images_of(load("mnist").train)
    assert np.shares_memory(one.images, other.images)
    with pytest.raises(ValueError, match="read-only"):
        one.images[0] = 0


@pytest.mark.parametrize("size", [56, 112])
def test_images_can_be_enlarged(size: int) -> None:
    indices, factor = np.array([5, 3, 59_999]), size // 28
    plain, labels = load("mnist").train.batch(indices, epoch=0, seed=0)
    large, targets = load("mnist", size=size).train.batch(indices, epoch=0, seed=0)
    assert np.array_equal(large.numpy(), plain.numpy().repeat(factor, axis=2).repeat(factor, axis=3))
    assert targets.tolist() == labels.tolist()


def test_an_invalid_size_is_rejected() -> None:
    with pytest.raises(InvalidArgument, match="size: 30 is not a multiple of 28"):
        load("mnist", size=30)


@pytest.mark.slow_if(when=lambda params: params["zipped"] and params["folder"] != "mnist")  # the others are not zipped
@pytest.mark.parametrize("folder", [".", "mnist", "MNIST/raw"])
@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files_give_the_same_dataset(data_dir: Path, folder: str, zipped: bool) -> None:
    write(data_dir / folder, packaged(), zipped=zipped)
    found, shipped = load("mnist"), mnist._splits("mnist", packaged(), 0.1307, 0.3081, 1)
    assert not np.shares_memory(images_of(found.train).images, packaged().train_images)
    assert [split.checksum for split in found] == [split.checksum for split in shipped]


def test_a_damaged_packaged_file_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "mnist-u8.xz"
    data = bytearray(mnist.PACKAGED.read_bytes())
    data[5_000_000] ^= 1
    damaged.write_bytes(data)
    monkeypatch.setattr(mnist, "PACKAGED", damaged)
    found = hashlib.sha256(data).hexdigest()
    message = f"{damaged} is damaged.*sha256 expected e9b40985d011.*, found {found}"
    with pytest.raises(FailedPrecondition, match=message):
        mnist._packaged.__wrapped__()


def test_the_decompressed_copy_is_used_if_it_is_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = mnist._packaged.__wrapped__()
    copy = tmp_path / "home" / ".cache" / "hoop" / "mnist-u8"
    assert copy.stat().st_size == mnist.UNPACKED_BYTES
    monkeypatch.setattr(mnist, "_decompressed", lambda: pytest.fail("decompressed again"))
    assert all(map(np.array_equal, first, mnist._packaged.__wrapped__()))
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    damaged = bytearray(copy.read_bytes())
    damaged[1_000_000] ^= 1
    copy.write_bytes(damaged)
    assert all(map(np.array_equal, first, mnist._packaged.__wrapped__()))
    assert copy.read_bytes() != damaged, "it is written again"


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no directory")
    assert len(mnist._packaged.__wrapped__().train_images) == 60_000


def test_a_missing_packaged_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "PACKAGED", tmp_path / "mnist-u8.xz")
    with pytest.raises(NotFound, match="install Hoop again"):
        mnist._packaged.__wrapped__()


def test_damaged_idx_files_are_rejected(data_dir: Path) -> None:
    write(data_dir / "mnist", small(0))
    path = data_dir / "mnist" / "train-images-idx3-ubyte"
    expected, found = (
        mnist.MNIST[path.name].removeprefix("md5:"),
        hashlib.md5(path.read_bytes()).hexdigest(),
    )
    with pytest.raises(FailedPrecondition, match=f"{path} is damaged.*md5 expected {expected}, found {found}"):
        load("mnist")


def test_a_truncated_gzip_is_rejected(data_dir: Path) -> None:
    write(data_dir / "mnist", small(0), zipped=True)
    path = data_dir / "mnist" / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(FailedPrecondition, match=f"{path} is damaged"):
        load("mnist")


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0\x08", b"\0\0\x08\x01\0\0\0", b"\0\0\x08\x01\0\0\0\x05abc", b"\0\0\x0d\x01\0\0\0\x01a"],
)
def test_invalid_idx_files_are_rejected(data: bytes) -> None:
    with pytest.raises(FailedPrecondition, match=r"x\.idx is not an IDX file"):
        mnist.parse_idx(data, "x.idx")


def test_an_incomplete_folder_is_skipped(data_dir: Path) -> None:
    write(data_dir / "mnist", small(0))
    (data_dir / "mnist" / "t10k-labels-idx1-ubyte").unlink()
    assert len(load("mnist").train) == 60_000


@pytest.mark.parametrize("folder", [".", "fashion-mnist", "FashionMNIST/raw"])
def test_fashion_mnist_is_recognised_by_its_checksums(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    fashion = small(9)
    monkeypatch.setattr(mnist, "FASHION", checksums(fashion))
    write(data_dir / folder, fashion, zipped=True)
    train, test = load("fashion-mnist")
    assert (len(train), len(test)) == (4, 2)
    assert images_of(train).labels.tolist() == [9, 1, 2, 3]
    assert len(load("mnist").train) == 60_000, "MNIST read Fashion-MNIST's files"


def test_debians_package_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fashion = small(9)
    monkeypatch.setattr(mnist, "FASHION", checksums(fashion))
    write(tmp_path / "debian" / "fashion-mnist", fashion, zipped=True)
    assert len(load("fashion-mnist").train) == 4


def test_mnist_is_not_taken_for_fashion(data_dir: Path) -> None:
    write(data_dir, packaged())
    with pytest.raises(NotFound, match="dataset fashion-mnist is not in"):
        load("fashion-mnist")


def test_missing_data_says_where_it_looked_and_what_to_do(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOP_DATA", os.pathsep.join([str(data_dir), str(tmp_path / "gone")]))
    with pytest.raises(NotFound) as caught:
        load("fashion-mnist")
    message = str(caught.value)
    assert f"{data_dir}, {tmp_path / 'gone'} (no such directory), {tmp_path / 'home' / '.cache' / 'hoop'}" in message
    assert "train-images-idx3-ubyte" in message
    assert "HOOP_DATA" in message
    assert "download=True" in message


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_that_unpacks_to_too_much_is_refused(
    data_dir: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before all of it is in memory: 3 MB of gzip can be 3 GB of zeros."""
    monkeypatch.setattr(mnist, "MAX_IDX_BYTES", 1000)
    write(data_dir / "mnist", small(0), zipped=zipped)
    with pytest.raises(FailedPrecondition, match="more than the 1000 bytes that it can have"):
        load("mnist")
