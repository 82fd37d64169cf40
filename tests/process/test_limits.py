"""Devices that exceed this machine's resources are refused before the first starts; ended devices are reaped."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import preloaded
import pytest

import hoop

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]
    Run = Callable[..., subprocess.CompletedProcess[str]]
    GetStatus = Callable[[str], dict[str, Any]]

SLOW = f"{Path(__file__).with_name('train_driver.py')}:slow"
LIMITED = """
import resource, runpy, sys
soft, hard = map(int, sys.argv[1:3])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
sys.argv[:] = ["hoop", *sys.argv[3:]]
runpy.run_module("hoop", run_name="__main__", alter_sys=True)
"""
"""``hoop …`` after ``ulimit -S -n SOFT -H -n HARD``."""
TIMEOUT_S = 240.0


def run_limited(soft: int, hard: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(
        [sys.executable, "-c", LIMITED, str(soft), str(hard), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize(
    "arguments",
    [["train", "mnist", "-n", "500", "--epochs", "0"], ["up", "--devices", "500"], ["chaos", "-n", "500"]],
    ids=lambda arguments: arguments[0],
)
def test_more_devices_than_the_open_file_limit_allows_are_refused(arguments: list[str]) -> None:
    """Independent of the machine: the limit is set to 1000 open files, and a process needs 2064."""
    done = run_limited(1000, 1000, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hoop: --devices: 500 of ")
    assert "a process needs 2064 open files, and may have 1000 (ulimit -Hn)" in done.stderr
    assert "is the most that fits" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "mnist", "-n", "500", "--memory", "1TiB"],
        ["up", "--devices", "500", "--memory", "1TiB"],
        ["bench", "--ranks", "2,500", "--sizes", "1TiB"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_more_memory_than_available_is_refused_with_the_arithmetic(run_hoop: Run, arguments: list[str]) -> None:
    done = run_hoop(*arguments, within=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert " cannot fit on this machine: " in done.stderr
    assert "TiB" in done.stderr


def test_hoop_train_refuses_too_much_memory_before_it_forks() -> None:
    code = (
        "import hoop\n"
        "try:\n    hoop.train('mnist', devices=500, memory='1TiB')\n"
        "except hoop.HoopError as error:\n    print(type(error).__name__, error)\n"
    )
    done = preloaded.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout.startswith("ResourceExhausted memory: 500 of 1 TiB cannot fit on this machine")


def test_the_soft_limit_of_open_files_is_raised() -> None:
    """Each of two devices needs more than 20 open files; children inherit the limit of the command."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    done = run_limited(20, hard, "train", SLOW, "-n", "2", "--memory", "8MiB", "--epochs", "0")
    assert done.returncode == 0, done.stderr


# ---- ended children are reaped


def wait_until_reaped(pid: int) -> None:
    """A zombie still has its entry in /proc."""
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, Path(f"/proc/{pid}/stat").read_text()
        threading.Event().wait(0.005)


def test_a_killed_forked_device_is_reaped(start: Start, status: GetStatus, tmp_path: Path) -> None:
    address = tmp_path / "address"
    running = start("train", SLOW, "-n", "3", "--memory", "8MiB", "--address-file", address)
    deadline = time.monotonic() + TIMEOUT_S
    while not address.exists():
        assert time.monotonic() < deadline, running.errors
        threading.Event().wait(0.005)
    pid = status(address.read_text().strip())["devices"][1]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until_reaped(pid)
    assert running.process.poll() is None, "its parent ended too"
    running.signal(signal.SIGTERM)
    running.wait(TIMEOUT_S)


def test_a_killed_device_of_hoop_up_is_reaped(start: Start, connect: Callable[..., hoop.Cluster]) -> None:
    up = start("up", "--devices", 2, "--memory", "8MiB")
    pid = connect(up.address).status().devices[0].device.pid
    os.kill(pid, signal.SIGKILL)
    wait_until_reaped(pid)
    assert up.process.poll() is None, "its parent ended too"
