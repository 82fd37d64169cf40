"""The contents of a run folder (``--out``)."""

from __future__ import annotations

import errno
import json
import os
import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hoop import job_events as ev
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition
from hoop.job_events import Observed
from hoop.report.metrics import MetricsLog
from hoop.runs.checkpoint_store import newest_checkpoint
from hoop.runs.run_recorder import RunRecorder, saved_settings
from hoop.runs.training import Launch, Training

STEPS = ev.Steps(first=0, loss=[2.0, 1.0], seconds=[0.1, 0.1], rate=0.1, fed=[None, None])
EVALUATED = ev.Evaluated(steps=2, epoch=1, loss=0.5, accuracy=0.75, split="test")
KEPT = 3


def new_recorder(out: Path, start: int = 0) -> RunRecorder:
    resumed = {"steps": start} if start else None
    return RunRecorder(out, Settings(epochs=3, keep=KEPT), [4, 5], resumed)


def test_settings_are_read_back(tmp_path: Path) -> None:
    new_recorder(tmp_path).close()
    assert saved_settings(tmp_path) == (Settings(epochs=3), 2)


def test_the_newest_valid_checkpoint_is_found_and_old_ones_are_deleted(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    for step in range(1, KEPT + 3):
        recorder.checkpoint({"weight": torch.ones(step)}, {"steps": step}, step)
        assert recorder.flush(step) is not None
    recorder.close()
    folder = tmp_path / "checkpoints"
    assert len(list(folder.iterdir())) == KEPT
    newest = newest_checkpoint(tmp_path).path
    assert newest.name == f"step-{KEPT + 2:08}.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])  # torn
    found = newest_checkpoint(tmp_path)
    assert found.path.name == f"step-{KEPT + 1:08}.safetensors"
    (warning,) = found.warnings
    assert warning.startswith(f"{newest}: torn: ")
    assert warning.endswith(f"{found.path.name} is used instead")
    for path in folder.iterdir():
        path.write_bytes(b"")
    with pytest.raises(FailedPrecondition, match=r"that is whole: .*step-\d+.safetensors: torn"):
        newest_checkpoint(tmp_path)


def test_an_out_folder_that_takes_no_files_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """It was a traceback of the process that leads the devices."""
    (tmp_path / "file").write_text("")
    with pytest.raises(FailedPrecondition, match=r"^out \(--out\): .*: it is a file"):
        Training(Launch(Settings(), out=tmp_path / "file"))
    with pytest.raises(FailedPrecondition, match=r"^out \(--out\): .*: Not a directory"):
        new_recorder(tmp_path / "file" / "run")


def test_tensorboard_has_learning_rate_speed_and_devices(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    started = ev.Started(
        steps=4, done=0, steps_an_epoch=2, samples=300, parameters=1, stages=[], seconds=1.0, data="", same="",
        devices=2, batch_size=256,
    )  # fmt: skip
    recovered = ev.Recovered(step=2, pause_s=0.1, text="", missing=[], ranks=1, generation=2)
    for event in (started, STEPS, EVALUATED, recovered):
        recorder.record(Observed(event, time=1.0))
    recorder.close()
    curves = read_scalars(tmp_path / "tensorboard")
    assert set(curves) == {
        "loss", "devices", "learning_rate", "samples_per_second", "step_seconds", "test_loss", "test_accuracy", "epoch",
    }  # fmt: skip
    assert curves["devices"] == [(0, 2.0), (2, 1.0)]
    assert curves["samples_per_second"] == [(2, 1500.0)]  # an epoch has 300 samples, its last batch 44
    assert curves["learning_rate"] == [(2, struct.unpack("<f", struct.pack("<f", 0.1))[0])]


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each point by curve, from the records of an event file (report/tensorboard.py)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack_from("<Q", data)
            event, data = data[12 : 12 + length], data[16 + length :]
            point = re.search(rb"\x10(.)\x2a.\x0a.\x0a.([a-z_]+)\x15(.{4})$", event, re.DOTALL)
            if point:
                value = struct.unpack("<f", point[3])[0]
                found.setdefault(point[2].decode(), []).append((point[1][0], value))
    return found


def test_the_trace_names_devices_by_their_ids(tmp_path: Path) -> None:
    recorder = new_recorder(tmp_path)
    recorder.record(Observed(STEPS, time=1.0))
    span = ["0F0", "forward", 0.0, 0.1]
    account = ev.Account(
        rank=0, seconds=1.0, shares={}, instructions=1, bytes_sent=0, memory=0, spans=[span], done=2, stopped=False
    )
    recorder.finish({"devices": 1}, {7: account})
    recorder.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"device 7", "the run"}


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="no checkpoint in"):
        newest_checkpoint(tmp_path)
    with pytest.raises(FailedPrecondition, match="is not a run's config"):
        saved_settings(tmp_path)


@pytest.mark.parametrize(("split", "other"), [("test", "train"), ("train", "test")])
def test_a_resumed_run_knows_the_last_evaluation_before_it(tmp_path: Path, split: str, other: str) -> None:
    recorder, evaluated = new_recorder(tmp_path), replace(EVALUATED, split=split)
    later = replace(STEPS, first=2), replace(evaluated, steps=4, accuracy=0.9)
    for event in (STEPS, evaluated, *later):
        recorder.record(Observed(event, time=1.0))
    recorder.close()
    resumed = new_recorder(tmp_path, start=3)
    assert resumed.last_evaluation() == {"split": split, "loss": 0.5, "accuracy": 0.75}
    resumed.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 2, 3]
    assert rows[2] == {"step": 2, f"{split}_loss": 0.5, f"{split}_accuracy": 0.75, "epoch": 1}
    board = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert f"{split}_accuracy".encode() in board
    assert f"{other}_accuracy".encode() not in board


def test_no_error_of_a_file_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error of the metrics' disk: a warning, once, and the other files are written."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path / "metrics.jsonl"))

    monkeypatch.setattr(MetricsLog, "log", fail)
    recorder = new_recorder(tmp_path)
    for _ in range(2):
        recorder.record(Observed(STEPS))
    warned = [event.text for event in recorder.new_events() if isinstance(event, ev.Warned)]
    recorder.close()
    assert len(warned) == 1
    assert "Input/output error" in warned[0]
    assert (tmp_path / "ledger.jsonl").stat().st_size > 0


def test_a_lock_that_another_run_has_taken_after_the_folder_was_replaced_stays(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = new_recorder(out)
    out.rename(tmp_path / "old")
    second = new_recorder(out)
    first.close()
    with pytest.raises(FailedPrecondition, match=f"{out}: process {os.getpid()} on .* has it open"):
        new_recorder(out)
    second.close()
    new_recorder(out).close()
