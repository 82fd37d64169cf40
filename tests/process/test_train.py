"""``hoop train`` on the command line: its output, its run folder, how it ends, and its error messages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import preloaded
import pytest
import safetensors.numpy
from background import RESTING

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]
    GetStatus = Callable[[str], dict[str, Any]]

DRIVER = Path(__file__).with_name("train_driver.py")
JOB, SLOW, BROKEN, SHAPES = (f"{DRIVER}:{name}" for name in ("job", "slow", "broken", "wrong_shapes"))
TIMEOUT_S = 400.0
FIELDS = {
    *("accuracy", "loss", "steps", "epochs", "seconds", "samples_per_second", "weights_sha256"),
    *("strategy", "devices", "bytes_sent", "idle_fraction"),
}
SMALL = ("--memory", "32MiB")
UP = ("--devices", "2", "--memory", "64MiB", "--jobs", DRIVER.parent)


def hoop(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(
        [*preloaded.HOOP, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **environment},
        check=False,
    )


def result(*arguments: object) -> dict[str, Any]:
    """The JSON that ``hoop … --json`` printed as its only line."""
    done = hoop(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def wait_until(condition: Callable[[], bool], describe: Callable[[], str], within: float = TIMEOUT_S) -> None:
    """Poll for a condition that emits no event."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within:g} s; {describe()}"
        threading.Event().wait(0.01)


def start_training(start: Start, out: Path, *options: object) -> Running:
    """Start a training that runs until it is stopped; wait for its first steps."""
    running = start("train", SLOW, *RESTING, "-n", 2, *SMALL, "--out", out, *options)
    metrics = out / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, lambda: running.errors)
    return running


# ---- train, evaluate, export


