"""Runs ``hoop train`` and ``train_driver`` in subprocesses, and a cluster whose devices communicate over TCP only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import preloaded
from free_ports import free_port

TIMEOUT_S = 400.0
DRIVER = Path(__file__).parents[1] / "process" / "train_driver.py"
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
HOOP = [sys.executable, "-m", "hoop"]


def hoop_train(*arguments: str, out: Path, prefix: Sequence[str] = ()) -> dict[str, Any]:
    """Runs ``hoop train`` and returns its result, with the run folder as ``out``."""
    completed = preloaded.run(
        [*prefix, *HOOP, "train", *arguments, "--out", str(out), "--json"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
        env=ENV,
        check=True,
    )
    return {**json.loads(completed.stdout), "out": str(out)}


def run_driver(driver: Path, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Runs the jobs one after the other in one driver process, which forks their devices; returns their results.

    ``folder``: parent of the run folders.
    """
    outs = [str(folder / f"run{number}") for number in range(len(jobs))]
    completed = preloaded.run(
        [sys.executable, str(driver)],
        input=json.dumps([{**job, "out": out} for job, out in zip(jobs, outs, strict=True)]),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=ENV,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    results = [json.loads(line) for line in completed.stdout.splitlines()]
    return [{**result, "out": out} for result, out in zip(results, outs, strict=True)]


@contextmanager
def tcp_cluster(devices: int) -> Iterator[str]:
    """Starts a coordinator and devices that advertise a data address and share no memory; yields its address."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> str:
        started.append(preloaded.Popen([*HOOP, *arguments], text=True, stdout=subprocess.PIPE, env=ENV))
        assert started[-1].stdout is not None
        return started[-1].stdout.readline()

    try:
        address = start("coordinator").split()[-1]
        for _ in range(devices):
            port = str(free_port())
            data_options = "--data-port", port, "--advertise-data", f"127.0.0.1:{port}"
            start("device", "--join", address, *data_options, "--jobs", str(DRIVER.parent))
        yield address
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=TIMEOUT_S)
