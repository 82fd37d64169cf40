"""Checkpoints: written off the steps' path, whole or not at all, and never loaded with a wrong bit."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hoop.engine.fault_tolerance.checkpoint import deserialize, serialize
from hoop.errors import FailedPrecondition
from hoop.files import atomic_write, remove_partial_files, write_bytes
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
WHOLE = serialize(TENSORS, {"steps": 7, "settings": {"job": "mnist"}})
WITHIN_S = 30.0


def keeping(folder: Path, keep: int = 3, **more: object) -> CheckpointWriter:
    return CheckpointWriter(folder, keep, **more)  # type: ignore[arg-type]


def offered(keeper: CheckpointWriter, *steps: int, size: int = 4) -> list[str]:
    """Offers snapshots one after the other; returns the kinds of the events."""
    for step in steps:
        keeper.offer(Snapshot(step, {"w": torch.full((size,), float(step))}, {"steps": step}))
        keeper.flush(WITHIN_S)
    return [one.kind for one in keeper.new_events()]


# ---- what is read


def test_what_was_packed_comes_back() -> None:
    tensors, metadata = deserialize(WHOLE)
    assert metadata["steps"] == 7
    assert all(torch.equal(tensors[name], one) for name, one in TENSORS.items())
    assert serialize(tensors, metadata) == WHOLE


def test_every_flipped_bit_and_every_missing_byte_is_noticed_and_the_file_named() -> None:
    for bit in range(8 * len(WHOLE)):
        damaged = bytearray(WHOLE)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FailedPrecondition, match=r"^here/x: "):
            deserialize(bytes(damaged), "here/x")
    for length in range(len(WHOLE)):
        with pytest.raises(FailedPrecondition, match=r"^here/x: torn: .*\d+ "):
            deserialize(WHOLE[:length], "here/x")


def test_a_file_without_a_checksum_is_refused() -> None:
    import safetensors.torch

    for metadata in ({"hoop": '{"steps": 7}'}, {"hoop": '{"steps": 7, "sha256": 5}'}, {"hoop": "[]"}, {}):
        with pytest.raises(FailedPrecondition, match="not a checkpoint of Hoop's"):
            deserialize(safetensors.torch.save({"w": torch.ones(2)}, metadata))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, len(WHOLE)), st.integers(0, len(WHOLE)))
def test_no_bytes_make_the_reader_fail_otherwise(noise: bytes, low: int, high: int) -> None:
    """As they are, behind a length that suits them, and in the middle of a whole one."""
    for data in (noise, len(noise).to_bytes(8, "little") + noise, WHOLE[:low] + noise + WHOLE[high:]):
        if data != WHOLE:
            with pytest.raises(FailedPrecondition, match=r"^here/x: "):
                deserialize(data, "here/x")


def test_the_one_before_is_used_and_the_damaged_one_named_and_set_aside(tmp_path: Path) -> None:
    keeper = keeping(tmp_path)
    assert offered(keeper, 7, 14, 21) == ["checkpoint"] * 3
    keeper.close(WITHIN_S)
    newest, middle = tmp_path / name_of(21), tmp_path / name_of(14)
    middle.rename(tmp_path / name_of(20))  # whole, and not what it says
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    found = newest_checkpoint(tmp_path)
    assert found.path == tmp_path / name_of(7)
    flipped, renamed = found.warnings
    assert flipped.startswith(f"{newest}: damaged or tampered with: its checksum is ")
    assert "it is of step 14, not of the step that its name says" in renamed
    assert all(one.endswith("step-00000007.safetensors is used instead") for one in found.warnings)
    set_aside(tmp_path, 7)
    assert newest_checkpoint(tmp_path).passed_over == ()
    assert len(list(tmp_path.glob("*.damaged"))) == 2
    with pytest.raises(FailedPrecondition, match=r"gone: cannot be read: No such file"):
        read(tmp_path / "gone")


# ---- what is written


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As a full disk: whoever writes more gets an error from the kernel."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_costs_that_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    keeper = keeping(tmp_path)
    assert offered(keeper, 1) == ["checkpoint"]
    with files_of_at_most(2000):
        keeper.offer(Snapshot(2, {"w": torch.ones(1000)}, {"steps": 2}))
        keeper.flush(WITHIN_S)
    (event,) = keeper.new_events()
    assert isinstance(event, Warned)
    assert event.file == str(tmp_path / name_of(2))
    assert "File too large" in event.text
    assert "training goes on, the newest is step-00000001.safetensors" in event.text
    assert [path.name for path in tmp_path.iterdir()] == [name_of(1)], "something half written is left"
    assert offered(keeper, 3, size=1000) == ["checkpoint"]
    keeper.close(WITHIN_S)
    assert read(tmp_path / name_of(3))[1]["steps"] == 3


def test_only_the_last_stay_and_none_goes_before_the_next_is_there(tmp_path: Path) -> None:
    there: list[list[str]] = []

    def write(path: Path, data: bytes) -> None:
        write_bytes(path, data)
        there.append(sorted(one.name for one in tmp_path.iterdir()))

    keeper = keeping(tmp_path, keep=2, write=write)
    offered(keeper, 1, 2, 3)
    keeper.close(WITHIN_S)
    assert there[-1] == [name_of(1), name_of(2), name_of(3)]
    assert sorted(one.name for one in tmp_path.iterdir()) == [name_of(2), name_of(3)]


def test_a_slow_disk_holds_nobody_up_and_what_gives_way_is_said(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def slow(path: Path, data: bytes) -> None:
        begun.set()
        assert go_on.wait(WITHIN_S)
        write_bytes(path, data)

    keeper = keeping(tmp_path, write=slow)
    for step in (1, 2, 3):
        keeper.offer(Snapshot(step, TENSORS, {"steps": step}))  # returns while the first is being written
        assert begun.wait(WITHIN_S)
    (event,) = keeper.new_events()
    assert isinstance(event, Warned)
    assert event.text.startswith(f"{tmp_path / name_of(2)}: is not written: the disk is slower")
    go_on.set()
    keeper.flush(WITHIN_S)
    keeper.close(WITHIN_S)
    assert [one.steps for one in keeper.new_events() if isinstance(one, CheckpointWritten)] == [1, 3]
    assert sorted(one.name for one in tmp_path.iterdir()) == [name_of(1), name_of(3)]


def written_and_killed(folder: Path, share: float) -> None:
    """Two checkpoints, and SIGKILL when so much of the second is in its file; at more than all of it, behind it."""

    def write(path: Path, data: bytes) -> None:
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

    offered(keeping(folder, keep=2, write=write), 1, 2)


@pytest.mark.parametrize(("share", "loaded"), [(0, 1), (0.5, 1), (1, 1), (2, 2)])
def test_killed_while_it_writes_old_or_new_is_loaded(tmp_path: Path, share: float, loaded: int) -> None:
    writer = multiprocessing.get_context("fork").Process(target=written_and_killed, args=(tmp_path, share))
    writer.start()
    writer.join(WITHIN_S)
    assert writer.exitcode == -signal.SIGKILL
    writer.close()
    found = newest_checkpoint(tmp_path)
    assert (found.path.name, found.passed_over) == (name_of(loaded), ())
    assert read(found.path)[0]["w"].tolist() == [float(loaded)] * 4
    assert len(remove_partial_files(tmp_path)) == (loaded == 1)
    assert all(step_of(one) > 0 for one in tmp_path.iterdir())
