"""``report.html`` of a real run with a fault, ``hoop report``, and commands whose page needs Bokeh, without it."""

from __future__ import annotations

import html
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

TIMEOUT_S = 400.0
SMALL = ("--memory", "64MiB")
needs_bokeh = pytest.mark.skipif(
    importlib.util.find_spec("bokeh") is None, reason="Bokeh is not installed: pip install 'hoop[dashboard]'"
)


def hoop(*arguments: object) -> subprocess.CompletedProcess[str]:
    return preloaded.run(
        [*preloaded.HOOP, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "HOOP_NO_REPORT": "0"},
    )


@needs_bokeh
def test_a_run_with_a_killed_device_has_a_report_with_the_recovery_and_the_hash(tmp_path: Path) -> None:
    out = tmp_path / "run"
    fault = ("--fault", "kill@rank=1,step=5")
    done = hoop("train", "mnist", "-n", 2, *SMALL, "--set", "max_steps=12", *fault, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    trained = json.loads(done.stdout)
    assert trained["faults"] == ["kill@rank=1,step=5"], "the fault did not happen"

    page = (out / "report.html").read_text()
    assert trained["weights_sha256"] in page
    shown = html.unescape(re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL))
    rows = re.findall(r"<tr>(.*?)</tr>", shown, flags=re.DOTALL)
    kinds = [cells[2] for row in rows if len(cells := re.findall(r"<td[^>]*>(.*?)</td>", row, flags=re.DOTALL)) == 6]
    assert {"fault", "device lost", "recovered", "checkpoint"} <= set(kinds)
    assert kinds.index("fault") < kinds.index("recovered")
    assert re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)\s*=", page) == [], "it loads something"

    # The folder as a run that was killed leaves it.
    for name in ("report.html", "result.json", "trace.json"):
        (out / name).unlink()
    other = tmp_path / "other.html"
    made = hoop("report", out, "--output", other, "--json")
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout) == {"file": str(other), "bytes": other.stat().st_size}
    assert "did not finish" in other.read_text()
    assert not (out / "report.html").exists()


@needs_bokeh
def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    done = hoop("report", tmp_path)
    assert done.returncode == 2
    assert "no files of a run" in done.stderr


def without_bokeh(tmp_path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs ``hoop …`` in an interpreter that cannot find Bokeh; it has PyTorch already, and imports Hoop itself."""
    program = (
        "import sys, importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'bokeh' else find(name, *rest)\n"
        "for name in [one for one in sys.modules if one.partition('.')[0] in ('bokeh', 'hoop')]:\n"
        "    del sys.modules[name]\n"
        "sys.modules['bokeh'] = None\n"
        "from hoop.cli.main import main\n"
        "sys.exit(main())\n"
    )
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return preloaded.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "HOOP_NO_REPORT": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_without_bokeh_a_run_has_no_report_and_the_command_says_how_to_get_it(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = without_bokeh(tmp_path, "train", "mnist", "-n", 1, *SMALL, "--set", "max_steps=3", "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    assert (out / "result.json").exists()
    assert not (out / "report.html").exists()
    assert "report" not in done.stderr
    done = without_bokeh(tmp_path, "report", out)
    assert done.returncode == 2
    assert "pip install 'hoop[dashboard]'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "printed", "written"),
    [
        (
            ("simulate", "mnist", "-n", 2, "--out", "out"),
            "| data     |",
            {"report.json", "report-1.csv", "report.md", "charts.json", "trace-data.json"},
        ),
        (
            ("plan", "mnist", "-n", 2, "--batch-size", 64, "--out", "out"),
            "the fastest that is exactly SGD",
            {"report.json", "report-1.csv", "report-2.csv", "report.md", "charts.json"},
        ),
        (
            [
                "bench",
                "--ranks",
                "2",
                "--seconds",
                "10ms",
                "--contenders",
                "shm",
                "--sizes",
                "4",
                "--plot",
                "page.html",
            ],
            "| 2 | 4 B | shm |",
            set(),
        ),
    ],
    ids=["simulate", "plan", "bench"],
)
def test_without_bokeh_tables_and_json_are_there_and_the_page_is_explained_once(
    tmp_path: Path, arguments: tuple[object, ...], printed: str, written: set[str]
) -> None:
    done = without_bokeh(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert done.stderr.count("pip install 'hoop[dashboard]'") == 1
    assert "hoop:" not in done.stderr, "it is no error"
    assert {path.name for path in tmp_path.glob("out/*")} == written
    assert not list(tmp_path.rglob("*.html"))
    if written:
        assert json.loads((tmp_path / "out" / "report.json").read_text())["tables"][0]["rows"]
