"""The join token of a coordinator on loopback that was given no credentials: only processes of its user may call it.

    coordinator ── random join token ──▶ RUNTIME/PORT.token ◀── clients and devices of the same user

RUNTIME is ``$XDG_RUNTIME_DIR/hoop``, or ``hoop-UID`` in the folder for temporary files. The folder (mode 700) and the
files (mode 600) must be this user's, and no link is followed. A coordinator with a journal keeps its token with it, so
that devices and clients that live on are accepted by its successor, also at another port.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hoop.errors import FailedPrecondition, HoopError, InvalidArgument
from hoop.topology import Address, Addresses
from hoop.wire.tokens import Token, check_private, new_token

log = logging.getLogger("hoop.wire")
_SUFFIX = ".token"
_MAX_BYTES = 4096
_REMEDY = "set XDG_RUNTIME_DIR to a folder of yours, or give --token-file FILE (hoop token FILE makes one)"


def runtime_folder() -> Path:
    """The folder of this user's tokens, by port. It may not exist yet."""
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.path.isabs(given):
        with contextlib.suppress(OSError):
            if os.stat(given).st_uid == os.geteuid():
                return Path(given, "hoop")
    return Path(tempfile.gettempdir(), f"hoop-{os.geteuid()}")


def journal_token_name(journal: str) -> str:
    """Name in the runtime folder of the token of the coordinators on a journal that is no file of this machine."""
    return f"journal-{hashlib.sha256(journal.encode()).hexdigest()[:32]}{_SUFFIX}"


def find_token(address: Address | Addresses) -> Token | None:
    """The token that this user's coordinator at a loopback address has written; None if there is none."""
    addresses = address.addresses if isinstance(address, Addresses) else (address,)
    if not all(one.is_loopback for one in addresses):
        return None
    folder = runtime_folder()
    with _opened(folder, create=False) as descriptor:
        if descriptor is None:
            return None
        found = (_read(descriptor, folder, _name(one.port)) for one in addresses)
        text = next(filter(None, found), None)
    return None if text is None else _parse(text, folder)


@dataclass
class LocalToken:
    """The token that a coordinator makes for itself. ``publish`` writes its file, ``withdraw`` removes it."""

    text: str = field(default_factory=new_token, repr=False)
    required: bool = True
    """Whether a file that cannot be written is an error. If not, only commands from elsewhere miss it."""
    kept: bool = False
    """Whether a successor on the same journal finds the token without the file of the port."""
    _port: int | None = None

    @property
    def token(self) -> Token:
        return Token.parse(self.text)

    @classmethod
    def obtain(cls, port: int, journal: Path | str | None = None) -> LocalToken:
        """The token of the journal, else of the last coordinator of this user at ``port``, else a random one.

        ``journal``: a file, which keeps its token beside it; or the name of a journal elsewhere, whose coordinators on
        this machine share a token.
        """
        runtime = runtime_folder()
        with _opened(runtime, create=True) as descriptor:
            assert descriptor is not None, "it was made"
            text = (_read(descriptor, runtime, _name(port)) if port else None) or new_token()
            if isinstance(journal, str):
                text = _keep(descriptor, runtime, journal_token_name(journal), text)
        _parse(text, runtime)
        if isinstance(journal, Path):
            name = f"{journal.name}{_SUFFIX}"
            journal.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(journal.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                text = _keep(folder, journal.parent, name, text)
            finally:
                os.close(folder)
            _parse(text, journal.parent / name)
        return cls(text, kept=journal is not None)

    def publish(self, port: int) -> None:
        """Write the token where this user's commands look for it. This process must have the port already."""
        try:
            folder = runtime_folder()
            with _opened(folder, create=True) as descriptor:
                assert descriptor is not None, "it was made"
                temporary = _write_temporary(descriptor, self.text)
                os.replace(temporary, _name(port), src_dir_fd=descriptor, dst_dir_fd=descriptor)
        except (HoopError, OSError) as error:
            if self.required:
                raise
            log.info("other commands do not find the token of this job: %s", error)
            return
        self._port = port

    def withdraw(self) -> None:
        """Remove the file, unless another coordinator has written its own since."""
        port, self._port = self._port, None
        if port is not None:
            _remove(port, self.text)


def forget(port: int) -> None:
    """Remove a token that another coordinator of this user left for ``port``, which this process has now."""
    _remove(port)


def _remove(port: int, only: str | None = None) -> None:
    folder = runtime_folder()
    with contextlib.suppress(HoopError, OSError), _opened(folder, create=False) as descriptor:
        if descriptor is not None and only in (None, _read(descriptor, folder, _name(port))):
            os.unlink(_name(port), dir_fd=descriptor)


def _name(port: int) -> str:
    return f"{port}{_SUFFIX}"


def _parse(text: str, where: Path) -> Token:
    token = Token.parse(text, f"token in {where}")
    if not token.is_join:
        raise InvalidArgument(f"token in {where}: it is not the join token that a coordinator wrote; remove it")
    return token


@contextmanager
def _opened(folder: Path, create: bool) -> Iterator[int | None]:
    """A descriptor of the runtime folder; None if it does not exist. Raises if it is another user's or open to one."""
    if create:
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            pass
        except OSError as error:
            raise FailedPrecondition(
                f"{folder}: no folder for this user's tokens: {error.strerror}; {_REMEDY}"
            ) from None
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
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise FailedPrecondition(
                f"{folder}: user {found.st_uid} owns it with mode {stat.S_IMODE(found.st_mode):o}, and tokens need a "
                f"folder of yours alone: chmod 700 {folder}, or {_REMEDY}"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _read(folder: int, where: Path, name: str) -> str | None:
    """A token's text; None if there is no such file. Raises InvalidArgument if it is not this user's alone."""
    path = where / name
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidArgument(f"{path}: not a token of yours: {error.strerror}; remove it") from None
    with open(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise InvalidArgument(f"{path}: not a regular file; remove it")
        check_private(path, found)
        return file.read(_MAX_BYTES).decode("ascii", errors="replace").strip()


def _keep(folder: int, where: Path, name: str, text: str) -> str:
    """The token in a file, which is made with ``text`` if it does not exist. Of two processes at once both get one."""
    while (found := _read(folder, where, name)) is None:
        temporary = _write_temporary(folder, text)
        try:
            os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            continue
        finally:
            os.unlink(temporary, dir_fd=folder)
        return text
    return found


def _write_temporary(folder: int, text: str) -> str:
    name = f".{os.getpid()}-{secrets.token_hex(4)}.part"
    with open(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(f"{text}\n".encode())
    return name
