"""The process that ``GpuKeeper`` starts: it holds one file descriptor, and gives it to the device that is restarted.

    python gpu_keeper_process.py SOCKET DESCRIPTOR SECONDS

Standard input is a pipe from the device. A byte there ends this process. Its end without a byte means that the device
was killed: then the first process of this user that connects to ``SOCKET`` within ``SECONDS`` gets the descriptor, and
this process ends. It is run as a script, by its path, and imports nothing of Hoop, so that it needs little memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import sys

_CREDENTIALS = struct.Struct("3i")  # process, user and group of the peer


def keep(path: str, descriptor: int, seconds: float) -> None:
    """Hold the descriptor until the device ends, or a restarted one has it, or ``seconds`` after the device died."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    try:
        os.chmod(path, 0o600)
        listener.listen(1)
        os.write(1, b"\n")  # the device goes on when it reads this
        if os.read(0, 1):
            return  # the device has ended in order
        while select.select([listener], [], [], seconds)[0]:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                _, user, _ = _CREDENTIALS.unpack(
                    peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                )
                if user == os.getuid():
                    socket.send_fds(peer, [b"\n"], [descriptor])
                    return
    finally:
        os.unlink(path)


if __name__ == "__main__":
    keep(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
