"""PyTorch versions: which are rejected, warned about or accepted, and where the check runs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import hoop
from hoop import torch_versions
from hoop.errors import FailedPrecondition
from hoop.topology import Addresses
from hoop.torch_backend import autoload
from hoop.torch_versions import NEWEST, OLDEST, UntestedTorchWarning, dotted

ROOT = Path(__file__).resolve().parents[2]
OLD = f"{OLDEST[0]}.{OLDEST[1] - 1}.1"
NEW = f"{NEWEST[0]}.{NEWEST[1] + 1}.0"
TOO_OLD = re.escape(f"torch {OLD} is installed, which is too old for Hoop: it is tested with torch ")
TOO_NEW = re.escape(f"torch {NEW} is newer than Hoop is tested with (torch ")
REMEDY = re.escape(f"pip install 'torch>={dotted(OLDEST)}'")


@pytest.fixture
def torch_is(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Patch the version of torch that Hoop finds installed."""

    def patch(version: str) -> None:
        monkeypatch.setattr(torch_versions, "installed_version", lambda: version)

    return patch


@pytest.mark.parametrize("version", [f"{dotted(OLDEST)}.0", f"{dotted(NEWEST)}.3+cpu", "2.13.0a0+git1", "main"])
def test_a_tested_version_is_accepted_without_warning(version: str) -> None:
    assert torch_versions.check_version(version) is None


@pytest.mark.parametrize("version", [OLD, "1.13.1", "0.4"])
def test_an_older_version_is_rejected_with_number_range_and_remedy(version: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"{re.escape(version)}.*{dotted(OLDEST)} to .*{REMEDY}"):
        torch_versions.check_version(version)


@pytest.mark.parametrize("version", [NEW, "2.100.0", "3.0.1+cu140"])
def test_a_newer_version_gets_a_warning_with_number_range_and_remedy(version: str) -> None:
    text = torch_versions.check_version(version)
    assert text is not None
    remedy = f"pip install 'torch<{NEWEST[0]}.{NEWEST[1] + 1}'"
    assert all(part in text for part in (version, f"to {dotted(NEWEST)}", remedy))


def test_the_loaded_torch_precedes_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ModuleType("torch")
    vars(loaded)["__version__"] = "2.7.1+cpu"
    monkeypatch.setitem(sys.modules, "torch", loaded)
    assert torch_versions.installed_version() == "2.7.1+cpu"
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(metadata, "version", lambda name: {"torch": "2.8.0"}[name])
    assert torch_versions.installed_version() == "2.8.0"


def test_a_missing_torch_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(FailedPrecondition, match=f"torch is not installed.*{REMEDY}"):
        torch_versions.installed_version()


def test_the_requirement_in_pyproject_is_the_oldest_version() -> None:
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"torch>={dotted(OLDEST)}" in dependencies


def test_every_tested_version_has_a_row_in_the_docs() -> None:
    rows = re.findall(r"^\| (\d+)\.(\d+)\.\d+\S* \| 3\.", (ROOT / "docs" / "torch-backend.md").read_text(), re.M)
    minors = {(int(major), int(minor)) for major, minor in rows}
    assert minors == {(OLDEST[0], minor) for minor in range(OLDEST[1], NEWEST[1] + 1)}


# ---- where the check runs


def test_a_process_group_checks_the_version_first(torch_is: Any) -> None:
    torch_is(OLD)
    with pytest.raises(FailedPrecondition, match=TOO_OLD):
        autoload._create(None, None)


@pytest.mark.parametrize(("rank", "ranks", "warned"), [(0, [], 1), (1, [], 0), (0, [0, 1], 0)])
def test_one_rank_warns_once_about_a_newer_version(
    torch_is: Any, monkeypatch: pytest.MonkeyPatch, rank: int, ranks: list[int], warned: int
) -> None:
    group = ModuleType("hoop.torch_backend.process_group")
    vars(group)["HoopProcessGroup"] = SimpleNamespace(create=lambda options: "a group")
    monkeypatch.setitem(sys.modules, group.__name__, group)
    torch_is(NEW)
    options = SimpleNamespace(group_rank=rank, global_ranks_in_group=ranks)
    with pytest.WarningsRecorder(_ispytest=True) as recorded:
        assert autoload._create(options, None) == "a group"
    assert [
        str(warning.message)[: len(NEW) + 6] for warning in recorded if warning.category is UntestedTorchWarning
    ] == [f"torch {NEW}"] * warned


