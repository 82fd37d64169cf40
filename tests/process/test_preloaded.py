"""A command that is forked with its imports behaves as one that Python started: see tests/preloaded.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import preloaded
import pytest
from interrupts import interrupts
from preload_server import READ_LATER

import hoop

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="commands are forked on Linux only")

TIMEOUT_S = 240.0
WRONG = ("plan", "no/such/file.py:job")


def parent_of(process: subprocess.Popen[Any]) -> int:
    return int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("arguments", [("--version",), WRONG, ("no-such-command",)], ids=["0", "2", "usage"])
def test_output_and_exit_code_are_those_of_a_real_start(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command = [*preloaded.HOOP, *arguments]
    forked = preloaded.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=TIMEOUT_S)
    real = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=TIMEOUT_S, check=False)
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)


def test_a_command_gets_folder_environment_session_and_ignored_signals(tmp_path: Path, short_folder: Path) -> None:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(short_folder)}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "text": True}
    with (
        interrupts(ignored=True),
        preloaded.Popen(
            [*preloaded.HOOP, "coordinator", "--address-file", "here"], start_new_session=True, **options
        ) as running,
    ):
        try:
            assert running.stdout is not None
            assert running.stdout.readline().startswith("coordinator ")
            assert parent_of(running) != os.getpid(), "it was not forked from the server"
            assert (tmp_path / "here").exists()
            assert list(short_folder.rglob("*.sock"))
            assert os.getsid(running.pid) == running.pid
            lines = Path(f"/proc/{running.pid}/status").read_text().splitlines()
            ignored = int(next(line for line in lines if line.startswith("SigIgn")).split()[1], 16)
            assert ignored >> (signal.SIGINT - 1) & 1
            assert not ignored >> (signal.SIGTERM - 1) & 1
            assert running.poll() is None
        finally:
            running.terminate()
        assert running.wait(TIMEOUT_S) == 0


def test_a_killed_command_and_its_devices_are_waited_for(
    start: Callable[..., Any], status: Callable[[str], dict[str, Any]], wait_for_exit: Callable[..., None]
) -> None:
    """``hoop up`` waits for its devices, which are its children though another process has forked them."""
    running = start("up", "--devices", 2, "--memory", "8MiB")
    first, second = (device["pid"] for device in status(running.address)["devices"])
    for pid in (first, second):
        assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == running.pid
    os.kill(first, signal.SIGKILL)
    wait_for_exit(first)
    running.kill()
    assert running.process.returncode == -signal.SIGKILL
    wait_for_exit(second)


PROGRAM = """
import json, os, sys
print(json.dumps([__name__, sys.argv, sys.path[0], os.getcwd(), sys.stdin.read()]))
sys.exit(7)
"""


@pytest.mark.parametrize("kind", ["-c", "a file"])
def test_a_program_gets_what_python_gives_it(kind: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, *(["-c", PROGRAM] if kind == "-c" else ["program.py"]), "one", "-P"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "cwd": tmp_path, "timeout": TIMEOUT_S}
    forked = preloaded.run(command, input="given", **options)
    real = subprocess.run(command, input="given", check=False, **options)
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)
    assert real.returncode == 7


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 0, id="handled"), pytest.param(signal.SIGKILL, -signal.SIGKILL, id="killed")],
)
def test_a_command_of_a_shell_is_forked_and_ends_the_shell_s_process(
    number: signal.Signals, code: int, wait_for_exit: Callable[..., None]
) -> None:
    """tests/preload_client.py passes Ctrl-C on, and dies as the command dies."""
    python, inherited = preloaded.SERVER.program(os.environ)
    shell = ["sh", "-c", 'exec "$@"', "sh", *python, "-m", "hoop", "coordinator", "--json"]
    with interrupts(), subprocess.Popen(shell, stdout=subprocess.PIPE, pass_fds=inherited) as running:
        assert running.stdout is not None
        address = json.loads(running.stdout.readline())["coordinator"]
        with hoop.connect(address) as cluster:
            pid = cluster.status().pid
        assert pid != running.pid, "it was not forked from the server"
        os.kill(running.pid if number == signal.SIGINT else pid, number)
        assert running.wait(TIMEOUT_S) == code
        wait_for_exit(pid)


def test_a_command_of_a_shell_that_cannot_be_forked_is_executed() -> None:
    python, inherited = preloaded.SERVER.program(os.environ)
    for environment, arguments in (({"HOOP_LOG": "info"}, ["-m", "hoop", "--version"]), ({}, ["--version"])):
        with subprocess.Popen(
            [*python, *arguments], stdout=subprocess.PIPE, env={**os.environ, **environment}, pass_fds=inherited
        ) as running:
            assert running.communicate(timeout=TIMEOUT_S)[0]
        assert running.returncode == 0


@pytest.mark.parametrize("variable", ["HOOP_LOG", "PYTHONPATH"])
def test_an_environment_that_changes_imports_needs_a_real_start(variable: str, tmp_path: Path) -> None:
    environment = {**os.environ, variable: os.pathsep.join((str(tmp_path), os.environ.get(variable, "")))}
    if variable == "HOOP_LOG":
        environment[variable] = "info"
    with preloaded.Popen([*preloaded.HOOP, "--version"], env=environment, stdout=subprocess.DEVNULL) as process:
        assert parent_of(process) == os.getpid()
    assert process.returncode == 0


def test_variables_that_an_import_sets_in_this_process_do_not_prevent_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every command after the first optimizer in this process, or with a copy from before it, is started anew."""
    before = dict(os.environ)
    for name in READ_LATER:
        before.pop(name, None)
        monkeypatch.setenv(name, "1")
    assert preloaded.SERVER.serves(before)
    assert preloaded.SERVER.serves(os.environ)
