"""Long-running commands end by SIGTERM, Ctrl-C and SIGHUP, in the foreground and as a background job of a shell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from interrupts import interrupts

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]
    GetStatus = Callable[[str], dict[str, Any]]

UP = ("--devices", "1", "--memory", "64MiB")
SLOW = f"{Path(__file__).with_name('train_driver.py')}:slow"
TIMEOUT_S = 240.0


def wait_until(condition: Callable[[], object], running: Running) -> None:
    """Poll for a condition that emits no event."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{running}: not within {TIMEOUT_S:g} s; {running.errors}"
        assert running.process.poll() is None, f"{running} ended: {running.errors}"
        threading.Event().wait(0.005)


def has_children(running: Running, least: int = 1) -> bool:
    path = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    return len(path.read_text().split()) >= least


def has_steps(out: Path) -> bool:
    """Whether a training with this folder has made steps."""
    metrics = out / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def has_cluster(running: Running) -> bool:
    """The forked command has a child from the beginning, which forks the processes of the cluster."""
    return has_children(running, least=2)


Ready = Callable[["Running"], object]
FIRST_LINE = "its first line"
"""The command is ready when it has written a line to standard output."""

COMMANDS: dict[str, tuple[list[str], Ready | str, int]] = {
    "up": (["up", *UP], FIRST_LINE, 0),
    "coordinator": (["coordinator"], FIRST_LINE, 0),
    "device": (["device", "--join", "ADDRESS", "--memory", "8MiB"], FIRST_LINE, 0),
    "events": (["events", "--follow", "-c", "ADDRESS"], FIRST_LINE, 143),
    "train": (["train", SLOW, "-n", "2", "--memory", "8MiB"], has_children, 143),
    "chaos": (["chaos", "--faults", "3", "-n", "2"], has_cluster, 143),
    "bench": (["bench", "--ranks", "2", "--seconds", "60s"], has_children, 143),
    "reproduce": (["reproduce", "mnist-pipeline", "--quick", "--out", "FOLDER"], has_children, 143),
}


# SIGINT ignored, by default: test_sigint_stays_ignored_… has ``hoop up`` from a real start, and
# test_a_background_training_… a training, both with the signal that they ignore.
CASES = [(name, ignoring) for name in COMMANDS for ignoring in (False, True) if (name, ignoring) != ("up", True)]


@pytest.mark.slow_if(when=lambda params: params["ignoring"])
@pytest.mark.parametrize(
    ("name", "ignoring"), CASES, ids=[f"{name}-{'SIGINT ignored' if one else 'foreground'}" for name, one in CASES]
)
def test_sigterm_ends_a_command_and_nothing_is_left(
    up: Running, start: Start, tmp_path: Path, name: str, ignoring: bool
) -> None:
    """Only the command gets the signal; a fixture of tests/conftest.py checks for processes and files left behind."""
    arguments, ready, code = COMMANDS[name]
    placeholders = {"ADDRESS": up.address, "FOLDER": str(tmp_path / "out")}
    running = start(
        *(placeholders.get(argument, argument) for argument in arguments),
        ignore_sigint=ignoring,
        real_start=ignoring,  # Python's own start decides which signals are ignored
    )
    if callable(ready):
        wait_until(lambda: ready(running), running)
    else:
        assert running.line(TIMEOUT_S)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(TIMEOUT_S) == code, running.errors


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, id="SIGTERM"), pytest.param(signal.SIGINT, id="SIGINT")],
)
def test_a_signal_to_attach_leaves_the_job_running(up: Running, start: Start, number: signal.Signals) -> None:
    detached = start("train", "mnist", "-c", up.address, "--detach", "--epochs", "100000")
    job = detached.first_line.split()[-1]
    assert detached.wait(TIMEOUT_S) == 0
    watcher = start("attach", job, "-c", up.address)
    wait_until(lambda: f"job {job}, mnist: running" in watcher.errors, watcher)
    os.kill(watcher.pid, number)
    assert watcher.wait(TIMEOUT_S) == 128 + number, watcher.errors
    assert f"job {job} goes on; come back with: hoop attach {job}" in watcher.errors
    stopper = start("attach", job, "-c", up.address, "--stop")
    assert stopper.wait(TIMEOUT_S) == 0, stopper.errors


def test_sigint_stays_ignored_in_the_background(start: Start, status: GetStatus) -> None:
    """As POSIX requires: Ctrl-C is for foreground processes. SIGTERM to the command alone ends it."""
    cluster = start("up", *UP, ignore_sigint=True, real_start=True)
    address = cluster.address
    cluster.signal(signal.SIGINT)
    assert [device["state"] for device in status(address)["devices"]] == ["alive"]
    ignored = int(next(line for line in status_lines(cluster.pid) if line.startswith("SigIgn")).split()[1], 16)
    assert ignored >> (signal.SIGINT - 1) & 1
    os.kill(cluster.pid, signal.SIGTERM)
    assert cluster.wait(TIMEOUT_S) == 0


def status_lines(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()


def test_a_background_training_ignores_sigint_and_stops_at_sigterm(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = start("train", SLOW, "-n", "2", "--memory", "8MiB", "--out", out, ignore_sigint=True)
    wait_until(lambda: has_steps(out), running)
    running.signal(signal.SIGINT)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(TIMEOUT_S) == 143, "SIGINT was sent first and must be ignored; it would give 130"
    assert len(list((out / "checkpoints").iterdir())) == 1


def test_sigterm_to_all_processes_of_a_training_stops_it_after_a_step(start: Start, tmp_path: Path) -> None:
    """As systemd, Slurm and Docker send it: the forked processes must live until the step is done."""
    out = tmp_path / "run"
    running = start("train", SLOW, "-n", "2", "--memory", "8MiB", "--out", out)
    wait_until(lambda: has_steps(out), running)
    pids = [running.pid]
    for pid in pids:
        pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    assert len(pids) == 5, "the command, the head, the coordinator and two devices"
    for pid in reversed(pids):
        os.kill(pid, signal.SIGTERM)
    assert running.wait(TIMEOUT_S) == 143, running.errors
    assert len(list((out / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["up", *UP], 0), (["train", SLOW, "-n", "2", "--memory", "8MiB"], 129)],
    ids=["up", "train"],
)
def test_sighup_ends_a_command(start: Start, arguments: list[str], code: int) -> None:
    running = start(*arguments)
    if arguments[0] == "up":
        assert running.line(TIMEOUT_S)
    else:
        wait_until(lambda: has_children(running), running)
    os.kill(running.pid, signal.SIGHUP)
    assert running.wait(TIMEOUT_S) == code, running.errors


def test_sighup_is_ignored_under_nohup(tmp_path: Path) -> None:
    """nohup starts the command with SIGHUP ignored, and it stays ignored."""
    address = tmp_path / "address"
    command = ["nohup", sys.executable, "-m", "hoop", "up", *UP, "--address-file", str(address)]
    with (
        interrupts(ignored=True),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as up,
    ):
        try:
            assert up.stdout is not None
            assert up.stdout.readline().startswith(b"coordinator ")
            ignored = next(line for line in status_lines(up.pid) if line.startswith("SigIgn")).split()[1]
            assert int(ignored, 16) >> (signal.SIGHUP - 1) & 1
        finally:
            up.terminate()
        assert up.wait(TIMEOUT_S) == 0
    assert not address.exists()