def test_hoop_train_rejects_an_older_version(torch_is: Any) -> None:
    from hoop.cli.commands import command_line

    torch_is(OLD)
    outcome = CliRunner().invoke(command_line(), ["train", "mnist"])
    assert isinstance(outcome.exception, FailedPrecondition)
    assert re.match(TOO_OLD, str(outcome.exception))


def test_hoop_train_warns_about_a_newer_version(torch_is: Any) -> None:
    from hoop.cli.device_source import DeviceSource
    from hoop.cli.train import RunFolder, _launch
    from hoop.runs.clean_process import LoadWatch

    torch_is(NEW)
    coordinator = Addresses.parse("127.0.0.1:1", "--coordinator")
    source = DeviceSource(2, timeout_s=1.0, coordinator=coordinator)
    launch = _launch(
        "mnist", {}, 1 << 20, RunFolder(None, resume=False, begin_again=False), source, LoadWatch(executes=False)
    )
    (warning,) = launch.warnings
    assert re.match(TOO_NEW, warning)


def test_train_from_python_rejects_and_warns(torch_is: Any) -> None:
    torch_is(OLD)
    with pytest.raises(FailedPrecondition, match=TOO_OLD):
        hoop.train("mnist")
    torch_is(NEW)
    with pytest.warns(UntestedTorchWarning, match=TOO_NEW), pytest.raises(hoop.UserError, match="no recipe"):
        hoop.train("nothing")


def test_a_device_rejects_an_older_version(torch_is: Any) -> None:
    from hoop.engine.entrypoint import train_rank

    torch_is(OLD)
    nothing: Any = None
    with pytest.raises(FailedPrecondition, match=TOO_OLD):
        train_rank(nothing, "{}", nothing, nothing, None)


# ---- scripts/torch-matrix, without installing anything


def run_matrix(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "torch-matrix"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_matrix_lists_the_tested_range() -> None:
    minors = [f"{OLDEST[0]}.{minor}" for minor in range(OLDEST[1], NEWEST[1] + 1)]
    assert run_matrix("--list").stdout.split() == minors
    assert run_matrix("--list", "--versions", "2.8, 2.14.1").stdout.split() == ["2.8", "2.14.1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--versions", "2.x"], "--versions: '2.x' is not a version such as 2.15 or 2.14.1"),
        (["--python", "python0.1"], "--python: there is no interpreter python0.1"),
        (["--tests", "tests/nothing"], "--tests: there is no tests/nothing"),
        (["--cache", str(ROOT / "here")], "is inside the working tree"),
    ],
)
def test_the_matrix_reports_an_invalid_argument(arguments: list[str], message: str) -> None:
    done = run_matrix("--list", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_matrix_counts_the_results_of_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = ModuleType("torch_matrix")
    path = ROOT / "scripts" / "torch-matrix"
    vars(script)["__file__"] = str(path)
    monkeypatch.setitem(sys.modules, script.__name__, script)  # dataclasses look up their module here
    exec(compile(path.read_text(), str(path), "exec"), vars(script))
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.a" name="good"/>'
        '<testcase classname="tests.a" name="bad"><failure/></testcase>'
        '<testcase classname="tests.a" name="leaks"/><testcase classname="tests.a" name="leaks"><error/></testcase>'
        '<testcase classname="tests.a" name="not here"><skipped/></testcase></testsuite></testsuites>'
    )
    row = script.Row("2.8.0", "3.11.7", seconds=12.6)
    row.read(report)
    assert (row.passed, row.skipped, row.failures) == (1, 1, ["tests/a.py::bad", "tests/a.py::leaks"])
    assert not row.holds
    assert script.table([row]).splitlines()[-1] == "| 2.8.0 | 3.11.7 | 1 | 2 | 1 | 13 |"
    assert not script.Row("2.8.0", "3.11.7").holds  # no test ran at all
