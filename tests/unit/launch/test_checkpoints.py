"""Checkpoints are written in the background, completely or not at all, and never loaded with a wrong bit."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hoop.engine.fault_tolerance.checkpoint_format import (
    copy_into,
    deserialize,
    serialize,
    serialized_parts,
    verified,
)
from hoop.engine.fault_tolerance.checkpoint_header import CHECKSUM_KEY, read_metadata, verified_metadata
from hoop.errors import FailedPrecondition
from hoop.files import atomic_write, remove_partial_files, write_bytes, write_parts
from hoop.job_events import CheckpointWritten, Warned
from hoop.runs.checkpoint_store import (
    CheckpointWriter,
    Snapshot,
    name_of,
    newest_checkpoint,
    read,
    set_aside,
    step_of,
)

TENSORS = {"0.weight": torch.arange(6.0).reshape(2, 3), "optimizer.moment0.0.weight": torch.zeros(2, 3)}
SERIALIZED = serialize(TENSORS, {"steps": 7, "settings": {"job": "mnist"}})
TIMEOUT_S = 240.0


def new_writer(folder: Path, keep: int = 3, **more: object) -> CheckpointWriter:
    return CheckpointWriter(folder, keep, **more)  # type: ignore[arg-type]


def offer_all(writer: CheckpointWriter, *steps: int, size: int = 4) -> list[str]:
    """Offer snapshots one after the other; return the kinds of the events."""
    for step in steps:
        writer.offer(Snapshot(step, {"w": torch.full((size,), float(step))}, {"steps": step}))
        writer.flush(TIMEOUT_S)
    return [one.kind for one in writer.new_events()]


# ---- reading


def test_a_checkpoint_is_deserialized_as_it_was_serialized() -> None:
    tensors, metadata = deserialize(SERIALIZED)
    assert metadata["steps"] == 7
    assert all(torch.equal(tensors[name], one) for name, one in TENSORS.items())
    assert serialize(tensors, metadata) == SERIALIZED


def test_every_flipped_bit_and_missing_byte_is_detected_and_the_file_named() -> None:
    for bit in range(8 * len(SERIALIZED)):
        damaged = bytearray(SERIALIZED)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FailedPrecondition, match=r"^here/x: "):
            deserialize(bytes(damaged), "here/x")
    for length in range(len(SERIALIZED)):
        with pytest.raises(FailedPrecondition, match=r"^here/x: torn: .*\d+ "):
            deserialize(SERIALIZED[:length], "here/x")


def test_a_byte_that_is_damaged_between_the_device_and_the_disk_is_noticed_and_named() -> None:
    """The file has the device's checksums: hashed again, a byte that was damaged meanwhile would count as correct."""
    found = verified(bytearray(SERIALIZED), "the snapshot of rank 1")
    assert set(found.checksums) == set(TENSORS)
    assert b"".join(serialized_parts(found.tensors, found.metadata, found.checksums)) == SERIALIZED
    found.tensors["0.weight"][1, 2] += 1
    written = b"".join(serialized_parts(found.tensors, found.metadata, found.checksums))
    with pytest.raises(FailedPrecondition, match=r"here/x: damaged .* the checksum of 0\.weight is "):
        deserialize(written, "here/x")


def test_bytes_behind_the_last_tensor_are_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"here/x: damaged: .* are not those of its tensors"):
        deserialize(SERIALIZED + b"\0", "here/x")


def test_a_file_of_an_earlier_version_is_read() -> None:
    """It has one checksum, over all bytes."""
    import safetensors.torch

    metadata = {"sha256": "0" * 64, "steps": 7}
    data = safetensors.torch.save(TENSORS, {"hoop": json.dumps(metadata)})
    checksum = hashlib.sha256(data).hexdigest()
    data = data.replace(b"0" * 64, checksum.encode(), 1)
    tensors, found = deserialize(bytearray(data))
    assert found == metadata | {"sha256": checksum}
    assert all(torch.equal(tensors[name], one) for name, one in TENSORS.items())
    for at in range(8, len(data), 7):
        with pytest.raises(FailedPrecondition, match=r"^here/x: "):
            deserialize(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], "here/x")


