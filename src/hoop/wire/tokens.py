"""Tokens: authentication of the processes of one cluster without certificates.

    join token ──┬── HMAC "role coordinator" ──▶ secret of the coordinator ──┐
                 ├── HMAC "role device" ───────▶ secret of devices ──────────┼── HMAC "to ROLE" ──▶ key of the calls
                 ├── HMAC "role client" ───────▶ secret of clients ──────────┘                      to that role
                 └── HMAC "links" ─────────────▶ key that authenticates data links

Calls carry proofs made with these keys (``proofs``), and no secret. A process with the join token can take any role. A
machine that only runs devices, or clients, gets a token of that role (``hoop token --role``). A device's token holds
the secret of devices and the keys of calls to devices: with it a device verifies the coordinator and clients, and can
call the coordinator as a device only. Its link key is the same for all devices.

A token authenticates and does not encrypt: who can read the network reads the calls. Use certificates there.

A coordinator on loopback that was given no credentials makes a join token for the processes of its user alone
(``LocalToken``):

    coordinator ── random join token ──▶ RUNTIME/PORT.token ◀── clients and devices of the same user

RUNTIME is ``$XDG_RUNTIME_DIR/hoop``, or ``hoop-UID`` in the folder for temporary files. The folder (mode 700) and the
files (mode 600) must be this user's, and no link is followed. A coordinator with a journal keeps its token with it, so
that devices and clients that live on are accepted by its successor, also at another port. RUNTIME/ranks.token is no
coordinator's: ranks of ``torch.distributed`` that were given no token prove their links with it (``token_of_user``).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hoop.errors import FailedPrecondition, HoopError, InvalidArgument, NotFound
from hoop.files import atomic_write
from hoop.topology import Address, Addresses
from hoop.wire.roles import Role

log = logging.getLogger("hoop.wire")
_MIN_CHARACTERS = 32
"""Minimum length of a join token in characters; ``hoop token`` makes one of 256 random bits."""
_MAX_FILE_BYTES = 4096
_ROLE_TOKEN = re.compile(r"hoop-(device|client)((?:-[0-9a-f]{64})+)")
_VERIFIED = (Role.COORDINATOR, Role.CLIENT)
"""Roles whose calls a device verifies, besides those of other devices."""
_DEVICE_PARTS = 5
"""Number of parts of a device's token: the secret, a key for each of _VERIFIED, the digest of a client's token, the
link key."""
_DEVICE_PARTS_0_1 = 4
_SUFFIX = ".token"
RUN_VARIABLE = "HOOP_RUN_TOKEN"
"""Environment variable with the token that ``hoop run`` makes for its coordinator and its ranks."""
_REMEDY = (
    "set XDG_RUNTIME_DIR to a folder of yours, or give --token-file FILE or HOOP_TOKEN_FILE=FILE (hoop token FILE "
    "makes one)"
)


@dataclass(frozen=True, repr=False)
class Token:
    """The secrets of one token. ``repr`` does not show them, so they do not appear in tracebacks."""

    secrets: Mapping[Role, str]
    """Secrets by role, for the roles that this process can take."""
    keys: Mapping[Role, bytes]
    """Keys with which a device verifies calls, by the caller's role; only in a device's token."""
    bearer: bytes
    """SHA-256 of a client's token, which programs that do not make proofs send; empty: none is accepted."""
    link_key: bytes
    """Key that authenticates data links; empty for a client, which has no data links."""

    def __repr__(self) -> str:
        return f"Token({', '.join(self.secrets)})"

    @classmethod
    def parse(cls, text: str, field: str = "token") -> Token:
        """Parse a join token or a role token; ``field`` is the prefix of the error."""
        text = text.strip()
        if match := _ROLE_TOKEN.fullmatch(text):
            role, parts = Role(match[1]), match[2].split("-")[1:]
            if len(parts) == (1 if role is Role.CLIENT else _DEVICE_PARTS):
                return cls._from_role_token(role, parts)
            if role is Role.DEVICE and len(parts) == _DEVICE_PARTS_0_1:
                raise InvalidArgument(
                    f"{field}: a device's token of Hoop 0.1; make it anew from the join token: "
                    "hoop token FILE --role device --token-file JOIN_TOKEN_FILE"
                )
        if len(text) < _MIN_CHARACTERS or not text.isascii() or not text.isprintable() or text.startswith("hoop-"):
            raise InvalidArgument(  # does not show the value: it may be a secret with a typing error
                f"{field}: {len(text)} characters that are no token; make one with: hoop token FILE"
            )
        secret_of = {role: _derive(text, f"role {role}") for role in Role}
        bearer = _digest(_client_token(secret_of[Role.CLIENT]))
        return cls(secret_of, {}, bearer, bytes.fromhex(_derive(text, "links")))

    @classmethod
    def _from_role_token(cls, role: Role, parts: list[str]) -> Token:
        if role is Role.CLIENT:
            return cls({role: parts[0]}, {}, b"", b"")
        *keys, bearer, link_key = map(bytes.fromhex, parts[1:])
        return cls({role: parts[0]}, dict(zip(_VERIFIED, keys, strict=True)), bearer, link_key)

    @classmethod
    def read(cls, path: Path) -> Token:
        """Read a token file; raises InvalidArgument if other users can read or change it."""
        try:
            text = read_credential(path, _MAX_FILE_BYTES)
        except OSError as error:
            raise NotFound(f"token file {path}: {error.strerror}; make one with: hoop token FILE") from None
        return cls.parse(text.decode("ascii", errors="replace"), f"token file {path}")

    @property
    def is_join(self) -> bool:
        """Whether this is a join token, which is valid for every role."""
        return len(self.secrets) == len(Role)

    def check_role(self, role: Role) -> None:
        """Raise InvalidArgument unless a process with this token can take ``role``."""
        if role not in self.secrets:
            (own,) = self.secrets
            raise InvalidArgument(
                f"token: it is a {own}'s, and a {role} needs the join token"
                + (f", or one of its own: hoop token FILE --role {role}" if role is not Role.COORDINATOR else "")
            )

    def key(self, caller: Role, server: Role) -> bytes:
        """The key of calls from one role to another, for either side; raises InvalidArgument if this token has none."""
        if server is Role.DEVICE and caller in self.keys:
            return self.keys[caller]
        self.check_role(caller)
        return bytes.fromhex(_derive(self.secrets[caller], f"to {server}"))

    def is_client(self, presented: str) -> bool:
        """Whether this text is the token of a client. Compares in constant time."""
        return bool(self.bearer) and hmac.compare_digest(_digest(presented), self.bearer)

    def role_token(self, role: Role) -> str:
        """The text of a token that is valid for ``role`` only."""
        if not self.is_join or role is Role.COORDINATOR:
            raise InvalidArgument(f"--role {role}: the join token makes tokens for devices and clients, no other does")
        if role is Role.CLIENT:
            return _client_token(self.secrets[role])
        keys = [self.key(caller, Role.DEVICE) for caller in _VERIFIED]
        return "-".join(
            ["hoop-device", self.secrets[role], *(one.hex() for one in (*keys, self.bearer, self.link_key))]
        )


