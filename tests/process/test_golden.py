"""scripts/golden, which checks that a change does not alter the trained weights."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

SCRIPT = Path(__file__).parents[2] / "scripts" / "golden"


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader = importlib.machinery.SourceFileLoader("golden", str(SCRIPT))
    spec = importlib.util.spec_from_loader("golden", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "golden", module)
    loader.exec_module(module)
    return module


def test_one_run_trains_with_this_tree_and_prints_its_hash() -> None:
    command = [sys.executable, str(SCRIPT), "--only", "pipeline:1f1b killed", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert str(SCRIPT.parents[1] / "src") in done.stderr, "progress names the tree"
    report: dict[str, Any] = json.loads(done.stdout)
    (row,) = report["runs"]
    assert row["run"] == "pipeline:1f1b killed"
    assert row["ok"]
    assert len(row["here"]) == 64


def test_an_unknown_run_is_refused() -> None:
    command = [sys.executable, str(SCRIPT), "--only", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr


@pytest.mark.parametrize(
    ("here", "there", "ok"),
    [("aa", "aa", True), ("aa", "bb", False), ("", "aa", False), ("aa", "", False), ("", "", False)],
)
def test_a_run_is_the_same_if_both_sides_have_the_same_hash(
    golden: ModuleType, here: str, there: str, ok: bool
) -> None:
    def outcome(weights: str) -> Any:
        return golden.Outcome(weights) if weights else golden.Outcome(error="exit code 1")

    rows = golden.rows([], {"data": outcome(here)}, {"data": outcome(there)})
    assert rows[0]["ok"] is ok
    assert ("yes" in golden.table(rows).splitlines()[1]) is ok


@pytest.mark.parametrize(
    ("mine", "theirs", "difference"),
    [
        ({}, {}, ""),
        ({"losses": {"loss of step 1": 0.5}}, {"losses": {"loss of step 1": 0.25}}, "loss of step 1"),
        ({"losses": {"loss of step 1": 0.5}}, {"losses": {"loss of step 2": 0.25}}, ""),
        ({"losses": {"loss of step 1": float("nan")}}, {"losses": {"loss of step 1": float("nan")}}, ""),
        ({"checkpoints": {"best.safetensors": "ab"}}, {"checkpoints": {"best.safetensors": "cd"}}, "best.safetensors"),
    ],
)
def test_losses_and_checkpoints_are_compared_where_both_have_them(
    golden: ModuleType, mine: dict[str, Any], theirs: dict[str, Any], difference: str
) -> None:
    first = golden.Outcome("aa", **mine).difference(golden.Outcome("aa", **theirs))
    assert first.startswith(difference)
    assert bool(first) is bool(difference)


def test_runs_of_one_tree_that_must_agree_are_compared(golden: ModuleType) -> None:
    runs = [golden.Run("data", ("",)), golden.Run("killed", ("",), same_as="data")]
    rows = golden.rows(runs, {"data": golden.Outcome("aa"), "killed": golden.Outcome("bb")}, None)
    assert [row["ok"] for row in rows] == [True, False]
    assert "not as in 'data'" in golden.table(rows)


def test_the_digest_of_a_checkpoint_covers_its_tensors_and_not_its_metadata(golden: ModuleType, tmp_path: Path) -> None:
    first, renamed, other = (tmp_path / name for name in ("first", "renamed", "other"))
    weights = torch.arange(6.0)
    save_file({"weight": weights}, first, {"written": "today"})
    save_file({"weight": weights}, renamed, {"written": "tomorrow"})
    save_file({"weight": weights + 1}, other)
    assert golden.tensors_digest(first) == golden.tensors_digest(renamed)
    assert golden.tensors_digest(first) != golden.tensors_digest(other)
