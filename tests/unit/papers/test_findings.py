"""Findings are written as a report, and stored reports are read back as claims."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from typer.testing import CliRunner

from hoop.cli.commands import command_line
from hoop.data.mnist import mnist
from hoop.errors import NotFound
from hoop.lab.papers import parallel_mnist
from hoop.lab.papers.catalog import STUDIES, Study, study_named, summary
from hoop.lab.papers.experiment import Experiment, Findings, How, Verdict, busy_cores, make_table, stored_claims
from hoop.lab.papers.mnist_pipeline import listing_3
from hoop.lab.papers.predicted import all_reduce_seconds
from hoop.lab.papers.subset import subset_of
from hoop.report.chart import Chart, ChartLine, Lines
from hoop.report.page_files import write_page
from hoop.simulate.cluster import Link

ROOT = Path(__file__).resolve().parents[3]
STORED = ROOT / "docs" / "papers"


def test_claims_round_trip_through_a_report(tmp_path: Path) -> None:
    found = Findings(limits=["two cores"])
    found.claim("faster", paper="83 ms | 8 ms", ours="9 ms", how="measured", verdict="in part", why="<why>")
    found.section("Speed", "prose", make_table([{"nodes": 1, "a step": 0.5}], "Steps", a_step="s"))
    write_page(found.page("title", "lead", {"command": "hoop reproduce x"}), tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    (claim,) = stored_claims(report)
    assert (claim["the paper"], claim["verdict"], claim["why"]) == ("83 ms | 8 ms", "in part", "<why>")
    text = (tmp_path / "report.md").read_text()
    assert text.index("faster") < text.index("two cores") < text.index("Steps")
    assert "a step (s)" in text
    assert "<why>" not in text
    assert (tmp_path / "report-2.csv").read_text() == "nodes,a step (s)\n1,0.5\n"


@pytest.mark.parametrize("bokeh", [True, False])
def test_reproduce_writes_a_page_if_it_can_and_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bokeh: bool
) -> None:
    """The command itself, with a study that measures nothing."""
    if bokeh:
        pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'hoop[dashboard]'")
    else:
        monkeypatch.setattr("hoop.report.page_files.can_draw", lambda: False)

    class Small(Study):
        def run(self, experiment: Experiment) -> Findings:
            found = Findings()
            found.claim("faster", paper="83 ms", ours="9 ms", how="measured", verdict="holds", why="it is")
            found.section("Speed", Chart("speed", "Speed", [Lines("ms", [ChartLine("ring", [1, 2], [8.0, 9.0])])]))
            return found

    monkeypatch.setitem(STUDIES, "small", Small("small", "A paper", "How fast?"))
    result = CliRunner().invoke(command_line(), ["reproduce", "small", "--out", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "holds          faster" in result.stdout
    assert json.loads((tmp_path / "charts.json").read_text())[0]["panels"][0]["lines"][0]["y"] == [8.0, 9.0]
    assert (tmp_path / "report.html").exists() is bokeh
    assert result.stderr.count("pip install 'hoop[dashboard]'") == (0 if bokeh else 1)
    if bokeh:
        from page_charts import charts_in

        (chart,) = charts_in((tmp_path / "report.html").read_text())
        assert chart.columns("ring") == {"x": [1.0, 2.0], "y": [8.0, 9.0]}


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_listing_3_of_the_paper_is_wrong(devices: int) -> None:
    """Listing 3 does not reduce the last segment, and adds only one neighbour's part to the others."""
    vectors = [np.arange(12.0) + 100 * rank for rank in range(devices)]
    reduced = listing_3([vector.copy() for vector in vectors])
    last = slice(12 - 12 // devices, 12)
    for rank in range(devices):
        np.testing.assert_array_equal(reduced[rank][last], vectors[rank][last])
        assert (reduced[rank] != np.sum(vectors, axis=0)).any(), f"rank {rank} is right"


def test_a_subset_holds_the_first_samples() -> None:
    whole = mnist()
    subset = subset_of(whole, 100, 10)
    some = np.array([0, 99], np.int64)
    assert (len(subset.train), len(subset.test)) == (100, 10)
    for one, other in zip(
        subset.train.batch(some, epoch=0, seed=0), whole.train.batch(some, epoch=0, seed=0), strict=True
    ):
        assert (one == other).all()


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_tiny_all_reduce_takes_the_latency_of_its_rounds(devices: int) -> None:
    """An all-reduce of a tiny vector takes the latency of its rounds: 2(n-1) for the ring, 2 for the naive one."""
    link = Link(bandwidth=1e12, latency=1.0)
    assert all_reduce_seconds(devices, devices, "ring", link) == pytest.approx(2 * (devices - 1), rel=0.01)
    assert all_reduce_seconds(devices, devices, "naive", link) == pytest.approx(2, rel=0.01)


def test_an_unknown_study_lists_the_known_ones() -> None:
    with pytest.raises(NotFound, match="'nope' is none; there are mnist-pipeline, dsml, "):
        study_named("nope")


def test_the_docs_page_matches_the_stored_results() -> None:
    assert (ROOT / "docs" / "papers.md").read_text("utf-8") == summary(STORED), "scripts/papers --page repairs this"


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_stored_results_with_verdicts(name: str) -> None:
    paths = sorted(STORED.glob(f"{name}@*.json"))
    assert paths
    for path in paths:
        report = json.loads(path.read_text("utf-8"))
        assert report["facts"]["command"].startswith(f"hoop reproduce {name}")
        assert {"date", "machine", "took"} <= set(report["facts"])
        claims = stored_claims(report)
        assert claims
        for claim in claims:
            assert claim["verdict"] in get_args(Verdict)
            assert claim["how"] in get_args(How)
            assert claim["ours"]


def test_busy_cores_counts_a_spinning_process() -> None:
    """A spinning process keeps one core busy, or its share of a core on a loaded machine."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        try:
            assert busy_cores() > 0.1
        finally:
            spinning.kill()


@pytest.mark.parametrize(("cores", "nodes", "at"), [(1, [1, 2, 4], 1), (3, [1, 2, 4], 2), (12, [1, 2, 4, 8], 8)])
def test_claims_about_speed_are_of_the_most_nodes_with_a_core_each(
    monkeypatch: pytest.MonkeyPatch, cores: int, nodes: list[int], at: int
) -> None:
    monkeypatch.setattr("hoop.lab.papers.experiment.available_cores", lambda: cores)
    monkeypatch.setattr(parallel_mnist, "has_ray", lambda: False)
    rows = [("by hand, serial", 1), *(("Hoop", count) for count in nodes)]
    table = [
        {"pixels": side**2, "who": who, "nodes": count, "epoch": 1 / count, "to serial": float(count)}
        for side in parallel_mnist.SIDES
        for who, count in rows
    ]
    findings = Findings()
    parallel_mnist._speed(Experiment(other_busy_cores=0.0), findings, table, nodes)
    first, second = findings.claims
    assert first.ours == f"{at}.00x to {at}.00x on {at} cores, to the serial program by hand"
    assert (second.ours, second.verdict) == (f"Hoop: {at}.00x on {at} nodes, 12544 pixels", "holds")
