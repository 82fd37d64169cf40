"""Trainings in processes of their own, and devices with nothing but TCP between them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 100.0
DRIVER = Path(__file__).parents[1] / "process" / "train_driver.py"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
HOOP = [sys.executable, "-m", "hoop"]


def hoop_train(*arguments: str, out: Path, prefix: Sequence[str] = ()) -> dict[str, Any]:
    """The result of a training."""
    done = subprocess.run(
        [*prefix, *HOOP, "train", *arguments, "--out", str(out), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
        env=ENV,
        check=True,
    )
    return {**json.loads(done.stdout), "out": str(out)}


def driven(driver: Path, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What a driver says of each job: it is one process, and forks devices for one after the other.

    ``folder``: where each run's ``out`` is made.
    """
    outs = [str(folder / f"run{number}") for number in range(len(jobs))]
    done = subprocess.run(
        [sys.executable, str(driver)],
        input=json.dumps([{**job, "out": out} for job, out in zip(jobs, outs, strict=True)]),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=ENV,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return [{**one, "out": out} for one, out in zip(found, outs, strict=True)]


@contextmanager
def linked(devices: int) -> Iterator[str]:
    """The address of a coordinator whose devices each advertise an address, and share no memory."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> str:
        started.append(subprocess.Popen([*HOOP, *arguments], text=True, stdout=subprocess.PIPE, env=ENV))
        assert started[-1].stdout is not None
        return started[-1].stdout.readline()

    try:
        address = start("coordinator").split()[-1]
        for _ in range(devices):
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = str(probe.getsockname()[1])
            there = "--data-port", port, "--advertise-data", f"127.0.0.1:{port}"
            start("device", "--join", address, *there, "--jobs", str(DRIVER.parent))
        yield address
    finally:
        for one in reversed(started):
            one.send_signal(signal.SIGTERM)
            one.communicate(timeout=PATIENCE_S)
