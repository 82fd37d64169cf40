"""``scripts/starve`` stops and continues a command and all that it starts, and leaves nothing stopped behind."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "starve"
LONG_S = 120.0
FOREVER = "sleep 1000 & echo $!; wait"
"""A shell command that starts another process, prints its number and waits for it."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the state of processes is read in /proc")


def load() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("starve_script", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look it up
    loader.exec_module(module)
    return module


starve = load()


def has_cgroup() -> bool:
    with contextlib.suppress(OSError):
        starve.Cgroup(False).release()
        return True
    return False


BY = [pytest.param("cgroup", marks=pytest.mark.skipif(not has_cgroup(), reason="no cgroup can be made")), "signals"]


def wait_until(condition: Callable[[], bool], awaited: str) -> None:
    until = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < until, f"not within {LONG_S:g} s: {awaited}"
        time.sleep(0.002)


def parent_and_state(pid: int) -> tuple[int, str]:
    """Of a process that exists; (0, "gone") else."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return 0, "gone"
    return int(parent), state


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by SIGSTOP, or frozen with its cgroup."""
    with contextlib.suppress(OSError):
        if parent_and_state(pid)[1] == "T":
            return True
        path = next(line[3:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line[:3] == "0::")
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        folder = next((Path(line.split()[1] + path) for line in mounts if line.split()[2] == "cgroup2"), None)
        return folder is not None and "frozen 1" in (folder / "cgroup.events").read_text()
    return False


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return process

    yield run
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        process.communicate(timeout=LONG_S)


def stopper_of(pid: int) -> int:
    """The child of the script that is not the command: it alone leads a session."""
    children = [child for child, parent, _ in starve.processes() if parent == pid]
    (stopper,) = [child for child in children if os.getsid(child) == child]
    return int(stopper)


def grandchild_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


@pytest.mark.parametrize("percent", [5, 30, 90])
def test_the_share_is_right(percent: int) -> None:
    """In virtual time, with stops that take longer than they should."""
    schedule, late = starve.Schedule(percent / 100, 1.0, seed=3), random.Random(5)
    now = 0.0
    turn = schedule.first(now)
    for _ in range(20_001):
        now = turn.until + (late.random() * 0.1 if turn.stopped else 0.0)
        turn = schedule.next(turn, now)
    assert schedule.stops == 10_000
    assert 1 - schedule.stopped_s / now == pytest.approx(percent / 100, abs=0.005)


@pytest.mark.parametrize(
    ("script", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0), ("exec no-such-program", 127)]
)
def test_the_exit_code_is_the_command_s(start: Callable[..., subprocess.Popen[str]], script: str, code: int) -> None:
    assert start("90", "sh", "-c", script).wait(LONG_S) == code


def test_wrong_arguments_are_explained(start: Callable[..., subprocess.Popen[str]]) -> None:
    for arguments, reason in (
        (["30"], "COMMAND: there is none after PERCENT"),
        (["30", "--apart", "true"], "options go before it: scripts/starve --apart 30 make test"),
        (["100", "true"], "PERCENT: 100 is not above 0 and below 100"),
        (["--longest", "0.01", "30", "true"], "--longest: 0.01 s; the shortest stop is 0.05 s"),
    ):
        process = start(*arguments)
        _, error = process.communicate(timeout=LONG_S)
        assert process.returncode == 2
        assert reason in error
    process = start("30", "no-such-program")
    _, error = process.communicate(timeout=LONG_S)
    assert (process.returncode, error) == (127, "starve: no-such-program: No such file or directory\n")


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("by", BY)
def test_what_the_command_starts_is_stopped_and_goes_on(
    start: Callable[..., subprocess.Popen[str]], by: str, apart: bool
) -> None:
    process = start("--by", by, *(["--apart"] if apart else []), "20", "sh", "-c", FOREVER)
    pid = grandchild_of(process)
    for _ in range(3):
        wait_until(lambda: is_stopped(pid), "it is stopped")
        wait_until(lambda: not is_stopped(pid), "it goes on")
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_S) == 128 + signal.SIGTERM
    wait_until(lambda: not is_stopped(pid), "it goes on")
    assert parent_and_state(pid)[1] != "gone"  # as without the script: the shell ended, and not what it had started
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: parent_and_state(pid)[1] in ("gone", "Z"), "it has ended")


@pytest.mark.parametrize("killed", ["the script", "its child that stops the command"])
@pytest.mark.parametrize("by", BY)
def test_nothing_stays_stopped_when_a_part_of_it_is_killed(
    start: Callable[..., subprocess.Popen[str]], by: str, killed: str
) -> None:
    process = start("--by", by, "1", "sh", "-c", FOREVER)
    pid = grandchild_of(process)
    shell, _ = parent_and_state(pid)
    stopper = stopper_of(process.pid)
    wait_until(lambda: is_stopped(pid) and is_stopped(shell), "both are stopped")
    os.kill(process.pid if killed == "the script" else stopper, signal.SIGKILL)
    wait_until(lambda: parent_and_state(stopper)[1] in ("gone", "Z"), "the stopper has ended")
    wait_until(lambda: not is_stopped(pid) and not is_stopped(shell), "both go on")
    wait_until(lambda: f"starve-{process.pid}" not in Path(f"/proc/{pid}/cgroup").read_text(), "it has left the cgroup")
    os.kill(pid, signal.SIGKILL)
    if killed == "the script":
        wait_until(lambda: parent_and_state(shell)[1] in ("gone", "Z"), "the shell has ended")
    else:
        assert process.wait(LONG_S) == 0
