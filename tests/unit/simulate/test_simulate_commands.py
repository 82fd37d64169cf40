"""``hoop simulate`` and ``hoop plan``: printed output and written files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hoop.cli.commands import command_line
from hoop.errors import InvalidArgument
from hoop.simulate.cost_model import FREE_MACHINE, Costs

ROOT = Path(__file__).resolve().parents[3]


def run_cli(*arguments: str) -> str:
    result = CliRunner().invoke(command_line(), list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_simulate_prints_a_table_and_writes_charts(tmp_path: Path) -> None:
    output = run_cli(
        "simulate", "mnist", "-n", "8", "--link", "1Gbps,0.5ms", "-s", "data", "-s", "ps:asp", "--steps", "2",
        "--out", str(tmp_path), "--failures", "0.1", "--stragglers", "0.1,2",
    )  # fmt: skip
    assert "8 devices on 8 cores of 8 hosts, 1 Gbit/s, 0.5 ms" in output
    assert "shipped with Hoop" in output
    assert "data: goodput" in output
    names = {path.name for path in tmp_path.iterdir()}
    assert {"report.json", "report.md", "report-1.csv", "charts.json", "trace-data.json"} <= names
    rows = json.loads((tmp_path / "report.json").read_text())["tables"][0]["rows"]
    assert [row["strategy"] for row in rows] == ["data", "ps:mode=asp,servers=1"]
    events = json.loads((tmp_path / "trace-data.json").read_text())["traceEvents"]
    assert {"device 0", "device 7"} <= {event["args"]["name"] for event in events if event["name"] == "process_name"}


@pytest.mark.parametrize("devices", [pytest.param(3, marks=pytest.mark.slow), 64])
def test_the_page_of_simulate_shows_every_strategy_and_device(tmp_path: Path, devices: int) -> None:
    pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'hoop[dashboard]'")
    from page_charts import assert_offline, charts_in

    run_cli("simulate", "mnist", "-n", str(devices), "-s", "data", "-s", "ps:bsp", "--out", str(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert_offline(page)
    rows = json.loads((tmp_path / "report.json").read_text())["tables"][0]["rows"]
    step, memory, *charts = charts_in(page)
    names = [row["strategy"] for row in rows]
    assert step.columns("compute")["device"] == memory.all_columns()[0]["group"] == names
    shares = step.columns("compute")
    for index, row in enumerate(rows):
        total = sum(shares[kind][index] for kind in ("compute", "communicate", "other", "idle"))
        assert total == pytest.approx(row["step"]), "the parts of a step add up to its time"
    assert memory.all_columns()[0]["value"] == pytest.approx([row["memory"] for row in rows])
    for split, timeline in (charts[:2], charts[2:]):
        assert split.columns("idle")["device"] == [f"device {rank}" for rank in range(devices)]
        kinds = ("compute", "communicate", "other", "idle")
        for parts in zip(*(split.columns("idle")[kind] for kind in kinds), strict=True):
            assert sum(parts) == pytest.approx(100)
        assert {*timeline.columns("forward")["device"]} == {f"device {rank}" for rank in range(devices)}
        assert {"forward", "backward", "communicate"} <= {*timeline.legend}


def test_the_page_of_plan_shows_every_candidate(tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'hoop[dashboard]'")
    from page_charts import assert_offline, charts_in, texts_of

    output = run_cli("plan", "mnist", "-n", "3", "--batch-size", "16", "--json", "--out", str(tmp_path))
    rows = json.loads(output)["rows"]
    page = (tmp_path / "report.html").read_text()
    assert_offline(page)
    step, memory, *traced = charts_in(page)
    running = [f"{row['strategy']}, {row['micros']} shards" for row in rows if row["runs"]]
    assert step.columns("idle")["device"] == memory.all_columns()[0]["group"] == running
    assert len(traced) == 2 * 3, "time by device and timeline of the three fastest strategies"
    refused = [row for row in rows if not row["runs"]]
    assert refused
    assert all(row["why"] in texts_of(page) for row in refused)


def test_simulate_prints_json() -> None:
    printed = json.loads(run_cli("simulate", "mnist", "-n", "4", "--cores", "2", "--json"))
    (row,) = printed["rows"]
    assert row["devices"] == 4
    assert row["step_seconds"] > 0
    assert len(row["idle"]) == len(row["memory"]) == 4
    assert "4 devices on 2 cores of 1 host" in printed["cluster"]


def test_simulate_counts_each_replica() -> None:
    command = "simulate", "mnist", "-n", "3", "-s", "pipeline", "--json"
    off, one, two = (
        json.loads(run_cli(*command, *options))["rows"][0] for options in (("--no-replicate",), (), ("--replicas", "2"))
    )
    assert two["bytes_a_step"] - one["bytes_a_step"] == one["bytes_a_step"] - off["bytes_a_step"] > 0
    assert sum(two["memory"]) - sum(one["memory"]) == sum(one["memory"]) - sum(off["memory"]) > 0


@pytest.mark.parametrize("command", ["simulate", "plan", "train"])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--replicas", "4"], r"replicas: 4 of each .* with 4 there are 3; take 1 to 3, or at least 5 devices"),
        (["--replicas", "0"], r"replicas: 0 is not a whole number of at least 1; --no-replicate"),
        (["--replicas", "2", "--no-replicate"], r"replicas: 2, and --no-replicate .* leave one of them out"),
    ],
)
def test_a_wrong_number_of_replicas_is_refused(command: str, options: list[str], text: str) -> None:
    result = CliRunner().invoke(command_line(), [command, "mnist", "-n", "4", *options])
    assert isinstance(result.exception, InvalidArgument)
    assert re.search(text, str(result.exception))


def test_simulate_reads_a_costs_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(Costs.uniform(4, 1.0, 2.0, machine=FREE_MACHINE).to_json())
    printed = json.loads(
        run_cli(
            "simulate",
            "mine",
            "-n",
            "2",
            "--costs",
            str(path),
            "--batch-size",
            "4",
            "--shards",
            "4",
            "--json",
        )
    )
    assert printed["rows"][0]["step_seconds"] == 4 / 2 * 4 * 3


def test_plan_ranks_strategies_with_reasons() -> None:
    cluster = str(ROOT / "examples" / "cluster.toml")
    printed = json.loads(
        run_cli("plan", "mnist", "--cluster", cluster, "--batch-size", "256", "--failures", "0.1", "--json")
    )
    rows = printed["rows"]
    running = [row for row in rows if row["runs"]]
    assert running[0]["why"].startswith("fastest")
    assert all(row["why"] for row in rows)
    assert any("more than the model's 3 blocks" in row["why"] for row in rows if not row["runs"])
    output = run_cli("plan", "mnist", "-n", "2", "--batch-size", "64", "--top", "3")
    assert "the fastest that is exactly SGD: hoop train mnist --devices 2" in output