def test_a_file_without_a_checksum_is_refused() -> None:
    import safetensors.torch

    for metadata in ({"hoop": '{"steps": 7}'}, {"hoop": '{"steps": 7, "sha256": 5}'}, {"hoop": "[]"}, {}):
        with pytest.raises(FailedPrecondition, match="not a checkpoint of Hoop's"):
            deserialize(safetensors.torch.save({"w": torch.ones(2)}, metadata))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, len(SERIALIZED)), st.integers(0, len(SERIALIZED)))
def test_any_other_bytes_are_refused(noise: bytes, low: int, high: int) -> None:
    """The bytes alone, behind a matching length, and in the middle of a valid checkpoint."""
    for data in (noise, len(noise).to_bytes(8, "little") + noise, SERIALIZED[:low] + noise + SERIALIZED[high:]):
        if data != SERIALIZED:
            with pytest.raises(FailedPrecondition, match=r"^here/x: "):
                deserialize(data, "here/x")
            with pytest.raises(FailedPrecondition, match=r"^here/x: "):
                verified_metadata(data, "here/x")


def test_metadata_is_read_without_a_pass_over_the_tensors() -> None:
    """The bytes are verified elsewhere: a flipped bit of a tensor is not noticed, a missing end is."""
    data = bytearray(serialize({"weight": torch.ones(5)}, {"steps": 7}))
    expected = deserialize(data)[1]
    data[-1] ^= 1
    assert read_metadata(data) == expected
    with pytest.raises(FailedPrecondition, match="damaged or tampered with"):
        deserialize(data)
    with pytest.raises(FailedPrecondition, match="resumed: torn"):
        read_metadata(data[:-1], "resumed")


