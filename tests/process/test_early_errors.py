"""``hoop train`` finds mistakes in names before it loads PyTorch, and trains jobs whose data has any form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from hoop.cli.main import main

try:
    main()
finally:
    print("torch" in sys.modules)
"""
JOB = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import hoop

generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 6, generator=generator)
y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)

def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

settings = {"batch_size": 32, "shards": 4, "epochs": 2}
pair = hoop.Job(model, lambda: (x, y), settings=settings)
loader = hoop.Job(model, lambda: DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True), settings=settings)
missing = hoop.Job(model, lambda: 7, settings=settings)
infinite = hoop.Job(model, lambda: (x * float("inf"), y), settings=settings)
"""


def train(folder: Path, name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs ``hoop train`` for a job of ``jobs.py``."""
    command = [
        sys.executable,
        "-m",
        "hoop",
        "train",
        f"jobs.py:{name}",
        "--devices",
        "2",
        "--memory",
        "16MiB",
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=folder)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["mnits"], "job: 'mnits' is no recipe; do you mean mnist?"),
        (["jobs.py"], "job: 'jobs.py' names no job in the file; write jobs.py:infinite or jobs.py:loader"),
        (["mnist", "--set", "bach_size=3"], "bach_size: no such setting; do you mean batch_size?"),
        (["mnist", "--optimizer", "sgdd"], "optimizer: 'sgdd' is unknown; known: sgd, adam, adamw"),
    ],
)
def test_a_mistyped_name_is_found_before_pytorch_is_loaded(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "jobs.py").write_text(JOB)
    command = [sys.executable, "-c", PROGRAM, "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "False\n"), done.stderr
    assert sentence in done.stderr


def test_the_data_of_a_job_has_any_form(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(JOB)
    for name in ("pair", "loader"):
        done = train(tmp_path, name, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["steps"] == 6


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing", "data: int is neither arrays nor a dataset"),
        (
            "infinite",
            "No update came before it, so the learning rate has no part: look for numbers that are not finite",
        ),
    ],
)
def test_data_that_cannot_be_trained_is_named(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "jobs.py").write_text(JOB)
    done = train(tmp_path, name)
    assert done.returncode == 2, done.stderr
    assert sentence in done.stderr
