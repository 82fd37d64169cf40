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
    command = [sys.executable, str(SCRIPT), "--only", "pipeline killed", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert str(SCRIPT.parents[1] / "src") in done.stderr, "progress names the tree"
    report: dict[str, Any] = json.loads(done.stdout)
    (row,) = report["runs"]
    assert row["run"] == "pipeline killed"
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
    rows = golden.rows({"data": golden.Outcome(here)}, {"data": golden.Outcome(there)})
    assert rows[0]["ok"] is ok
    assert golden.table(rows).splitlines()[1].endswith("yes" if ok else "NO")
