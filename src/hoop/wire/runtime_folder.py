"""The folder of this user on this machine: the sockets of the user's servers, and a token of the user's processes.

RUNTIME is ``$XDG_RUNTIME_DIR/hoop``, or ``hoop-UID`` in the folder for temporary files. It must be this user's, closed
to all others (mode 700), no link, and in a folder in which no other user can replace it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hoop.errors import FailedPrecondition

_REMEDY = (
    "set XDG_RUNTIME_DIR to a folder of yours, or give --token-file FILE or HOOP_TOKEN_FILE=FILE (hoop token FILE "
    "makes one)"
)
_UNMAPPED = 65534
"""User of files of the machine's root, as a user namespace shows them."""


def runtime_folder() -> Path:
    """The path of the folder, which may not exist yet."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.path.isabs(given):
        with contextlib.suppress(OSError):
            if os.stat(given).st_uid == os.geteuid():
                return Path(given, "hoop")
    return Path(tempfile.gettempdir(), f"hoop-{os.geteuid()}")


@contextmanager
def opened_runtime_folder(create: bool) -> Iterator[tuple[Path, int] | None]:
    """The folder and a descriptor of it; None if it does not exist. Raises if it is not this user's alone."""
    folder = runtime_folder()
    if create:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise FailedPrecondition(f"{folder}: it cannot be made: {error.strerror}; {_REMEDY}") from None
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise FailedPrecondition(
            f"{folder}: not a folder of yours: {error.strerror}; remove it, or {_REMEDY}"
        ) from None
    try:
        _check(folder, os.fstat(descriptor), os.stat(folder.parent))
        yield folder, descriptor
    finally:
        os.close(descriptor)


def _check(folder: Path, status: os.stat_result, parent: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise FailedPrecondition(
            f"{folder}: user {status.st_uid} owns it, and sockets need a folder of yours alone: {_REMEDY}"
        )
    if status.st_mode & 0o077:
        raise FailedPrecondition(
            f"{folder}: others can use it with mode {stat.S_IMODE(status.st_mode):o}, and sockets need a folder of "
            f"yours alone: chmod 700 {folder}, or {_REMEDY}"
        )
    others_write = parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX
    if others_write or parent.st_uid not in (os.geteuid(), 0, _UNMAPPED):
        raise FailedPrecondition(
            f"{folder}: another user can replace it, because {folder.parent} belongs to user {parent.st_uid} with mode "
            f"{stat.S_IMODE(parent.st_mode):o}; {_REMEDY}"
        )
