"""``hoop reproduce``: the list of studies, invalid arguments, and one complete study."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

Run = Callable[..., "CompletedProcess[str]"]


def test_the_studies_are_listed(run_hoop: Run) -> None:
    studies = json.loads(run_hoop("reproduce", "--list", "--json").stdout)
    assert list(studies) == ["mnist-pipeline", "dsml", "ringtmp", "parallel-mnist", "hybrid"]
    assert all(study["paper"] and study["question"] for study in studies.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "study: none given"),
        (("nope",), "'nope' is none"),
        (("all", "--out", "x"), "--out: of all studies"),
    ],
)
def test_invalid_arguments_are_named(run_hoop: Run, arguments: tuple[str, ...], message: str) -> None:
    completed = run_hoop("reproduce", *arguments)
    assert completed.returncode == 2
    assert message in completed.stderr


@pytest.mark.slow
def test_a_complete_study(run_hoop: Run, tmp_path: Path) -> None:
    completed = run_hoop("reproduce", "parallel-mnist", "--quick", "--json", "--out", tmp_path, within=400)
    assert completed.returncode == 0, completed.stderr
    report: dict[str, Any] = json.loads(completed.stdout)
    assert report == json.loads((tmp_path / "report.json").read_text())
    tables = {table["title"]: table["rows"] for table in report["tables"]}
    assert len(tables["Claims"]) >= 3
    shares = [row["share"] for row in tables["Where the time of the serial job goes"]]
    assert sum(shares) == pytest.approx(100)
    epochs = tables["An epoch"]
    assert {row["pixels"] for row in epochs} == {784, 3136, 12544}
    for pixels in (784, 3136, 12544):  # manual and Hoop's training agree on every number of nodes
        losses = [row["loss"] for row in epochs if row["pixels"] == pixels]
        assert len(losses) >= 3
        assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-4)
    with (tmp_path / "report-1.csv").open() as file:
        assert [row["claim"] for row in csv.DictReader(file)] == [row["claim"] for row in tables["Claims"]]
    charts = {chart["name"]: chart for chart in json.loads((tmp_path / "charts.json").read_text())}
    assert set(charts) == {"speed-up", "times", "simulated"}
    if importlib.util.find_spec("bokeh") is not None:
        from page_charts import assert_offline, charts_in

        page = (tmp_path / "report.html").read_text()
        assert_offline(page)
        for shown, chart in zip(charts_in(page), charts.values(), strict=True):
            for line in chart["panels"][0]["lines"]:
                assert shown.columns(line["name"])["y"] == pytest.approx(line["y"])
    assert "measured" in (tmp_path / "report.md").read_text()
    assert "784 pixels" in completed.stderr, "no progress was shown"


LARGEST_MODEL = """
import dataclasses, json
from hoop.lab.papers.ringtmp import SGD, chain
from hoop.lab.papers.experiment import Experiment
from hoop.lab.papers.ringtmp import largest_model

best = largest_model(
    Experiment(), lambda size: chain(size, 3, 64), 32, 16, halvings=2,
    devices=2, strategy="data", memory="2MiB", **SGD | {"batch_size": 32},
)
print(json.dumps(dataclasses.asdict(best)))
"""


@pytest.mark.slow
def test_the_largest_model_is_found_by_training_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGEST_MODEL],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)
    width = best["size"]
    assert width > 32, "the search stayed at its first size"
    assert width % 16 == 0
    assert best["parameters"] == 784 * width + width + width * width + width + 10 * width + 10
    assert 0 < best["memory"] <= 2 << 20
    assert "2 MiB" in best["refusal"] or "arena" in best["refusal"]