def test_a_run_is_saved_evaluated_and_exported(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trained = result("train", "mnist", "-n", 2, *SMALL, "--epochs", 1, "--set", "max_steps=60", "--out", out)
    assert set(trained) >= FIELDS
    assert trained["steps"] == 60
    assert trained["devices"] == 2
    assert trained["accuracy"] > 0.8
    assert {path.name for path in out.iterdir()} - {"report.html"} == {  # which needs Bokeh: test_report.py
        "checkpoints",
        "config.json",
        "events.jsonl",
        "ledger.jsonl",
        "metrics.jsonl",
        "result.json",
        "tensorboard",
        "trace.json",
    }
    assert json.loads((out / "result.json").read_text())["weights_sha256"] == trained["weights_sha256"]

    evaluated = result("evaluate", out)
    assert evaluated["weights_sha256"] == trained["weights_sha256"]
    assert evaluated["accuracy"] == pytest.approx(trained["accuracy"], abs=2e-4)
    assert evaluated["loss"] == pytest.approx(trained["loss"], rel=1e-4)

    weights = tmp_path / "model.safetensors"
    assert result("export", out, "--to", weights)["weights_sha256"] == trained["weights_sha256"]
    shapes = {name: tensor.shape for name, tensor in safetensors.numpy.load_file(weights).items()}
    assert sorted(shapes.values()) == [(10,), (10, 64), (64,), (64, 128), (128,), (128, 784)]
    refused = hoop("export", out, "--to", tmp_path / "model.onnx")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "name it .safetensors (a plain state_dict)" in refused.stderr

    repeated = hoop("train", "mnist", "--out", out)
    assert repeated.returncode == 2
    assert f"--out: {out} holds a run; go on with it by --resume" in repeated.stderr


def test_recipes_are_listed() -> None:
    assert set(result("train", "--list")) == {"softmax", "mnist", "lenet", "mobilenet-cifar10", "gpt-tiny"}


USUAL_MISTAKES: tuple[tuple[object, ...], ...] = (
    (),
    ("mnist", "--strategy", "teleport"),
    ("mnist", "--set", "momentum"),
    ("mnist", "--memory", "lots"),
)

# ---- stop signals and killed processes


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_the_first_signal_stops_after_a_step_with_a_checkpoint(
    start: Start, tmp_path: Path, number: int, code: int
) -> None:
    out = tmp_path / "run"
    running = start_training(start, out)
    running.signal(number)
    assert running.wait() == code, running.errors
    assert running.line().split()[:2] == ["stopped", "after"]
    stopped = json.loads((out / "result.json").read_text())
    assert stopped["stopped"] is True
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{stopped['steps']:08}.safetensors"
    if number == signal.SIGINT:
        limit = stopped["steps"] + 30
        uninterrupted = result("train", SLOW, "-n", 1, *SMALL, "--set", f"max_steps={limit}")
        resumed = result("train", "--resume", *SMALL, "--out", out, "--set", f"max_steps={limit}")
        assert resumed["weights_sha256"] == uninterrupted["weights_sha256"]
        assert resumed["devices"] == 2


@pytest.mark.slow
def test_the_second_signal_stops_at_once(start: Start, status: GetStatus, tmp_path: Path, wait_for_exit: Any) -> None:
    address = tmp_path / "address"
    running = start_training(start, tmp_path / "run", "--address-file", address)
    cluster_status = status(address.read_text().strip())
    pids = [cluster_status["coordinator"]["pid"], *(device["pid"] for device in cluster_status["devices"])]
    os.kill(pids[1], signal.SIGSTOP)  # prevents a graceful stop
    running.signal(signal.SIGINT)
    wait_until(lambda: "Ctrl-C again" in running.errors, lambda: running.errors)
    running.signal(signal.SIGINT)
    assert running.wait() == 130
    for pid in pids:
        wait_for_exit(pid, within=0.1)
    assert not address.exists()


def test_ctrl_c_during_startup(start: Start, tmp_path: Path) -> None:
    running = start("train", SLOW, "-n", 2, real_start=True)
    wait_until(lambda: "loading" in running.errors, lambda: running.errors)
    running.signal(signal.SIGINT)
    assert running.wait() == 130, running.errors
    assert "Traceback" not in running.errors


@pytest.mark.slow_if(when=lambda params: params["whom"] != "the coordinator")
@pytest.mark.parametrize("whom", ["a device", "the coordinator", "the head"])
def test_a_killed_process_is_reported_within_seconds(
    start: Start, status: GetStatus, tmp_path: Path, whom: str
) -> None:
    """tests/fault covers the loss of a device that a training survives."""
    address = tmp_path / "address"
    running = start_training(start, tmp_path / "run", "--address-file", address, "-s", "ring", "--no-replicate")
    cluster_status = status(address.read_text().strip())
    parent = int(Path(f"/proc/{cluster_status['coordinator']['pid']}/stat").read_text().rpartition(")")[2].split()[1])
    killed = {
        "a device": cluster_status["devices"][1]["pid"],
        "the coordinator": cluster_status["coordinator"]["pid"],
        "the head": parent,
    }[whom]
    os.kill(killed, signal.SIGKILL)
    assert running.wait(within=60) == 3
    assert {"a device": "device 2", "the coordinator": "coordinator", "the head": "leads the devices"}[
        whom
    ] in running.errors


# ---- user errors


def test_an_exception_in_user_code_is_printed_once_as_a_user_error() -> None:
    done = hoop("train", BROKEN, "-n", 2, *SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("ZeroDivisionError: on purpose") == 1
    assert done.stderr.count('raise ZeroDivisionError("on purpose")') == 1
    assert "your code failed" in done.stderr
    assert "bug" not in done.stderr
    assert "hoop/engine" not in done.stderr


def test_sys_exit_in_user_code_is_named_with_the_way_to_stop() -> None:
    done = hoop("train", f"{DRIVER}:exiting", "-n", 1, *SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert "your code called sys.exit" in done.stderr
    assert 'sys.exit("enough")' in done.stderr
    assert "run.stop()" in done.stderr
    assert "hoop/engine" not in done.stderr
    assert "servers/tasks.py" not in done.stderr


def test_a_model_without_parameters_is_refused() -> None:
    done = hoop("train", f"{DRIVER}:nothing", "-n", 1, *SMALL)
    assert done.returncode == 2
    assert "model: Sequential has no parameter that requires a gradient" in done.stderr


def test_a_batch_larger_than_the_data_is_said() -> None:
    done = hoop("train", JOB, "-n", 1, *SMALL, "--batch-size", 4096, "--epochs", 1)
    assert done.returncode == 0, done.stderr
    assert re.search(r"warning: batch_size: 4096 is more than the \d+ training samples", done.stderr)


def test_the_audit_of_a_pipeline_credits_all_stages(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result("train", JOB, "-n", 2, *SMALL, "-s", "pipeline", "--epochs", 1, "--out", out)
    done = hoop("audit", out)
    assert done.returncode == 0, done.stdout
    assert "shards computed by all stages of pipeline in turn; the last was on: device 2" in done.stdout
    assert "1 whole epoch of" in done.stdout


def test_a_model_that_does_not_fit_its_data_is_a_user_error() -> None:
    done = hoop("train", SHAPES, "-n", 1, *SMALL)
    assert done.returncode == 2
    assert "mat1 and mat2 shapes cannot be multiplied" in done.stderr
    assert "bug" not in done.stderr


@pytest.mark.slow_if(when=lambda params: params["arguments"] not in USUAL_MISTAKES)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "job: none given; try: hoop train mnist"),
        (("mnist", "--strategy", "teleport"), "strategy: 'teleport' is unknown; choose data, ps, ring"),
        (("mnist", "--set", "momentum"), "--set: 'momentum' is not name=value"),
        (("mnist", "--memory", "lots"), "--memory: "),
        (("mnist", "--resume"), "--resume: it needs --out"),
        (("--resume", "--out", "nowhere"), "is not a run's config"),
        (("mnist", "--set", "speed=9"), "speed: no such setting; do you mean seed? There are"),
        (("mnist", "-n", 3, "-s", "hybrid:replicas=2"), "devices: 3 cannot be 2 equal replicas"),
        (("nothing.py:job",), "nothing.py is not a file"),
        (("mnist", "-n", 2, "--memory", "1MiB"), "needs 3.3 MiB and has 1 MiB"),
    ],
)
def test_invalid_arguments_give_a_sentence(arguments: tuple[object, ...], sentence: str) -> None:
    done = hoop("train", *arguments, COLUMNS="200")
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_too_little_memory_reports_what_would_fit() -> None:
    done = hoop("train", "mnist", "-n", 2, "--memory", "3MiB")
    assert done.returncode == 2
    assert "MiB a device are enough: --memory " in done.stderr
    assert "it would fit with" in done.stderr
    assert "first step" not in done.stderr


def test_without_memory_a_device_takes_what_the_job_needs() -> None:
    """A model whose state needs more than 256 MiB a device was refused on a machine with 23 GB."""
    large = result("train", f"{DRIVER}:large", "-n", 2)
    assert min(large["memory"]) > 300 << 20
    assert result("train", f"{DRIVER}:large", "-n", 1, "--memory", "1GiB")["weights_sha256"] == large["weights_sha256"]


# ---- on a running cluster


@pytest.mark.slow
def test_train_a_job_by_its_path_on_a_cluster(up: Running, tmp_path: Path) -> None:
    local = result("train", JOB, "-n", 1)
    remote = result("train", JOB, "--coordinator", up.address, "--out", tmp_path / "run")
    assert remote["devices"] == 2
    assert remote["weights_sha256"] == local["weights_sha256"]
    resumed = result(
        "train",
        "--resume",
        "--coordinator",
        up.address,
        "--out",
        tmp_path / "run",
        "-s",
        "ring",
        "--epochs",
        3,
    )
    uninterrupted = result("train", JOB, "-n", 2, "--epochs", 3)
    assert resumed["weights_sha256"] == uninterrupted["weights_sha256"]
    refused = hoop("train", JOB, "--coordinator", up.address, "-n", 9)
    assert refused.returncode == 2
    assert "9 asked for, 2 are alive" in refused.stderr


def test_ctrl_c_stops_a_job_on_a_cluster_and_the_cluster_stays(
    up: Running, start: Start, status: GetStatus, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    running = start_training(start, out, "--coordinator", up.address)
    running.signal(signal.SIGINT)
    assert running.wait() == 130, running.errors
    assert len(list((out / "checkpoints").iterdir())) == 1
    wait_until(lambda: status(up.address)["communicators"] == [], lambda: str(status(up.address)))
    assert [device["state"] for device in status(up.address)["devices"]] == ["alive", "alive"]
