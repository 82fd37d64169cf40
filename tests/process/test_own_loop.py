"""Training loops of users' own with ``hoop.elastic``: the same weights at every rank, and after a rank was killed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
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
    done = preloaded.run([sys.executable, *command], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return found_in(done.stdout)


def found_in(text: str) -> list[tuple[str, ...]]:
    return [found.groups() for found in LINE.finditer(text)]


def run_module(*command: str) -> str:
    done = preloaded.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def run_hoop(*arguments: str) -> str:
    """The output of ``hoop run``."""
    return run_module("hoop", "run", *arguments)


LOOP = """
import hashlib, os, signal, sys, time
from pathlib import Path

import torch
from torch import nn

import hoop.elastic

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
inputs, targets = torch.randn(102, 6), torch.randint(4, (102,))
options = {options}
run = hoop.elastic.Run(
    model=model, optimizer=optimizer, scheduler=scheduler, data=(inputs, targets), batch_size=42, shards=6, **options
)
restarted = os.environ.get("HOOP_RESTART_COUNT", "0") != "0"
flag = Path({flag!r})
steps = 0
for step in run.steps():
    steps += 1
    {at_step}
    for x, y in step.shards():
        step.backward(nn.functional.cross_entropy(model(x), y), weight=len(y))
    step.update()
weights = b"".join(one.detach().numpy().tobytes() for one in model.state_dict().values())
print(f"{{step.number + 1}} steps, loss {{step.loss:.4f}}, weights {{hashlib.sha256(weights).hexdigest()[:16]}}")
print(f"here {{steps}}")
"""


def write_loop(folder: Path, at_step: str = "pass", **options: Any) -> str:
    """A script with a loop that runs ``at_step`` in every step; returns its path."""
    script = folder / f"loop{len(list(folder.glob('loop*')))}.py"
    script.write_text(LOOP.format(at_step=at_step, flag=str(folder / "flag"), options=options))
    return str(script)


def test_a_process_that_is_started_again_joins_and_finishes_with_the_others(tmp_path: Path) -> None:
    script = write_loop(
        tmp_path,
        # The others take their time until it is there: at most 1 s a step, 90 steps.
        """if restarted: flag.touch()
    elif run.rank == 1 and step.number == 4: os.kill(os.getpid(), signal.SIGKILL)
    elif step.number > 4:
        deadline = time.monotonic() + 1.0
        while not flag.exists() and time.monotonic() < deadline: time.sleep(0.01)""",
        epochs=30,
    )
    alone = printed(write_loop(tmp_path, epochs=30))
    done = run_hoop("-np", "2", "--min-np", "1", script)
    assert found_in(done) == alone * 2
    assert len(set(re.findall(r"here \d+", done))) == 2, "the one that was started again has made fewer steps"


def test_a_process_that_is_started_again_after_the_end_has_nothing_to_do(tmp_path: Path) -> None:
    """It ends with 0 and a line, and what follows the loop is not done with its untrained model."""
    script = write_loop(tmp_path, "if run.rank == 1 and step.number == 4: os.kill(os.getpid(), signal.SIGKILL)")
    wait = """restarted = os.environ.get("HOOP_RESTART_COUNT", "0") != "0"
while restarted and not (Path({folder!r}) / "finished").exists(): time.sleep(0.01)
model ="""
    text = Path(script).read_text().replace("model =", wait.format(folder=str(tmp_path)), 1)
    Path(script).write_text(text + "Path(flag).with_name('finished').touch()\n")
    alone = printed(write_loop(tmp_path))
    command = [sys.executable, "-m", "hoop", "run", "-np", "2", "--min-np", "1", "--json", script]
    done = preloaded.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert found_in(done.stdout) == alone
    assert json.loads(done.stdout.splitlines()[-1])["ranks"][1] == {"rank": 1, "exit_code": 0, "restarts": 1}
    assert "rank 1: the others have finished the run; nothing is left for this process" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(["hoop", "run", "-np", "2"], marks=pytest.mark.slow, id="hoop run"),
        pytest.param(["torch.distributed.run", "--nproc-per-node", "2"], id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_from_its_checkpoint_to_the_bit(launcher: list[str], tmp_path: Path) -> None:
    alone = printed(write_loop(tmp_path, epochs=4))
    options: dict[str, Any] = {"out": str(tmp_path / "run"), "resume": "auto", "epochs": 4}
    stopping = write_loop(
        tmp_path,
        # A checkpoint is written beside training: the processes end when that of step 6 is there.
        """if step.number == 8:
        deadline = time.monotonic() + 60.0
        written = Path(options["out"]) / "checkpoints" / "step-00000006.safetensors"
        while not written.exists() and time.monotonic() < deadline: time.sleep(0.01)
        os._exit(3)""",
        **options,
    )
    failed = preloaded.run([sys.executable, "-m", *launcher, stopping], capture_output=True, text=True, timeout=400)
    assert failed.returncode != 0, failed.stdout
    names = sorted(one.name for one in (tmp_path / "run" / "checkpoints").iterdir())
    assert "step-00000006.safetensors" in names
    done = run_module(*launcher, write_loop(tmp_path, **options))
    assert found_in(done) == alone * 2
    assert set(re.findall(r"here (\d+)", done)) == {"6"}, "the steps of the first two epochs are not made again"


def test_a_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path) -> None:
    script = write_loop(tmp_path, out=str(tmp_path / "run"), epochs=1)
    printed(script)
    again = preloaded.run([sys.executable, script], capture_output=True, text=True, timeout=400)
    assert again.returncode == 1
    assert "holds a run; go on with it by resume=True, or name another" in again.stderr


def test_a_folder_that_another_run_writes_is_refused(tmp_path: Path) -> None:
    """It has the lock from its first checkpoint on."""
    out = tmp_path / "run"
    waiting = """if step.number == 2 * 3:
        print("locked", (Path(options["out"]) / ".lock").exists(), flush=True)
        sys.stdin.read()"""
    script = write_loop(tmp_path, waiting, out=str(out), resume="auto", epochs=3)
    with preloaded.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "locked True\n"
        again = preloaded.run([sys.executable, script], capture_output=True, text=True, timeout=400)
        assert again.returncode == 1
        assert f"process {first.pid} on " in again.stderr
        first.communicate("", timeout=400)
        assert first.returncode == 0
    assert not (out / ".lock").exists()


@pytest.mark.slow
def test_a_device_leaves_without_a_loss(tmp_path: Path) -> None:
    alone = printed(write_loop(tmp_path, epochs=40))
    script = write_loop(
        tmp_path,
        # The other one waits, once, until the first has left.
        """if run.rank == 0:
        if step.number == 5: run.leave()
    elif step.number >= 5:
        deadline = time.monotonic() + 1.0
        while not flag.exists() and time.monotonic() < deadline: time.sleep(0.01)""",
        epochs=40,
    )
    Path(script).write_text(Path(script).read_text() + "flag.touch()\n")
    done = run_hoop("-np", "2", script)
    assert alone[0] in found_in(done), done
    left = min(map(int, re.findall(r"here (\d+)", done)))
    assert 5 < left < int(alone[0][0]), done


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
    done = preloaded.run([sys.executable, str(script)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert "step 0: no backward for a shard; call step.backward(loss, weight=…)" in done.stderr
