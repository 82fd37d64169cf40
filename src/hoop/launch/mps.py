"""CUDA MPS for the devices of one machine: processes that share a GPU compute at the same time, not in turns.

Without MPS a GPU switches between processes, and each waits while another one computes: 4 devices on one GPU then take
5 to 8 times as long for a small step (``benchmarks/gpu``). ``shared_gpus`` runs the daemon of the driver for as long as
the devices that inherit its environment live. A daemon that the user has started is used as it is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hoop.signals import dying_with_parent
from hoop.texts import counted

CONTROL = "nvidia-cuda-mps-control"
PIPE_DIRECTORY, LOG_DIRECTORY = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_DEFAULT_PIPE = Path("/tmp/nvidia-mps/control")  # noqa: S108 - where the driver's own tools look
START_S = 10.0
_POLL_S = 0.02


def count_gpus(folder: str = "/dev") -> int:
    """GPUs that processes of this machine may use. Does not initialise CUDA, which would not survive a fork."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path(folder).glob("nvidia[0-9]*")))
    return present if visible is None else min(present, len([one for one in visible.split(",") if one.strip()]))


@contextlib.contextmanager
def shared_gpus(devices: int) -> Iterator[str]:
    """Run MPS while ``devices`` processes share fewer GPUs; yields a warning for the user, or an empty text."""
    gpus = count_gpus()
    if not 0 < gpus < devices or PIPE_DIRECTORY in os.environ or _DEFAULT_PIPE.exists():
        yield ""
        return
    control = shutil.which(CONTROL)
    if control is None:
        yield (
            f"{counted(devices, 'device')} share {counted(gpus, 'GPU')}, and {CONTROL} is not installed: they take "
            f"turns, so a small step takes several times as long; install it, or use --devices {gpus}"
        )
        return
    with tempfile.TemporaryDirectory(prefix="hoop-mps-") as folder, _environment(folder):
        daemon = subprocess.Popen(
            dying_with_parent([control, "-f"], signal.SIGTERM),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield _wait_until_ready(control, daemon)
        finally:
            _end(control, daemon)


@contextlib.contextmanager
def _environment(folder: str) -> Iterator[None]:
    os.environ[PIPE_DIRECTORY] = os.environ[LOG_DIRECTORY] = folder
    try:
        yield
    finally:
        for name in (PIPE_DIRECTORY, LOG_DIRECTORY):
            os.environ.pop(name, None)


def _wait_until_ready(control: str, daemon: subprocess.Popen[bytes]) -> str:
    """Wait until the daemon answers; returns a warning if it does not."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and daemon.poll() is None:
        if _ask(control, "get_server_list"):
            return ""
        time.sleep(_POLL_S)
    return f"{CONTROL} did not start: devices that share a GPU take turns, so a small step takes several times as long"


def _ask(control: str, command: str) -> bool:
    """Send a command to the daemon; whether it answered."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run([control], input=f"{command}\n".encode(), capture_output=True, timeout=START_S)
        return done.returncode == 0
    return False


def _end(control: str, daemon: subprocess.Popen[bytes]) -> None:
    _ask(control, "quit")
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(START_S)
        return
    daemon.kill()
    daemon.wait()
