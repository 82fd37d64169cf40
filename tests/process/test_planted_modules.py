"""A file in the current folder is never imported instead of a library: not by a command, and not by its devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from background import HOOP, START_S

from hoop.launch.processes import hoop_command
from hoop.runs.job_lookup import load_job

NAMES = ("grpc", "google", "torch", "typer", "rich", "numpy", "safetensors", "asyncio")
TRAIN = ("train", "mnist", "--devices", "1", "--epochs", "0", "--json")


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with modules of these names, which leave a file when they are executed."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("open(__file__ + '.ran', 'w').close()\nraise SystemExit(99)\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_hoop_up_and_its_devices_import_nothing_from_the_current_folder(
    planted: Path, start: Callable[..., Any]
) -> None:
    up = start("up", "--devices", 1, "--memory", "1MiB")
    assert up.first_line.startswith("coordinator "), up.errors
    assert list(planted.glob("*.ran")) == []


def test_a_training_imports_nothing_from_the_current_folder(planted: Path) -> None:
    """By ``python -m hoop``; and by the installed script, whose own folder comes first."""
    script = planted / "bin" / "hoop"
    script.parent.mkdir()
    script.write_text("from hoop.cli.main import main\nmain()\n")
    for command in ([*HOOP, *TRAIN], [sys.executable, str(script), "status", "--help"]):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=4 * START_S)
        assert done.returncode == 0, done.stderr
        assert list(planted.glob("*.ran")) == []


def test_children_start_without_the_current_folder(planted: Path) -> None:
    assert hoop_command("status")[1:] == ["-P", "-m", "hoop", "status"]


def test_only_a_job_of_one_s_own_puts_the_current_folder_into_the_import_path(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its end."""
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", os.getcwd())])
    load_job("mnist", load=False)
    assert "" not in sys.path
    (planted / "job_of_mine.py").write_text("import hoop\nimport json\njob = hoop.Job(list, list)\n")
    load_job("job_of_mine:job", load=False)
    assert sys.path[-1] == ""
    assert list(planted.glob("*.ran")) == []