def new_token() -> str:
    """The text of a random join token."""
    return f"join-{secrets.token_hex(32)}"


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


def _derive(secret: str, purpose: str) -> str:
    return hmac.new(secret.encode(), f"hoop v1 {purpose}".encode(), hashlib.sha256).hexdigest()


def _client_token(secret: str) -> str:
    return f"hoop-client-{secret}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


# ---- the token of a coordinator on loopback


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


def token_of_user() -> Token:
    """The token of all processes of this user on this machine, made by the first that asks; it stays for the next."""
    folder = runtime_folder()
    with _opened(folder, create=True) as descriptor:
        assert descriptor is not None, "it was made"
        text = _keep(descriptor, folder, f"ranks{_SUFFIX}", new_token())
    return _parse(text, folder)


@dataclass
class LocalToken:
    """The token that a coordinator makes for itself. ``publish`` writes its file, ``withdraw`` removes it."""

    text: str = field(default_factory=new_token, repr=False)
    required: bool = True
    """Whether it is an error if the file cannot be written. If not, only commands of other terminals miss it."""
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
        if found.st_uid != os.geteuid():
            raise FailedPrecondition(
                f"{folder}: user {found.st_uid} owns it, and tokens need a folder of yours alone: {_REMEDY}"
            )
        if found.st_mode & 0o077:
            raise FailedPrecondition(
                f"{folder}: others can use it with mode {stat.S_IMODE(found.st_mode):o}, and tokens need a folder of "
                f"yours alone: chmod 700 {folder}, or {_REMEDY}"
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
        return file.read(_MAX_FILE_BYTES).decode("ascii", errors="replace").strip()


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
