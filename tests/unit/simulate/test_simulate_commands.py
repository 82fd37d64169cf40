"""``hoop simulate`` and ``hoop plan``, from the command line to the files."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from hoop.cli.main import app
from hoop.simulate.cost_model import Costs, Machine

ROOT = Path(__file__).resolve().parents[3]


def ran(*words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_simulate_prints_a_table_and_keeps_pictures(tmp_path: Path) -> None:
    said = ran(
        "simulate", "mnist", "-n", "8", "--link", "1Gbps,0.5ms", "-s", "data", "-s", "ps:asp", "--steps", "2",
        "--out", str(tmp_path), "--failures", "0.1", "--stragglers", "0.1,2",
    )  # fmt: skip
    assert "8 devices on 8 cores of 8 hosts, 1 Gbit/s, 0.5 ms" in said
    assert "shipped with Hoop" in said
    assert "data: goodput" in said
    names = {path.name for path in tmp_path.iterdir()}
    assert {"table.json", "table.md", "timeline-data.svg", "trace-data.json"} <= names
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    assert [row["strategy"] for row in rows] == ["data", "ps:mode=asp,servers=1"]
    events = json.loads((tmp_path / "trace-data.json").read_text())["traceEvents"]
    assert {"device 0", "device 7"} <= {event["args"]["name"] for event in events if event["name"] == "process_name"}


def test_simulate_tells_scripts_the_figures() -> None:
    told = json.loads(ran("simulate", "mnist", "-n", "4", "--cores", "2", "--json"))
    (row,) = told["rows"]
    assert row["devices"] == 4
    assert row["step_seconds"] > 0
    assert len(row["idle"]) == len(row["memory"]) == 4
    assert "4 devices on 2 cores of 1 host" in told["cluster"]


def test_costs_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(Costs.uniform(4, 1.0, 2.0, machine=Machine(0, 0, 0, 0, 0, 0)).to_json())
    told = json.loads(
        ran(
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
    assert told["rows"][0]["step_seconds"] == 4 / 2 * 4 * 3


def test_plan_ranks_and_says_why() -> None:
    cluster = str(ROOT / "examples" / "cluster.toml")
    told = json.loads(ran("plan", "mnist", "--cluster", cluster, "--batch-size", "256", "--failures", "0.1", "--json"))
    rows = told["rows"]
    running = [row for row in rows if row["runs"]]
    assert running[0]["why"].startswith("fastest")
    assert all(row["why"] for row in rows)
    assert any("more than the model's 3 blocks" in row["why"] for row in rows if not row["runs"])
    said = ran("plan", "mnist", "-n", "2", "--batch-size", "64", "--top", "3")
    assert "the fastest that is exactly SGD: hoop train mnist --devices 2" in said
