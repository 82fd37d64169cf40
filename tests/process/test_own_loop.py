"""Training loops of users' own with ``hoop.elastic``: the same weights at every rank, and after a rank was killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_code"
KILLER = """
import os, runpy, signal, sys
import hoop.elastic
from hoop.elastic import Step

backward = Step.backward
def killing(step, loss, weight=1.0):
    first = os.environ["HOOP_RESTART_COUNT"] == "0"
    if step.number == {step} and os.environ["RANK"] == "{rank}" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    backward(step, loss, weight)
Step.backward = killing
runpy.run_path({script!r}, run_name="__main__")
"""
LINE = re.compile(r"(\d+) steps, loss ([\d.]+), weights ([0-9a-f]{16})")


def printed(*command: str) -> list[tuple[str, ...]]:
    """Steps, loss and weights that each rank has printed."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return [found.groups() for found in LINE.finditer(done.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gan", "own_loop"])
def test_the_weights_do_not_depend_on_the_number_of_devices(name: str) -> None:
    script = str(EXAMPLES / f"{name}.py")
    assert printed("-m", "hoop", "run", "-np", "3", script) == printed(script) * 3


@pytest.mark.parametrize("name", ["gan", pytest.param("own_loop", marks=pytest.mark.slow)])
def test_the_survivors_of_a_kill_have_the_weights_of_one_device(name: str, tmp_path: Path) -> None:
    script = str(EXAMPLES / f"{name}.py")
    alone = printed(script)
    assert len(alone) == 1
    killer = tmp_path / "killed.py"
    killer.write_text(KILLER.format(step=5, rank=0, script=script))
    survivors = printed("-m", "hoop", "run", "-np", "3", "--min-np", "1", "--max-restarts", "0", str(killer))
    assert survivors == alone * 2


def test_a_mistake_in_the_loop_is_named(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    right = "step.backward(F.cross_entropy(model(x), y), weight=len(y))"
    script.write_text((EXAMPLES / "own_loop.py").read_text().replace(right, "F.cross_entropy(model(x), y)"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert "step 0: no backward for a shard; call step.backward(loss, weight=…)" in done.stderr
