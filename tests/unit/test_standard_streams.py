"""Writes to guarded standard streams never raise, whatever is behind them, and in servers never wait."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEADLINE_S = 120.0
PRELUDE = """
import contextlib, logging, os, sys, warnings
from hoop.standard_streams import guard, lost
guard(patient={patient})
"""
WRITERS = """
import traceback, rich.console, typer
print("printed"); print("printed", file=sys.stderr)
typer.echo("echoed"); typer.echo("echoed", err=True)
rich.console.Console().print("shown"); rich.console.Console(stderr=True).print("shown")
warnings.warn("warned")
logging.getLogger("hoop").error("logged"); logging.getLogger("other").error("logged")
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
sys.stdout.buffer.write(b"bytes"); sys.stdout.flush(); sys.stderr.flush()
os.open("work", os.O_WRONLY | os.O_CREAT)  # whatever number it gets, nothing is printed into it
print("printed"); print("printed", file=sys.stderr)
for number in (1, 2):
    with contextlib.suppress(OSError):
        os.write(number, b"x")  # as a library written in C does
open("done", "w").write(f"{lost(sys.stdout)} {lost(sys.stderr)}")
"""
REDIRECTIONS = {
    "closed": ">&- 2>&-",
    "all closed": "<&- >&- 2>&-",
    "full": ">/dev/full 2>/dev/full",
    "file": ">out 2>err",
}


def run(program: str, folder: Path, redirection: str, **environment: str) -> int:
    """Runs a program in a shell with its standard streams redirected; returns its exit code."""
    words = ["sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, program]
    environment = {**os.environ, "HOOP_LOG": "error", **environment}
    return subprocess.run(words, cwd=folder, env=environment, timeout=DEADLINE_S, check=False).returncode


@pytest.mark.parametrize("kind", REDIRECTIONS)
def test_no_writer_fails_whatever_is_behind_the_streams(tmp_path: Path, kind: str) -> None:
    assert run(PRELUDE.format(patient=True) + WRITERS, tmp_path, REDIRECTIONS[kind]) == 0
    errors = {"full": "[Errno 28] No space left on device"}.get(kind, "None")
    assert (tmp_path / "done").read_text() == f"{errors} {errors}"
    assert (tmp_path / "work").read_bytes() == b""
    if kind == "file":
        out, err = (tmp_path / name for name in ("out", "err"))
        assert out.read_text() == "printed\nechoed\nshown\nbytesprinted\nx"
        assert [err.read_text().count(word) for word in ("warned", "ZeroDivisionError", "shown")] == [1, 1, 1]


def test_a_reader_that_leaves_is_noticed_once_and_children_get_a_stream_that_works(tmp_path: Path) -> None:
    read, write = os.pipe()
    program = PRELUDE.format(patient=True) + WRITERS + "import subprocess; subprocess.run(['echo', 'x'], check=True)"
    with subprocess.Popen(
        [sys.executable, "-c", "input();" + program], cwd=tmp_path, stdin=subprocess.PIPE, stdout=write, stderr=write
    ) as process:
        os.close(write)
        os.close(read)
        process.communicate(b"go\n", timeout=DEADLINE_S)
    assert process.returncode == 0
    assert (tmp_path / "done").read_text() == "[Errno 32] Broken pipe [Errno 32] Broken pipe"


def test_a_server_does_not_wait_for_a_reader_that_does_not_read(tmp_path: Path) -> None:
    """The text that a paused reader did not take is missing, and the log says so where it is."""
    lines = 100_000
    program = PRELUDE.format(patient=False) + (
        f"for number in range({lines}): print(f'line {{number}}', file=sys.stderr)\n"
        "print(lost(sys.stderr), flush=True); input()\n"
        "print('last', file=sys.stderr)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "[Errno 11] nobody reads\n"  # all is printed, and nobody has read a line
        os.set_blocking(process.stderr.fileno(), False)
        errors = process.stderr.read()
        os.set_blocking(process.stderr.fileno(), True)
        errors += process.communicate("go\n", timeout=DEADLINE_S)[1]
    first, *_, gap, last = errors.splitlines()
    assert (first, last) == ("line 0", "last")
    assert "bytes are missing here: nobody reads" in gap
    assert errors.count("line") < lines


@pytest.mark.skipif(sys.platform != "linux", reason="terminals are opened a second time by /proc")
def test_a_server_does_not_wait_for_a_terminal_that_nobody_reads() -> None:
    """A terminal says that it is ready when it takes one byte; the write of a longer line waited for ever."""
    master, terminal = os.openpty()
    program = PRELUDE.format(patient=False) + "for _ in range(2000):\n    print('x' * 100, file=sys.stderr)\n"
    try:
        done = subprocess.run([sys.executable, "-c", program], stderr=terminal, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0
    finally:
        os.close(terminal)
        os.close(master)


def test_text_after_a_full_disk_is_written_again(tmp_path: Path) -> None:
    """A log on a disk that was full for a while goes on, and says how much is missing."""
    program = PRELUDE.format(patient=True) + (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8, resource.RLIM_INFINITY))\n"
        "print('12345678', file=sys.stderr); print('lost', file=sys.stderr)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)\n"
        "print('written', file=sys.stderr)\n"
    )
    assert run(program, tmp_path, "2>err") == 0
    assert (tmp_path / "err").read_text() == "12345678\nhoop: 6 bytes are missing here: File too large\nwritten\n"


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("bench --help >/dev/full", 1, "hoop: standard output: No space left on device"),
        ("bench --help >&- 2>&-", 0, ""),
        ("train --list >/dev/full", 0, ""),
        ("train --list >&- 2>&-", 0, ""),
        ("evaluate /nowhere 2>/dev/full", 2, ""),
    ],
)
def test_the_exit_code_is_that_of_the_work(tmp_path: Path, command: str, code: int, said: str) -> None:
    """A command whose result is what it prints fails if that is lost; the others end with the code of their work."""
    program = "import sys; sys.argv[1:] = os.environ['WORDS'].split(); from hoop.cli.main import main; main()"
    words, _, redirection = command.partition(" >" if " >" in command else " 2>")
    errors = tmp_path / "err"
    redirection = (">" if " >" in command else "2>") + redirection + ("" if "2>" in command else f" 2>{errors}")
    assert run(f"import os; {program}", tmp_path, redirection, WORDS=words) == code
    assert said in (errors.read_text() if errors.exists() else "")
