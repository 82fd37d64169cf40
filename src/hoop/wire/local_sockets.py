"""Unix sockets at which the processes of one user on one machine call each other, without set-up and without secrets.

    server ── binds RUNTIME/.RANDOM, and renames it when it has the TCP port ──▶ RUNTIME/PORT.sock ◀── callers

RUNTIME (``runtime_folder``) belongs to this user, and no other user but root may open it. So the kernel proves both
ends: another user can neither connect to a socket in it nor put one there. (gRPC for Python does not show the user of a
peer, SO_PEERCRED; the folder's mode needs no more than that.) The name of a server is its TCP port, which it has too.
A killed server leaves its name. It then leads nowhere, not to the TCP port, so that a process that takes that port gets
no call. The next server of this user at the port replaces it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from hoop.errors import FailedPrecondition, HoopError
from hoop.topology import Address, Addresses
from hoop.wire.runtime_folder import opened_runtime_folder, runtime_folder

_MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""Maximum length of a socket's path."""
_LONGEST_NAME = "65535.sock"
_ANSWER_S = 5.0
"""Seconds for which a server's socket may be too busy to accept a connection."""


def socket_target(port: int) -> str:
    """The gRPC target of this user's server with this port."""
    return _target(socket_path(port))


def socket_path(port: int) -> Path:
    return runtime_folder() / f"{port}.sock"


def _target(path: Path) -> str:
    return f"unix:{quote(str(path))}"


def has_socket(address: Address | Addresses) -> bool:
    """Whether a server of this user has, or has left, a socket for one of these addresses, all of them loopback."""
    with opened_runtime_folder(create=False) as opened:
        return (
            opened is not None
            and all(endpoint.is_loopback for endpoint in address.addresses)
            and any(os.path.lexists(opened[0] / f"{endpoint.port}.sock") for endpoint in address.addresses)
        )


def remove_stale(ports: Iterable[int]) -> None:
    """Removes what killed servers of this user have left for these ports; a socket that is in use stays."""
    for port in ports:
        with contextlib.suppress(HoopError, OSError):
            if not _in_use(path := socket_path(port)):
                path.unlink(missing_ok=True)


def _in_use(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_ANSWER_S)
        try:
            sock.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # too busy, or not a socket, which a rename replaces
            return path.is_socket()
    return True


class LocalSocket:
    """The socket of one server: gRPC binds ``target``, ``publish`` gives it its name, ``withdraw`` removes that."""

    def __init__(self) -> None:
        """Makes the runtime folder; raises FailedPrecondition if this user cannot have one."""
        with opened_runtime_folder(create=True):
            folder = runtime_folder()
        if len(os.fsencode(folder / _LONGEST_NAME)) > _MAX_PATH_BYTES:
            raise FailedPrecondition(
                f"{folder}: too long for the path of a socket, which has at most {_MAX_PATH_BYTES} bytes; set "
                "XDG_RUNTIME_DIR to a folder of yours with a shorter name"
            )
        self._bound = folder / f".{secrets.token_hex(4)}"
        self._inode = 0
        self._path = self._bound

    @property
    def target(self) -> str:
        return _target(self._bound)

    def publish(self, port: int) -> None:
        """Lets callers find the socket; raises FailedPrecondition if another live server has this name.

        This process has the TCP port already, so that one is in another network namespace.
        """
        path = socket_path(port)
        if _in_use(path):
            self._bound.unlink()
            raise FailedPrecondition(
                f"{path}: another process of yours answers there; choose another port, or set XDG_RUNTIME_DIR to "
                "another folder for one of them"
            )
        os.chmod(self._bound, 0o600)
        self._inode = self._bound.stat().st_ino
        os.rename(self._bound, path)
        self._path = path

    def withdraw(self) -> None:
        """Removes the name, unless another server has it by now."""
        with contextlib.suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
