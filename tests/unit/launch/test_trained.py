"""``hoop evaluate`` and ``hoop export``: a checkpoint is data, and does not choose the code that is run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from hoop.cli.commands import command_line
from hoop.engine.fault_tolerance import checkpoint_format, checkpoint_header
from hoop.engine.fault_tolerance.checkpoint_format import deserialize, serialize
from hoop.engine.job import without_folder
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition
from hoop.models.vision import mlp
from hoop.runs.export import load_weights, with_model
from hoop.runs.run_recorder import RunRecorder, saved_settings

JOB = """
from pathlib import Path
import torch
import hoop
Path(__file__).with_name("executed").touch()
data = torch.arange(8.0).reshape(4, 2), torch.tensor([0, 1, 0, 1])
def job() -> hoop.Job:
    from hoop.data.user_data import user_data
    return hoop.Job(model=lambda seed: torch.nn.Linear(2, 2), data=lambda: user_data(data).splits)
"""
WEIGHTS = {"weight": torch.eye(2), "bias": torch.zeros(2)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "code" / "my_job.py"
    path.parent.mkdir()
    path.write_text(JOB)
    return path


def checkpoint_of(job: str, folder: Path, **more: object) -> Path:
    path = folder / "model.safetensors"
    path.write_bytes(serialize(WEIGHTS, {"steps": 3, "settings": {"job": job}, **more}))
    return path


@pytest.mark.parametrize("name", ["{path}:job", "my_job:job"])
def test_a_checkpoint_does_not_choose_the_code_that_is_run(
    tmp_path: Path, source: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(source.parent)
    checkpoint = checkpoint_of(name.format(path=source), tmp_path)
    with pytest.raises(FailedPrecondition, match=r"model\.safetensors: it is of the job .*:job, .* with --job file"):
        with_model(load_weights(checkpoint))
    for command in (["evaluate"], ["export", "--to", str(tmp_path / "model.pt2")]):
        refused = CliRunner().invoke(command_line(), [*command, str(checkpoint)])
        assert isinstance(refused.exception, FailedPrecondition)
    assert not source.with_name("executed").exists()


@pytest.mark.parametrize("name", ["hoop.train", "inherited:0", "somewhere_else:job"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_weights_are_exported_without_the_code_of_their_job(tmp_path: Path, name: str, suffix: str) -> None:
    to = tmp_path / f"weights{suffix}"
    training_state = {"optimizer.moment0.weight": torch.ones(2, 2), "hoop.average.weight": torch.ones(2, 2)}
    weights = {**WEIGHTS, "weight": WEIGHTS["weight"].to(torch.bfloat16)}
    checkpoint = tmp_path / "model.safetensors"
    checkpoint.write_bytes(serialize(weights | training_state, {"steps": 3, "settings": {"job": name}}))
    CliRunner().invoke(command_line(), ["export", str(checkpoint), "--to", str(to)], catch_exceptions=False)
    if suffix == ".npz":
        with np.load(to) as file:
            found = {key: file[key].tolist() for key in file}
    else:
        found = {key: one.tolist() for key, one in load_file(to).items()}
    assert found == {key: one.tolist() for key, one in WEIGHTS.items()}


def test_a_run_of_live_objects_is_evaluated_by_a_job_that_the_user_names(tmp_path: Path, source: Path) -> None:
    checkpoint = checkpoint_of("hoop.train", tmp_path)
    refused = CliRunner().invoke(command_line(), ["evaluate", str(checkpoint)])
    assert re.search(r"objects of a program.* --job file\.py:name.* hoop export", str(refused.exception))
    arguments = ["evaluate", str(checkpoint), "--job", f"{source}:job", "--json"]
    found = json.loads(CliRunner().invoke(command_line(), arguments, catch_exceptions=False).stdout)
    assert (found["job"], found["steps"], found["samples"]) == (f"{source}:job", 3, 4)


def test_the_user_chooses_it(tmp_path: Path, source: Path) -> None:
    checkpoint = checkpoint_of("somewhere_else:job", tmp_path)
    arguments = ["evaluate", str(checkpoint), "--job", f"{source}:job", "--json"]
    evaluated = CliRunner().invoke(command_line(), arguments, catch_exceptions=False)
    found = json.loads(evaluated.stdout)
    assert (found["job"], found["steps"], found["samples"]) == (f"{source}:job", 3, 4)


def test_a_checkpoint_without_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=r"model\.safetensors: a checkpoint without its number of steps"):
        load_weights(checkpoint_of("mnist", tmp_path, steps=None))


def test_a_checkpoint_holds_no_path_of_this_machine(tmp_path: Path) -> None:
    """Checkpoints are given away. The run's folder stays here, and a run that resumes finds its job by its path."""
    settings = Settings(job="/home/somebody/secret-project/my_job.py:job")
    recorder = RunRecorder(tmp_path, settings, [1])
    recorder.checkpoint(WEIGHTS, {"steps": 1}, 1)
    written = recorder.flush(1)
    recorder.close()
    assert written is not None
    assert b"somebody" not in written.read_bytes()
    assert deserialize(written.read_bytes())[1]["settings"]["job"] == "my_job.py:job"
    assert saved_settings(tmp_path)[0].job == settings.job


@pytest.mark.parametrize("name", ["mnist", "package.module:job", "hoop.train", "my_job.py:job"])
def test_names_without_a_folder_stay(name: str) -> None:
    assert without_folder(name) == name


def test_a_checkpoint_of_a_folder_is_read_and_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(data: bytes | bytearray, start: int, stop: int) -> str:
        hashed.append(stop - start)
        return real_sha256(data, start, stop)

    real_sha256 = checkpoint_header.sha256_of
    path = checkpoint_of("mnist", tmp_path)
    weights = {name: torch.zeros_like(one) for name, one in mlp(1).state_dict().items()}
    path.write_bytes(serialize(weights, {"steps": 3, "settings": {"job": "mnist"}}))
    for module in (checkpoint_format, checkpoint_header):
        monkeypatch.setattr(module, "sha256_of", counted)
    trained = with_model(load_weights(tmp_path))
    assert sorted(hashed) == sorted(one.nbytes for one in weights.values())
    assert all(torch.equal(one, weights[name]) for name, one in trained.model.state_dict().items())
