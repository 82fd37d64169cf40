"""A job's module is looked at before it is executed: it must declare the job, and no other user may write to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hoop.cli.options import check_jobs
from hoop.engine.job import job_for_a_device
from hoop.engine.job_source import check_writers, declared_jobs, find_spec
from hoop.engine.recipes import RECIPES
from hoop.errors import FailedPrecondition, InvalidArgument

DECLARATIONS = {
    "import hoop\njob = hoop.Job(list, list)": {"job"},
    "from hoop import Job\njob = Job(list, list)": {"job"},
    "from hoop import Job as J\njob = J(None, None)": {"job"},
    "from hoop.engine.job import Job\njob: Job = make()": {"job"},
    "import hoop as h\nfirst = second = h.Job(list, list)": {"first", "second"},
    "import hoop\ndef job() -> hoop.Job: ...": {"job"},
    "def job() -> 'hoop.Job': ...": {"job"},
    "@cached\ndef job(size=1) -> Job: ...\nsmall = job(2)": {"job", "small"},
    "class Mine(hoop.Job): ...\njob = Mine()": {"job"},
    "base = Job()\njob = dataclasses.replace(base, about='')\nsame = base": {"base", "job", "same"},
    "try:\n  import x\n  job = Job()\nexcept ImportError:\n  other = Job()": {"job", "other"},
    "if big:\n  job = Job()\nelse:\n  job = Job() if x else Job()": {"job"},
    "job = make()": set(),
    "job = 7": set(),
    "job: hoop.Job": set(),
    "def job(): return Job()": set(),
    "def outer():\n  job = Job()": set(),
    "class Outer:\n  job = Job()": set(),
    "import shutil\nshutil.rmtree('data')": set(),
    "from elsewhere import job": set(),
}


@pytest.mark.parametrize("source", DECLARATIONS)
def test_declarations(source: str) -> None:
    assert declared_jobs(source.encode()) == DECLARATIONS[source]


def test_a_module_that_does_not_declare_the_job_is_not_executed(tmp_path: Path) -> None:
    (tmp_path / "cleanup.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\njob = 7\n")
    for name in ("cleanup:job", "cleanup:missing"):
        with pytest.raises(InvalidArgument, match=rf"{tmp_path}/cleanup.py was not executed.*= hoop.Job\("):
            job_for_a_device(name, RECIPES, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_an_installed_module_is_found_without_executing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('executed')\n")
    (package / "inner.py").write_text("raise SystemExit('executed')\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = find_spec("my_package.inner")
    assert found is not None
    assert found.origin == str(package / "inner.py")
    for missing in ("my_package.nothing", "my_package.inner.deeper", "nobody_has_this"):
        assert find_spec(missing) is None
    with pytest.raises(InvalidArgument, match=r"inner.py was not executed"):
        job_for_a_device("my_package.inner:job", RECIPES, None)
    with pytest.raises(InvalidArgument, match="is not a Python file"):
        job_for_a_device("numpy._core._multiarray_umath:job", RECIPES, None)


@pytest.mark.parametrize(("mode", "why"), [(0o777, "every user"), (0o707, "every user"), (0o770, "group 54321")])
def test_a_job_that_other_users_can_change_is_refused(tmp_path: Path, mode: int, why: str) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    path = folder / "my_job.py"
    path.write_text("import hoop\njob = hoop.Job(model=list, data=list)\n")
    for one in (folder, path):
        if mode == 0o770:
            if os.geteuid():
                pytest.skip("only root can give a file to a group that it is not in")
            os.chown(one, -1, 54321)
        before = one.stat().st_mode
        one.chmod(mode)
        with pytest.raises(FailedPrecondition, match=rf"job: my_job:job: {one}: {why}.*chmod go-w {one}"):
            job_for_a_device("my_job:job", RECIPES, folder)
        with pytest.raises(FailedPrecondition, match="--jobs"):
            check_writers(one, "--jobs")
        one.chmod(before)
    assert job_for_a_device("my_job:job", RECIPES, folder) is not None


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    if owner == 0:
        os.chown(tmp_path, 54321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
    with pytest.raises(FailedPrecondition, match=f"user {owner or 54321} owns it"):
        check_writers(tmp_path, "--jobs")


def test_in_a_sticky_folder_one_s_own_job_runs_without_neighbours(tmp_path: Path) -> None:
    """Others can add files to /tmp, and cannot change this user's there."""
    tmp_path.chmod(0o1777)
    (tmp_path / "my_job.py").write_text("import hoop\njob = hoop.Job(model=list, data=list)\n")
    (tmp_path / "with_neighbour.py").write_text("import hoop\nimport planted_one\njob = hoop.Job(list, list)\n")
    (tmp_path / "planted_one.py").write_text("raise SystemExit('executed')\n")
    assert job_for_a_device("my_job:job", RECIPES, tmp_path) is not None
    with pytest.raises(ModuleNotFoundError, match="planted_one"):
        job_for_a_device("with_neighbour:job", RECIPES, tmp_path)


def test_a_job_imports_its_neighbours_after_everything_installed(tmp_path: Path) -> None:
    (tmp_path / "yaml_of_mine.py").write_text("ABOUT = 'neighbour'\n")
    (tmp_path / "safetensors.py").write_text("raise SystemExit('executed')\n")
    (tmp_path / "my_job.py").write_text(
        "import hoop\nimport safetensors\nimport yaml_of_mine\njob = hoop.Job(list, list, about=yaml_of_mine.ABOUT)\n"
    )
    try:
        assert job_for_a_device("my_job:job", RECIPES, tmp_path).about == "neighbour"
        assert sys.path[-1] == str(tmp_path)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("yaml_of_mine")


def test_a_jobs_option_that_others_can_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, which is the default, is checked when a job is taken from it."""
    tmp_path.chmod(0o777)
    with pytest.raises(FailedPrecondition, match=rf"--jobs: {tmp_path}: every user can write to it"):
        check_jobs(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert check_jobs(None) == tmp_path
