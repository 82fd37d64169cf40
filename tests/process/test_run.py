"""``hoop run``: the environment and the output of its ranks, the exit code, and how it ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]
    Run = Callable[..., subprocess.CompletedProcess[str]]
    WaitForExit = Callable[..., None]

SHOW = """
import os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
print("variables", *(os.environ[name] for name in names), *sys.argv[1:])
print("to stderr", file=sys.stderr)
print("no newline", end="")
"""
FAIL = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("about to fail", flush=True)
    sys.exit(7)
time.sleep(600)
"""
CHILD = """
import os, signal, subprocess, sys, time
if "ignore" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"])
print("pids", os.getpid(), child.pid, flush=True)
time.sleep(600)
"""
RESTARTED = """
import os, sys, time
if os.environ["RANK"] == "1" and os.environ["HOOP_RESTART_COUNT"] == "0":
    sys.exit(5)
if os.environ["RANK"] == "0":
    deadline = time.monotonic() + 300
    while not os.path.exists(sys.argv[1]) and time.monotonic() < deadline:
        time.sleep(0.01)
else:
    open(sys.argv[1], "w").close()
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


def test_a_full_disk_ends_the_copies_of_outputs_and_not_the_run(
    run_hoop: Run, script: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "out" / "rank.0"
    folder.mkdir(parents=True)
    (folder / "stdout").symlink_to("/dev/full")
    done = run_hoop("run", "-np", 2, "--output-filename", tmp_path / "out", script(SHOW), "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert "[0] no newline" in done.stdout.splitlines()
    (line,) = [line for line in done.stderr.splitlines() if "No space left" in line]
    assert f"{folder / 'stdout'} gets no more output: No space left on device; the rank goes on. Free space" in line
    assert (folder / "stderr").read_text() == "to stderr\n"


def test_a_folder_of_outputs_that_cannot_be_written_is_refused_at_once(
    run_hoop: Run, script: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("a file")
    done = run_hoop("run", "-np", 2, "--output-filename", tmp_path / "out", script(SHOW))
    assert done.returncode == 2
    assert "--output-filename" in done.stderr
    assert "name another folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_each_rank_has_its_variables_and_its_prefix(
    run_hoop: Run, script: Callable[[str], Path], tmp_path: Path
) -> None:
    done = run_hoop("run", "-np", 3, "--json", "--output-filename", tmp_path / "out", script(SHOW), "--epochs", "2")
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    ports = set()
    for rank in range(3):
        first, second = (line for line in lines if line.startswith(f"[{rank}] "))
        *words, port, option, value = first.split()
        assert words == [f"[{rank}]", "variables", str(rank), "3", str(rank), "3", "127.0.0.1"]
        assert (option, value) == ("--epochs", "2")
        assert second == f"[{rank}] no newline"
        assert f"[{rank}] to stderr" in done.stderr.splitlines()
        written = (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text()
        assert written == f"{first.removeprefix(f'[{rank}] ')}\nno newline"
        assert (tmp_path / "out" / f"rank.{rank}" / "stderr").read_text() == "to stderr\n"
        ports.add(port)
    assert len(ports) == 1
    summary = json.loads(last)
    assert summary["exit_code"] == 0
    assert [(one["rank"], one["exit_code"], one["restarts"]) for one in summary["ranks"]] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
    ]


def test_a_failing_rank_ends_the_others_and_gives_its_exit_code(run_hoop: Run, script: Callable[[str], Path]) -> None:
    done = run_hoop("run", "-H", "localhost:3", "--json", script(FAIL))
    assert done.returncode == 7
    assert "rank 1 of 3 failed with exit code 7; the others were ended" in done.stderr
    assert "\n  about to fail\n" in done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["exit_code"], summary["failed_rank"]) == (7, 1)
    assert [one["exit_code"] for one in summary["ranks"]] == [128 + signal.SIGTERM, 7, 128 + signal.SIGTERM]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process(
    start: Start, script: Callable[[str], Path], wait_for_exit: WaitForExit, number: signal.Signals
) -> None:
    """Ranks, and on Ctrl-C and SIGTERM also the processes that they have started, and a rank that ignores SIGTERM."""
    arguments = ["ignore"] if number == signal.SIGINT else []
    running = start("run", "--devices", 2, "--grace", "0.5", script(CHILD), *arguments)
    ranks, children = [], []
    for _ in range(2):
        _, _, rank, child = running.line().split()
        ranks.append(int(rank))
        children.append(int(child))
    os.kill(running.pid, number)
    assert running.wait() == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
    for pid in ranks:
        wait_for_exit(pid)
    for pid in children:
        if number == signal.SIGKILL:  # the kernel kills the ranks; what they have started is theirs to end
            os.kill(pid, signal.SIGKILL)
        wait_for_exit(pid)


def test_with_min_np_a_failed_rank_is_started_again(
    run_hoop: Run, script: Callable[[str], Path], tmp_path: Path
) -> None:
    done = run_hoop("run", "-np", 2, "--min-np", 1, "--json", script(RESTARTED), tmp_path / "came")
    assert done.returncode == 0, done.stderr
    assert "rank 1 ended with exit code 5; it is started again" in done.stderr
    ranks = json.loads(done.stdout.splitlines()[-1])["ranks"]
    assert [(one["exit_code"], one["restarts"]) for one in ranks] == [(0, 0), (0, 1)]


def test_with_min_np_and_no_restart_the_others_go_on(run_hoop: Run, script: Callable[[str], Path]) -> None:
    done = run_hoop("run", "-np", 3, "--min-np", 2, "--max-restarts", 0, "--json", script(FAIL.replace("600", "0")))
    assert done.returncode == 0, done.stderr
    assert [one["exit_code"] for one in json.loads(done.stdout.splitlines()[-1])["ranks"]] == [0, 7, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-np", 2, "-H", "gpu7:2"], "--hosts: 'gpu7' is another host"),
        (["-H", "localhost:x"], "--hosts: 'localhost:x' is not HOST:SLOTS"),
        (["-np", 3, "-H", "localhost:2"], "--hosts: localhost:2 has 2 slots, and --devices is 3"),
        (["-np", 0], "--devices: 0 processes"),
        (["-np", 2, "--min-np", 3], "--min-np: 3 is not in 1..2"),
        (["-np", 2, "--max-np", 1], "--max-np: 1 is less than --devices, 2"),
    ],
)
def test_a_wrong_option_is_refused(
    run_hoop: Run, script: Callable[[str], Path], options: list[object], message: str
) -> None:
    done = run_hoop("run", *options, script(SHOW))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("name", ["missing.py", "no-such-program"])
def test_a_missing_script_is_refused(run_hoop: Run, name: str) -> None:
    done = run_hoop("run", "-np", 2, name)
    assert done.returncode == 2
    assert f"SCRIPT: {'there is no file ' if name.endswith('.py') else ''}{name}" in done.stderr
