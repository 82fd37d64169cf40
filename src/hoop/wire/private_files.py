"""Files and variables that hold secrets: who may read them, and how they are read and written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hoop.errors import InvalidArgument
from hoop.files import atomic_write


def write_private(path: Path, text: str) -> None:
    """Write a secret to a new file with mode 0600; raises InvalidArgument if the file exists."""
    if path.exists():
        raise InvalidArgument(f"{path}: it exists; delete it first, or choose another name")
    with atomic_write(path, 0o600) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(f"{text}\n".encode())


def environment_value(name: str) -> str | None:
    """A variable that authenticates this process, or None; InvalidArgument if it is set to nothing.

    A script whose secret is missing sets it to nothing, and must not start a cluster that is open to everybody.
    """
    text = os.environ.get(name)
    if text is not None and not text.strip():
        raise InvalidArgument(f"{name}: it is set, and empty; give it a value, or unset it to use no authentication")
    return text


def read_credential(path: Path, max_bytes: int, private: bool = True) -> bytes:
    """The first ``max_bytes`` of a file; if ``private``, other users must not be able to read or change it.

    Only a regular file is read: a named pipe could keep this process waiting.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"{path}: not a regular file; keep a token or certificate in one")
        if private:
            check_private(path, found)
        return file.read(max_bytes)


def check_private(path: Path, found: os.stat_result) -> None:
    """Raise InvalidArgument if other users can read or change the file of a secret."""
    if found.st_uid not in (os.geteuid(), 0):
        raise InvalidArgument(
            f"{path}: it belongs to user {found.st_uid}, who can change it; name a file of yours, or copy it to one: "
            f"install -m 600 {path} COPY"
        )
    if found.st_mode & 0o077:
        raise InvalidArgument(
            f"{path}: others than you can read or change it, with mode {stat.S_IMODE(found.st_mode):o}; make it "
            f"yours alone: chmod 600 {path}"
        )