def test_the_previous_checkpoint_is_used_and_damaged_ones_are_set_aside(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    assert offer_all(writer, 7, 14, 21) == ["checkpoint"] * 3
    writer.close(TIMEOUT_S)
    newest, middle = tmp_path / name_of(21), tmp_path / name_of(14)
    middle.rename(tmp_path / name_of(20))  # valid, but with a wrong name
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    found = newest_checkpoint(tmp_path)
    assert found.path == tmp_path / name_of(7)
    flipped, renamed = found.warnings
    assert flipped.startswith(f"{newest}: damaged or tampered with: the checksum of w is ")
    assert "it is of step 14, not of the step that its name says" in renamed
    assert all(one.endswith("step-00000007.safetensors is used instead") for one in found.warnings)
    set_aside(tmp_path, 7)
    assert newest_checkpoint(tmp_path).passed_over == ()
    assert len(list(tmp_path.glob("*.damaged"))) == 2
    with pytest.raises(FailedPrecondition, match=r"gone: cannot be read: No such file"):
        read(tmp_path / "gone")


# ---- writing


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Emulate a full disk: the kernel refuses to write more than ``size`` bytes to a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_loses_only_that_checkpoint(tmp_path: Path) -> None:
    writer = new_writer(tmp_path)
    assert offer_all(writer, 1) == ["checkpoint"]
    with file_size_limit(2000):
        writer.offer(Snapshot(2, {"w": torch.ones(1000)}, {"steps": 2}))
        writer.flush(TIMEOUT_S)
    (event,) = writer.new_events()
    assert isinstance(event, Warned)
    assert event.file == str(tmp_path / name_of(2))
    assert "File too large" in event.text
    assert "training goes on, the newest is step-00000001.safetensors" in event.text
    assert [path.name for path in tmp_path.iterdir()] == [name_of(1)], "a partial file is left"
    assert offer_all(writer, 3, size=1000) == ["checkpoint"]
    writer.close(TIMEOUT_S)
    assert read(tmp_path / name_of(3))[1]["steps"] == 3


def test_an_old_checkpoint_is_deleted_only_after_the_next_is_written(tmp_path: Path) -> None:
    listings: list[list[str]] = []

    def write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
        write_parts(path, parts)
        listings.append(sorted(one.name for one in tmp_path.iterdir()))

    writer = new_writer(tmp_path, keep=2, write=write)
    offer_all(writer, 1, 2, 3)
    writer.close(TIMEOUT_S)
    assert listings[-1] == [name_of(1), name_of(2), name_of(3)]
    assert sorted(one.name for one in tmp_path.iterdir()) == [name_of(2), name_of(3)]


def test_a_slow_disk_does_not_block_and_a_skipped_checkpoint_is_reported(tmp_path: Path) -> None:
    started, proceed = threading.Event(), threading.Event()

    def slow(path: Path, parts: Sequence[bytes | memoryview]) -> None:
        started.set()
        assert proceed.wait(TIMEOUT_S)
        write_parts(path, parts)

    writer = new_writer(tmp_path, write=slow)
    for step in (1, 2, 3):
        writer.offer(Snapshot(step, TENSORS, {"steps": step}))  # returns while the first is being written
        assert started.wait(TIMEOUT_S)
    (event,) = writer.new_events()
    assert isinstance(event, Warned)
    assert event.text.startswith(f"{tmp_path / name_of(2)}: is not written: the disk is slower")
    proceed.set()
    writer.flush(TIMEOUT_S)
    writer.close(TIMEOUT_S)
    assert [one.steps for one in writer.new_events() if isinstance(one, CheckpointWritten)] == [1, 3]
    assert sorted(one.name for one in tmp_path.iterdir()) == [name_of(1), name_of(3)]


def write_and_kill(folder: Path, share: float) -> None:
    """Write two checkpoints; SIGKILL when ``share`` of the second is written; above 1: when it is complete."""

    def write(path: Path, parts: Sequence[bytes | memoryview]) -> None:
        data = b"".join(parts)
        if path.name == name_of(1):
            write_bytes(path, data)
        elif share <= 1:
            with atomic_write(path) as file:
                file.write(data[: int(share * len(data))])
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            write_bytes(path, data)
            os.kill(os.getpid(), signal.SIGKILL)

    offer_all(new_writer(folder, keep=2, write=write), 1, 2)


@pytest.mark.parametrize(("share", "loaded"), [(0, 1), (0.5, 1), (1, 1), (2, 2)])
def test_a_kill_during_a_write_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, share: float, loaded: int) -> None:
    process = multiprocessing.get_context("fork").Process(target=write_and_kill, args=(tmp_path, share))
    process.start()
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL
    process.close()
    found = newest_checkpoint(tmp_path)
    assert (found.path.name, found.passed_over) == (name_of(loaded), ())
    assert read(found.path)[0]["w"].tolist() == [float(loaded)] * 4
    assert len(remove_partial_files(tmp_path)) == (loaded == 1)
    assert all(step_of(one) > 0 for one in tmp_path.iterdir())


TYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
TYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("types", [TYPES, [*TYPES, torch.complex64], []], ids=["usual", "also another", "none"])
def test_a_file_written_into_memory_has_the_bytes_of_the_library_s(types: list[torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {f"schräg.{one}": torch.randn(5, 3, generator=generator).to(one).t() for one in types}
    tensors |= {f"{one} scalar": torch.ones((), dtype=one) for one in types}
    tensors |= {f"{one} empty": torch.ones(0, 4, dtype=one) for one in types}
    metadata = {"steps": 7, "note": 'a "quoted" \\ text with ä and \n'}
    memory = bytearray()

    def allocate(size: int) -> memoryview:
        memory.extend(b"?" * size)
        return memoryview(memory)

    complete = copy_into(allocate, tensors, metadata)
    expected = serialize(tensors, metadata)
    for tensor in tensors.values():
        tensor.zero_()  # training goes on; the checksum comes later
    checksum, size = complete()
    assert bytes(memory) == expected
    assert (checksum, size) == (deserialize(bytes(memory))[1][CHECKSUM_KEY], len(memory))
    copies, views = deserialize(expected)[0], deserialize(bytearray(expected))[0]
    assert b"".join(serialized_parts(views, metadata)) == expected
    assert {name: one.dtype for name, one in views.items()} == {name: one.dtype for name, one in copies.items()}
