"""``hoop bench``: every figure of a row, the algorithm that ran, chosen or forced, and the plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

QUICK = ["--ranks", "2", "--seconds", "10ms"]


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hoop", "bench", *QUICK, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_rows_say_what_ran(tmp_path: Path) -> None:
    done = bench("--contenders", "arena,shm,tcp", "--sizes", "4,64KiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    ran = {(row["contender"], row["bytes"]): row["algorithm"] for row in found["rows"]}
    assert ran["arena", 4] == ran["shm", 4] == "flat"
    assert (ran["arena", 65536], ran["shm", 65536]) == ("direct", "staged")
    assert {ran["tcp", 4], ran["tcp", 65536]} <= {"ring", "tree", "halving_doubling"}
    assert found["copy_bandwidth"]["2"] > 0
    for row in found["rows"]:
        assert row["algbw"] == row["busbw"] == row["bytes"] / row["seconds"]
        assert f"{row['contender']} on 2 ranks" in done.stderr, "it tells how far it is"


def test_an_algorithm_can_be_forced_and_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "plot.svg"
    done = bench("--contenders", "shm,tcp", "--sizes", "4,4KiB", "--algorithm", "ring", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| 2 |")]
    assert len(lines) == 4
    assert all(line.endswith("| ring |") for line in lines), done.stdout
    drawn = ElementTree.fromstring(picture.read_text())
    words = {"".join(one.itertext()) for one in drawn.iter() if one.tag.endswith("text")}
    assert {"us, 2 ranks", "shm", "tcp", "bytes"} <= words


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--algorithm", "rng"], "algorithm: 'rng' is unknown; known: ring, "),
        (["--algorithm", "direct", "--contenders", "shm"], "algorithm: shm cannot run direct"),
        (["--contenders", "nccl"], "contender: 'nccl' is unknown; known: arena, "),
        (["--sizes", "7"], "size: 7 bytes are not whole float32 elements"),
        (["--plot", "/no/such/plot.svg"], "--plot: there is no folder /no/such; make it first"),
        (["--ranks", "0"], "--ranks: '0' is not a number of ranks"),
    ],
)
def test_what_makes_no_sense_is_named_before_anything_is_measured(options: list[str], says: str) -> None:
    done = bench(*options)
    assert done.returncode != 0
    assert says in done.stderr
