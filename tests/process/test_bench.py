"""``hoop bench``: the figures of each row, the algorithm that ran (selected or forced), the plot, invalid options."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import preloaded
import pytest

QUICK = ["--ranks", "2", "--seconds", "10ms"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [*preloaded.HOOP, "bench", *QUICK, *options]
    return preloaded.run(command, capture_output=True, text=True, timeout=100, check=False)


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
    plot = tmp_path / "plot.svg"
    done = bench("--contenders", "shm,tcp", "--sizes", "4,4KiB", "--algorithm", "ring", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| 2 |")]
    assert len(lines) == 4
    assert all(line.endswith("| ring |") for line in lines), done.stdout
    svg = ElementTree.fromstring(plot.read_text())
    labels = {"".join(element.itertext()) for element in svg.iter() if element.tag.endswith("text")}
    assert {"us, 2 ranks", "shm", "tcp", "bytes"} <= labels


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--algorithm", "rng"], "algorithm: 'rng' is unknown; known: ring, "),
        (["--algorithm", "direct", "--contenders", "shm"], "algorithm: shm cannot run direct"),
        (["--contenders", "nccl"], "contender: 'nccl' is unknown; known: arena, "),
        (["--sizes", "7"], "size: 7 bytes are not whole float32 elements"),
        (["--plot", "plot.png"], "--plot: 'plot.png': the plot is an SVG file; name it plot.svg"),
        (["--plot", "/no/such/plot.svg"], "--plot: there is no folder /no/such; make it first"),
        (["--ranks", "0"], "--ranks: '0' is not a number of ranks"),
    ],
)
def test_invalid_options_are_reported_before_anything_is_measured(options: list[str], says: str) -> None:
    done = bench(*options)
    assert done.returncode != 0
    assert says in done.stderr
