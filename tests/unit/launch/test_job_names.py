"""Jobs that a client names for a device: code on the device's machine, by import path, never by file path."""

from __future__ import annotations

from pathlib import Path

import pytest

from hoop.engine.job import LOADED, find_job, import_path, job_for_a_device
from hoop.engine.recipes import RECIPES
from hoop.errors import InvalidArgument, NotFound

JOB = """
import hoop
job = hoop.Job(model=list, data=list, about={about!r})
def made() -> hoop.Job:
    return job
def other():
    raise SystemExit("this must not be called")
number = 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_job.py").write_text(JOB.format(about="first"))
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.py").write_text(JOB.format(about="deep"))
    return tmp_path


def test_a_job_is_loaded_from_a_module_in_the_job_folder(folder: Path) -> None:
    for name, about in (("my_job:job", "first"), ("my_job:made", "first"), ("deep.one:job", "deep")):
        assert job_for_a_device(name, RECIPES, folder).about == about
    (folder / "my_job.py").write_text(JOB.format(about="changed"))
    assert job_for_a_device("my_job:job", RECIPES, folder).about == "changed"
    assert job_for_a_device("mnist", RECIPES, folder) is RECIPES["mnist"]


def test_file_paths_are_refused(folder: Path) -> None:
    outside = folder / "deep"
    for name in (
        f"{folder / 'my_job.py'}:job",
        "my_job.py:job",
        "../my_job:job",
        "..my_job:job",
        "deep/one:job",
        "/etc/passwd",
        "/etc/passwd:x",
        "file:///x.py:job",
        "my_job:job:job",
        "my_job:",
        "",
    ):
        with pytest.raises((InvalidArgument, NotFound), match="job: "):
            job_for_a_device(name, RECIPES, outside)


def test_only_jobs_are_accepted(folder: Path) -> None:
    """Nothing else is called."""
    for name, why in (
        ("my_job:other", "neither a hoop.Job nor"),
        ("my_job:number", "neither a hoop.Job nor"),
        ("my_job:missing", "neither a hoop.Job nor"),
        ("hoop.cli.main:main", "neither a hoop.Job nor"),
        ("os:abort", "a module of Python's own"),
        ("code:interact", "a module of Python's own"),
        ("hoop.__main__:main", "or a program"),
        ("nobody_has_this:job", "there is no .*nobody_has_this.py; put your file there"),
    ):
        with pytest.raises((InvalidArgument, NotFound), match=why):
            job_for_a_device(name, RECIPES, folder)


def test_a_job_that_this_process_loaded_is_known_to_its_forked_devices(folder: Path) -> None:
    """``hoop train file.py:job`` loads the file by its path; the devices that it forks get the module's name."""
    path = f"{folder / 'my_job.py'}:job"
    assert import_path(path) == "my_job:job"
    assert import_path("package.module:job") == "package.module:job"
    found = find_job(path, RECIPES)
    try:
        assert job_for_a_device("my_job:job", RECIPES, None) is found
    finally:
        del LOADED["my_job:job"]
