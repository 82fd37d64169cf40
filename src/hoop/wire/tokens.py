"""Tokens: how processes of one cluster know each other where there are no certificates.

    join token ──┬── HMAC "role coordinator" ──▶ what the coordinator presents
                 ├── HMAC "role device" ───────▶ what a device presents
                 ├── HMAC "role client" ───────▶ what a client presents
                 └── HMAC "links" ─────────────▶ the key with which data links prove themselves

Whoever has the join token can be anyone. A machine that is only to run devices, or clients, gets a token of that role
(``hoop token --role``), from which nothing else follows: it holds its own secret, and of the others' only digests, by
which it recognises them.

A token authenticates and does not encrypt: who can listen on the network can copy it. There, use certificates.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hoop.errors import InvalidArgument, NotFound
from hoop.files import replacing
from hoop.wire.roles import Role

_LEAST = 32
"""Characters of a join token; ``hoop token`` makes them of 256 random bits."""
_MOST_BYTES = 4096
_OF_A_ROLE = re.compile(r"hoop-(device|client)((?:-[0-9a-f]{64})+)")
_VERIFIED = (Role.COORDINATOR, Role.CLIENT)
"""Whom a device has to recognise besides other devices."""


@dataclass(frozen=True, repr=False)
class Token:
    """What a process was given; it is never shown, not even in a traceback."""

    secrets: Mapping[Role, str]
    """What it can present, by role."""
    digests: Mapping[Role, bytes]
    """How it recognises what others present."""
    links: bytes
    """The key of the data links; empty for a client, which has none."""

    def __repr__(self) -> str:
        return f"Token({', '.join(self.secrets)})"

    @classmethod
    def parse(cls, text: str, field: str = "token") -> Token:
        """A join token, or one of a role."""
        text = text.strip()
        if match := _OF_A_ROLE.fullmatch(text):
            role, parts = Role(match[1]), match[2].split("-")[1:]
            if len(parts) == (1 if role is Role.CLIENT else 2 + len(_VERIFIED)):
                return cls._of_a_role(role, parts)
        if len(text) < _LEAST or not text.isascii() or not text.isprintable() or text.startswith("hoop-"):
            raise InvalidArgument(  # without the value: it may be a secret with a typing error
                f"{field}: {len(text)} characters that are no token; make one with: hoop token FILE"
            )
        shown = {role: _derived(text, f"role {role}") for role in Role}
        return cls(
            shown,
            {role: _digest(role, one) for role, one in shown.items()},
            bytes.fromhex(_derived(text, "links")),
        )

    @classmethod
    def _of_a_role(cls, role: Role, parts: list[str]) -> Token:
        digests: dict[Role, bytes] = {}
        if role is Role.DEVICE:
            digests = dict(zip(_VERIFIED, map(bytes.fromhex, parts[1:3]), strict=True))
            digests[role] = _digest(role, parts[0])
        return cls({role: parts[0]}, digests, bytes.fromhex(parts[3]) if role is Role.DEVICE else b"")

    @classmethod
    def read(cls, path: Path) -> Token:
        """From a file that only its owner can read."""
        try:
            with path.open("rb") as file:
                found = os.fstat(file.fileno())
                check_private(path, found)
                text = file.read(_MOST_BYTES)
        except OSError as error:
            raise NotFound(f"token file {path}: {error.strerror}; make one with: hoop token FILE") from None
        return cls.parse(text.decode("ascii", errors="replace"), f"token file {path}")

    @property
    def is_join(self) -> bool:
        """Whether a whole cluster can be run with it."""
        return len(self.secrets) == len(Role)

    def presented(self, role: Role) -> str:
        """What a process in this role says to prove it."""
        if role not in self.secrets:
            (own,) = self.secrets
            raise InvalidArgument(
                f"token: it is a {own}'s, and a {role} needs the join token"
                + (
                    f", or one of its own: hoop token FILE --role {role}"
                    if role is not Role.COORDINATOR
                    else ""
                )
            )
        return _presented(role, self.secrets[role])

    def recognised(self, presented: str) -> Role | None:
        """Whose this is; every comparison takes the same time, whether it fits or not."""
        digest = hashlib.sha256(presented.encode()).digest()
        fits = [role for role, known in self.digests.items() if hmac.compare_digest(digest, known)]
        return fits[0] if fits else None

    def of_role(self, role: Role) -> str:
        """The text of a token with which a process can be this and nothing else."""
        if not self.is_join or role is Role.COORDINATOR:
            raise InvalidArgument(
                f"--role {role}: the join token makes tokens for devices and clients, no other does"
            )
        parts = [self.secrets[role]]
        if role is Role.DEVICE:
            parts += [self.digests[one].hex() for one in _VERIFIED] + [self.links.hex()]
        return "-".join([f"hoop-{role}", *parts])


def new_token() -> str:
    """The text of a join token that nobody can guess."""
    return f"join-{secrets.token_hex(32)}"


def write_private(path: Path, text: str) -> None:
    """A secret in a file of one's own; what is there already stays."""
    if path.exists():
        raise InvalidArgument(f"{path}: it exists; delete it first, or choose another name")
    with replacing(path, 0o600) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(f"{text}\n".encode())


def check_private(path: Path, found: os.stat_result) -> None:
    """Refuses a secret that others can read, or could have written."""
    if not stat.S_ISREG(found.st_mode):
        raise InvalidArgument(f"{path}: not a file")
    if found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
        raise InvalidArgument(
            f"{path}: user {found.st_uid} owns it with mode {stat.S_IMODE(found.st_mode):o}, and others than you can "
            f"read or change it; make it yours alone: chmod 600 {path}"
        )


def _derived(join: str, what: str) -> str:
    return hmac.new(join.encode(), f"hoop v1 {what}".encode(), hashlib.sha256).hexdigest()


def _presented(role: Role, secret: str) -> str:
    return f"hoop-{role}-{secret}"


def _digest(role: Role, secret: str) -> bytes:
    return hashlib.sha256(_presented(role, secret).encode()).digest()
