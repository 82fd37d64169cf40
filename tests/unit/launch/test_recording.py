"""The contents of a run folder (``--out``)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hoop import job_events as ev
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition
from hoop.job_events import Observed
from hoop.runs.checkpoint_store import newest_checkpoint
from hoop.runs.run_recorder import RunRecorder, saved_settings

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
