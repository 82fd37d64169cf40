"""The scripts of examples/horovod run under ``hoop run``, and only their import line names Hoop."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "horovod"
Run = Callable[..., subprocess.CompletedProcess[str]]
LONG_S = 300.0


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_only_the_import_names_hoop(path: Path) -> None:
    _, _, program = path.read_text().partition('"""\n\n')  # after the docstring, which has the command
    # HOOP_RESTART_COUNT is how the elastic example kills itself only once.
    found = [line for line in program.splitlines() if "hoop" in line.replace("HOOP_RESTART_COUNT", "").lower()]
    assert found == ["import hoop.horovod as hvd  # with Horovod: import horovod.torch as hvd"]


@pytest.mark.slow
def test_mnist_learns(run_hoop: Run) -> None:
    done = run_hoop("run", "-np", 2, EXAMPLES / "mnist.py", "--epochs", 2, within=LONG_S)
    assert done.returncode == 0, done.stderr
    accuracies = re.findall(r"\[0\] epoch \d: test loss \S+, accuracy (\S+)%", done.stdout)
    assert len(accuracies) == 2
    assert float(accuracies[-1]) > 90, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--fp16-allreduce"]])
def test_the_benchmark_runs(run_hoop: Run, options: list[str]) -> None:
    script = [EXAMPLES / "synthetic_benchmark.py", "--num-iters", 2, "--num-batches-per-iter", 1, *options]
    done = run_hoop("run", "-np", 2, "python", *script, within=LONG_S)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[0\] 2 ranks: \S+ images/s a rank, \S+ in all", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_the_elastic_training_goes_on_when_a_rank_is_killed(run_hoop: Run, killed: int) -> None:
    """Rank 0 too, whose process has the store of the round."""
    script = [EXAMPLES / "elastic.py", "--kill-rank", killed]
    done = run_hoop("run", "-np", 3, "--min-np", 2, "--json", *script, within=LONG_S)
    assert done.returncode == 0, done.stderr
    assert f"hoop: rank {killed} ended with exit code 137; it is started again" in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert [one["exit_code"] for one in summary["ranks"]] == [0, 0, 0]
    assert [one["restarts"] for one in summary["ranks"]] == [int(rank == killed) for rank in range(3)]
    assert "of 2 goes on" in done.stdout
    losses = [float(one) for one in re.findall(r"epoch \d+: loss (\S+),", done.stdout)]
    assert len(losses) == 4
    assert losses[-1] < 0.01 * losses[0] or losses[-1] < 1e-4
    assert re.search(r"finished with [23] ranks", done.stdout)
