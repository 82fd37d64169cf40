"""How long-running commands end: by SIGTERM as by Ctrl-C, in the foreground and as a background job of a shell."""

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
    Ask = Callable[[str], dict[str, Any]]

UP = ("--devices", "1", "--memory", "64MiB")
SLOW = f"{Path(__file__).with_name('train_driver.py')}:slow"
PATIENCE_S = 60.0


def until(happened: Callable[[], object], running: Running) -> None:
    """For what makes no event."""
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline, f"{running}: not within {PATIENCE_S:g} s; {running.errors}"
        assert running.process.poll() is None, f"{running} ended: {running.errors}"
        threading.Event().wait(0.005)


def has_children(running: Running) -> bool:
    path = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    return bool(path.read_text().split())


Ready = Callable[["Running"], object]
up_and_said = "its first line"
"""Ready when the command has written a line to its output."""

COMMANDS: dict[str, tuple[list[str], Ready | str, int]] = {
    "up": (["up", *UP], up_and_said, 0),
    "coordinator": (["coordinator"], up_and_said, 0),
    "device": (["device", "--join", "ADDRESS", "--memory", "8MiB"], up_and_said, 0),
    "events": (["events", "--follow", "-c", "ADDRESS"], up_and_said, 143),
    "train": (["train", SLOW, "-n", "2", "--memory", "8MiB"], has_children, 143),
    "chaos": (["chaos", "--faults", "3", "-n", "2"], has_children, 143),
    "bench": (["bench", "--ranks", "2", "--seconds", "60s"], has_children, 143),
    "reproduce": (["reproduce", "mnist-pipeline", "--quick", "--out", "FOLDER"], has_children, 143),
}


@pytest.mark.parametrize("ignoring", [False, True], ids=["foreground", "SIGINT ignored"])
@pytest.mark.parametrize("name", COMMANDS)
def test_sigterm_ends_it_and_nothing_is_left(
    up: Running, start: Start, tmp_path: Path, name: str, ignoring: bool
) -> None:
    """Only the command itself gets the signal; the fixture of all tests looks for processes and files that stay."""
    arguments, ready, code = COMMANDS[name]
    words = {"ADDRESS": up.address, "FOLDER": str(tmp_path / "out")}
    running = start(*(words.get(one, one) for one in arguments), ignoring=ignoring)
    if callable(ready):
        until(lambda: ready(running), running)
    else:
        assert running.line(PATIENCE_S)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(PATIENCE_S) == code, running.errors


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.slow, id="SIGTERM"), pytest.param(signal.SIGINT, id="SIGINT")],
)
def test_whoever_watches_a_job_leaves_it_alone(up: Running, start: Start, number: signal.Signals) -> None:
    began = start("train", "mnist", "-c", up.address, "--detach", "--epochs", "100000")
    job = began.first.split()[-1]
    assert began.wait(PATIENCE_S) == 0
    watcher = start("attach", job, "-c", up.address)
    until(lambda: f"job {job}, mnist: running" in watcher.errors, watcher)
    os.kill(watcher.pid, number)
    assert watcher.wait(PATIENCE_S) == 128 + number, watcher.errors
    assert f"job {job} goes on; come back with: hoop attach {job}" in watcher.errors
    last = start("attach", job, "-c", up.address, "--stop")
    assert last.wait(PATIENCE_S) == 0, last.errors


def test_sigint_stays_ignored_in_the_background(start: Start, status: Ask) -> None:
    """As POSIX wants it: Ctrl-C is for what is in the foreground."""
    cluster = start("up", *UP, ignoring=True)
    address = cluster.address
    cluster.signal(signal.SIGINT)
    assert [device["state"] for device in status(address)["devices"]] == ["alive"]
    ignored = int(next(line for line in status_lines(cluster.pid) if line.startswith("SigIgn")).split()[1], 16)
    assert ignored >> (signal.SIGINT - 1) & 1
    cluster.signal(signal.SIGTERM)
    assert cluster.wait(PATIENCE_S) == 0


def status_lines(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/status").read_text().splitlines()


def test_a_training_in_the_background_ignores_sigint_and_stops_at_sigterm(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = start("train", SLOW, "-n", "2", "--memory", "8MiB", "--out", out, ignoring=True)
    until(lambda: (out / "metrics.jsonl").exists(), running)
    running.signal(signal.SIGINT)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 143, "SIGINT came first, and would have made it 130"
    assert len(list((out / "checkpoints").iterdir())) == 1


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["up", *UP], 0), (["train", SLOW, "-n", "2", "--memory", "8MiB"], 129)],
    ids=["up", "train"],
)
def test_the_end_of_the_terminal_ends_it(start: Start, arguments: list[str], code: int) -> None:
    running = start(*arguments)
    until(lambda: has_children(running), running)
    os.kill(running.pid, signal.SIGHUP)
    assert running.wait(PATIENCE_S) == code, running.errors


def test_under_nohup_the_end_of_the_terminal_is_ignored(tmp_path: Path) -> None:
    """nohup starts it with SIGHUP ignored, and that stays so."""
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
        assert up.wait(PATIENCE_S) == 0
    assert not address.exists()
