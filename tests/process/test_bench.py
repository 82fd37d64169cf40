"""``hoop bench``: the figures of each row, the algorithm that ran (selected or forced), the page, invalid options."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import preloaded
import pytest

QUICK = ["--ranks", "2", "--seconds", "10ms"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [*preloaded.HOOP, "bench", *QUICK, *options]
    return preloaded.run(command, capture_output=True, text=True, timeout=500, check=False)


def test_rows_name_the_algorithm_that_ran(tmp_path: Path) -> None:
    done = bench("--contenders", "arena,shm,tcp", "--sizes", "4,64KiB", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    algorithms = {(row["contender"], row["bytes"]): row["algorithm"] for row in report["rows"]}
    assert algorithms["arena", 4] == algorithms["shm", 4] == "flat"
    assert (algorithms["arena", 65536], algorithms["shm", 65536]) == ("direct", "staged")
    assert {algorithms["tcp", 4], algorithms["tcp", 65536]} <= {"ring", "tree", "halving_doubling"}
    assert report["copy_bandwidth"]["2"] > 0
    for row in report["rows"]:
        assert row["algbw"] == row["busbw"] == row["bytes"] / row["seconds"]
        assert f"{row['contender']} on 2 ranks" in done.stderr, "progress is printed"


def test_an_algorithm_can_be_forced_and_plotted(tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'hoop[dashboard]'")
    from page_charts import assert_offline, charts_in

    plot = tmp_path / "plot.html"
    done = bench("--contenders", "shm,tcp", "--sizes", "4,4KiB", "--algorithm", "ring", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| 2 |")]
    assert len(lines) == 4
    assert all(line.endswith("| ring |") for line in lines), done.stdout
    page = plot.read_text()
    assert_offline(page)
    times, widths = charts_in(page)
    assert (times.labels, widths.labels) == ((None, "time (us)"), ("bytes", "busbw (GB/s)"))
    printed = {tuple(line.split(" | ")[1:3]): float(line.split(" | ")[3]) for line in lines}
    for contender in ("shm", "tcp"):
        drawn = times.columns(contender)
        assert drawn["x"] == widths.columns(contender)["x"] == [4.0, 4096.0]
        assert drawn["y"] == pytest.approx([printed["4 B", contender], printed["4 KiB", contender]], abs=0.06)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--algorithm", "rng"], "algorithm: 'rng' is unknown; known: ring, "),
        (["--algorithm", "direct", "--contenders", "shm"], "algorithm: shm cannot run direct"),
        (["--contenders", "nccl"], "contender: 'nccl' is unknown; known: arena, "),
        (["--sizes", "7"], "size: 7 bytes are not whole float32 elements"),
        (
            ["--plot", "plot.svg"],
            "--plot: 'plot.svg': it is an HTML page, whose charts can be saved",
        ),
        (["--plot", "/no/such/plot.html"], "--plot: there is no folder /no/such; make it first"),
        (["--ranks", "0"], "--ranks: '0' is not a number of ranks"),
    ],
)
def test_invalid_options_are_reported_before_anything_is_measured(options: list[str], says: str) -> None:
    done = bench(*options)
    assert done.returncode != 0
    assert says in done.stderr
