"""A real cluster for a test module: ``hoop up`` in a separate process, used through the lab's protocol."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import preloaded
import pytest
from interrupts import interruptible

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import gpu_sim_messages as lab  # noqa: E402
from lab_client import LabClient  # noqa: E402

__all__ = ["LabClient", "lab"]
"""Tests import these from here, because this module puts examples/ on the path."""

START_S, CALL_S, STOP_S = 240.0, 120.0, 120.0
ERROR_LINE = re.compile(r"Traceback|never retrieved|a bug in Hoop|Exception ignored|Fatal|Segmentation")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Cluster:
    """The coordinator's address and process, and the log of all processes of the cluster."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def status(self) -> dict[str, Any]:
        """The output of ``hoop status --json``."""
        command = [*preloaded.HOOP, "status", "--json", "--coordinator", self.address]
        done = preloaded.run(command, capture_output=True, timeout=CALL_S, check=True)
        return dict(json.loads(done.stdout))

    def pids(self) -> dict[str, int]:
        """The pids of the coordinator and of the devices that are alive or suspect."""
        status = self.status()
        alive = {f"device {one['id']}": one["pid"] for one in status["devices"] if one["state"] in ("alive", "suspect")}
        return {"coordinator": status["coordinator"]["pid"], **alive}

    def error_lines(self) -> list[str]:
        """Lines of the log that no request may cause, however invalid."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if ERROR_LINE.search(line)]


@contextlib.contextmanager
def hoop_up(devices: int = 3, *options: str, check_log: bool = True, real_start: bool = False) -> Iterator[Cluster]:
    """Runs ``hoop up``; at the end it must exit at SIGINT, and its log have no stack trace.

    The lab's calls need no token, unless ``options`` say otherwise. ``real_start``: not forked with its imports.
    """
    with tempfile.TemporaryDirectory(prefix="lab-cluster-") as folder:
        address, log = Path(folder, "address"), Path(folder, "log")
        command = [*preloaded.HOOP, "up", "--devices", str(devices), "--memory", "64MiB"]
        command += ["--address-file", str(address), *options]
        command += [] if {"--token-file", "--tls", "--insecure"}.intersection(options) else ["--lab"]
        with log.open("wb") as out, interruptible(command, real_start, stdout=out, stderr=out) as process:
            try:
                wait_for(lambda: address.exists() or process.poll() is not None, "hoop up", START_S)
                assert address.exists(), log.read_text()
                cluster = Cluster(address.read_text().strip(), process, log)
                yield cluster
            finally:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    raise
        assert not (check_log and cluster.error_lines()), log.read_text(errors="replace")[-20000:]


def wait_for(condition: Callable[[], Result], what: str, deadline_s: float = CALL_S) -> Result:
    """Polls ``condition`` and returns its first true result; for conditions that emit no event."""
    deadline = time.monotonic() + deadline_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what}: nothing within {deadline_s:g} s"
        time.sleep(0.02)
    return result


@contextlib.contextmanager
def channel_to(address: str, **options: int) -> Iterator[grpc.Channel]:
    """A connected channel with a connection of its own."""
    plain = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    plain += [(f"grpc.{name}", value) for name, value in options.items()]
    with grpc.insecure_channel(address, options=plain) as channel:
        ready = grpc.channel_ready_future(channel)
        try:
            ready.result(CALL_S)
        finally:
            ready.cancel()
        yield channel


def check_all_reduce(channel: grpc.Channel, devices: int = 3, count: int = 100) -> None:
    """Asserts that a valid all-reduce of the lab's client is correct on every device."""
    comm = LabClient(channel, devices)
    vectors = np.random.default_rng(count).normal(size=(devices, count))
    addresses = [comm.address(rank, 4096 + 8 * rank) for rank in range(devices)]
    for rank, address in enumerate(addresses):
        comm.write(rank, address, vectors[rank])
    comm.all_reduce(lab.SUM, addresses, count)
    for rank, address in enumerate(addresses):
        np.testing.assert_allclose(comm.read(rank, address, count), vectors.sum(axis=0), rtol=1e-12, atol=1e-12)
    comm.on_all("CommDestroy")


@contextlib.contextmanager
def refused(*codes: str, match: str = "") -> Iterator[list[str]]:
    """Asserts that the call in the block fails with one of these status codes; yields a list for its message."""
    messages: list[str] = []
    with pytest.raises(grpc.RpcError) as caught:
        yield messages
    messages.append(check_refusal(caught.value, *codes, match=match))


def check_refusal(error: Any, *codes: str, match: str = "") -> str:
    """Asserts that an RPC error has one of these codes and a readable message that matches; returns the message."""
    details = error.details() or ""
    assert error.code().name in codes, f"{error.code().name}, not {' or '.join(codes)}: {details}"
    assert re.search(r"\w\W+\w", details), f"{error.code().name} without a sentence: {details!r}"
    assert "Traceback" not in details
    assert re.search(match, details), f"nothing of {match!r} in: {details}"
    return str(details)


def resident_bytes(pid: int) -> int:
    """The resident memory of a process; 0 where it cannot be read."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
