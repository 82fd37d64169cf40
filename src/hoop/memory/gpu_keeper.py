"""GPU memory that outlives the process that has allocated it: another process holds its file descriptor.

    device      allocate_described ── GpuKeeper(descriptor) ── trains ──────────── SIGKILL
    keeper                            holds the descriptor ── the pipe from the device ends ── waits for KEEP_S
    restarted   take_descriptor(path) ── map_described: the same bytes ── copies them, and lets go

The keeper is a process of some megabytes which does not use CUDA (``gpu_keeper_process.py``). It is in a session of its
own, so a signal to the device's process group does not reach it. If it is killed too, the memory is gone. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from hoop.errors import FailedPrecondition

KEEP_S = 120.0
"""Seconds that memory is kept for a device that was killed, to be restarted."""
START_S = 30.0
TAKE_S = 10.0
_PROGRAM = Path(__file__).with_name("gpu_keeper_process.py")
_CREDENTIALS = struct.Struct("3i")


def can_keep() -> bool:
    """Whether this system has what a keeper needs, and the user has not switched it off (``HOOP_GPU_KEEPER=0``)."""
    return sys.platform == "linux" and os.environ.get("HOOP_GPU_KEEPER", "") != "0"


class GpuKeeper:
    """Keeps the memory behind a descriptor alive if this process is killed."""

    def __init__(self, descriptor: int, keep_s: float = KEEP_S) -> None:
        """The caller may close its descriptor afterwards. Raises FailedPrecondition if no process can be started."""
        self.path = str(Path(tempfile.gettempdir()) / f"hoop-gpu-{os.getuid()}-{secrets.token_hex(8)}.sock")
        """Where a restarted device gets the descriptor."""
        os.set_inheritable(descriptor, True)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_PROGRAM), self.path, str(descriptor), str(keep_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[descriptor],
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            raise FailedPrecondition(f"GPU memory: its keeper cannot be started: {error}") from None
        assert self._process.stdout is not None, "it is a pipe"
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        if not ready or not self._process.stdout.read(1):
            self.close()
            raise FailedPrecondition(f"GPU memory: its keeper does not answer at {self.path}")

    def close(self) -> None:
        """End the keeper: the device has ended in order, and its memory need not be kept."""
        process = self._process
        assert process.stdin is not None, "it is a pipe"
        assert process.stdout is not None, "it is a pipe"
        with contextlib.suppress(OSError):  # the keeper was killed
            if not process.stdin.closed:
                process.stdin.write(b"\n")
                process.stdin.close()
        process.stdout.close()
        try:
            process.wait(TAKE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def take_descriptor(path: str) -> int | None:
    """The descriptor that a keeper holds at ``path``; None if there is none any more. The caller closes it."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as peer:
        peer.settimeout(TAKE_S)
        try:
            peer.connect(path)
            _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            if user != os.getuid():
                return None
            _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
        except OSError:
            return None
    return descriptors[0] if descriptors else None
