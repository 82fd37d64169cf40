"""Hoop commands as child processes of this process. Used by ``launch.local``, ``lab.chaos`` and ``lab.papers``."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from hoop.memory.storage import default_directory

LEAVE_WITH_STDIN = "--leave-with-stdin"
"""Option of Hoop's servers: the process leaves when its stdin closes."""


def python_module(name: str) -> list[str]:
    """The command that runs a module of Hoop in this Python, without the current folder in its import path."""
    source = Path(__file__).resolve().parents[2]
    # A Hoop that is not installed is imported from the current folder.
    return [sys.executable, *([] if Path.cwd() == source else ["-P"]), "-m", name]


def hoop_command(*arguments: str) -> list[str]:
    """The command line of ``hoop ARGUMENTS`` in this Python."""
    return [*python_module("hoop"), *arguments]


def start_process(
    *arguments: str,
    stdout: int | None = None,
    stderr: int | IO[Any] | None = None,
    env: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> subprocess.Popen[str]:
    """Start ``hoop ARGUMENTS`` in its own session, so that Ctrl-C reaches only this process.

    With ``LEAVE_WITH_STDIN`` among the arguments its stdin is a pipe from this process: the child leaves when this
    process ends, however it ends. ``prefix``: a command that executes its arguments in its own place, such as
    ``ip netns exec NAME``.
    """
    return subprocess.Popen(
        [*prefix, *hoop_command(*arguments)],
        text=True,
        env=env,
        stdin=subprocess.PIPE if LEAVE_WITH_STDIN in arguments else subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def terminate_process(process: subprocess.Popen[Any], timeout_s: float) -> None:
    """Send SIGTERM; after ``timeout_s`` seconds send SIGKILL."""
    process.terminate()
    try:
        process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def remove_arenas(pid: int) -> None:
    """Remove the arena files of a device that was killed. On Linux such a file has no name, and nothing is left."""
    for folder in {default_directory(0), default_directory(sys.maxsize)}:
        for path in folder.glob(f"hoop-{pid}-*.arena"):
            path.unlink(missing_ok=True)
