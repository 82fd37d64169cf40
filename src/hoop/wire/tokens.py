"""Tokens: authentication of the processes of one cluster by one text, from which their certificates follow.

    join token ──┬── HMAC "authority" ──▶ key of the cluster's authority ── signs ──▶ certificates of every role
                 ├── HMAC "links" ──────▶ key that authenticates data links
                 └── HMAC "viewer" ─────▶ viewer's token

A process with the join token can take any role. A machine that only runs devices, or clients, gets a token of that role
(``hoop token --role``): the authority's certificate, a certificate of the role with its key, and for devices the link
key. A viewer's token takes no role: programs that speak HTTP send it, scrapers of metrics and users of the dashboard.

RUNTIME/user.token is the token of all processes of one user on this machine (``token_of_user``): with it they prove
their data links, where no token was given.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from hoop.errors import InvalidArgument, NotFound
from hoop.wire.certificates import Authority, Certificates
from hoop.wire.private_files import read_credential
from hoop.wire.roles import Role
from hoop.wire.runtime_folder import opened_runtime_folder

_MIN_CHARACTERS = 32
"""Minimum length of a join token in characters; ``hoop token`` makes one of 256 random bits."""
_MAX_FILE_BYTES = 8192
_ROLE_TOKEN = re.compile(r"hoop-(device|client)\.([\w=-]+)", re.ASCII)
_VIEWER = "viewer"
_USER_FILE = "user.token"


@dataclass(frozen=True, repr=False)
class Token:
    """The secrets of one token. ``repr`` does not show them, so they do not appear in tracebacks."""

    role: Role | None
    """The only role that this process can take; None: a join token, which is for all."""
    secret: str
    """Text of a join token."""
    own: Certificates | None
    """Certificates of a role token."""
    link_key: bytes
    """Key that authenticates data links; empty for a client, which has no data links."""
    viewer_digest: bytes
    """SHA-256 of the viewer's token."""

    def __repr__(self) -> str:
        return f"Token({self.role or 'join'})"

    @classmethod
    def parse(cls, text: str, field: str = "token") -> Token:
        """Parse a join token or a role token; ``field`` is the prefix of the error."""
        text = text.strip()
        if match := _ROLE_TOKEN.fullmatch(text):
            return cls._from_role_token(Role(match[1]), match[2], field)
        if text.startswith(f"hoop-{_VIEWER}-"):
            raise InvalidArgument(f"{field}: a viewer's token is for /metrics and the dashboard's login only")
        if match := re.match(r"hoop-(device|client)-", text):
            raise InvalidArgument(
                f"{field}: a {match[1]}'s token of Hoop 0.2 or before; make it anew from the join token: "
                f"hoop token FILE --role {match[1]} --token-file JOIN_TOKEN_FILE"
            )
        if len(text) < _MIN_CHARACTERS or not text.isascii() or not text.isprintable() or text.startswith("hoop-"):
            raise InvalidArgument(  # does not show the value: it may be a secret with a typing error
                f"{field}: {len(text)} characters that are no token; make one with: hoop token FILE"
            )
        return cls(None, text, None, _derive(text, "links"), _digest(_viewer_token(text)))

    @classmethod
    def _from_role_token(cls, role: Role, text: str, field: str) -> Token:
        try:
            fields = json.loads(base64.urlsafe_b64decode(text))
            pem = [str(fields[name]).encode() for name in ("authority", "certificate", "key")]
            link_key, viewer = bytes.fromhex(fields["links"]), bytes.fromhex(fields[_VIEWER])
        except (binascii.Error, ValueError, KeyError, TypeError):
            raise InvalidArgument(
                f"{field}: a {role}'s token that is damaged; copy it again, all {len(text)} characters or more"
            ) from None
        return cls(role, "", Certificates(pem[0], pem[1], pem[2], link_key), link_key, viewer)

    @classmethod
    def read(cls, path: Path) -> Token:
        """Read a token file; raises InvalidArgument if other users can read or change it."""
        try:
            text = read_credential(path, _MAX_FILE_BYTES)
        except OSError as error:
            raise NotFound(f"token file {path}: {error.strerror}; make one with: hoop token FILE") from None
        return cls.parse(text.decode("ascii", errors="replace"), f"token file {path}")

    def check_role(self, role: Role) -> None:
        """Raise InvalidArgument unless a process with this token can take ``role``."""
        if self.role not in (None, role):
            raise InvalidArgument(
                f"token: it is a {self.role}'s, and a {role} needs the join token"
                + (f", or one of its own: hoop token FILE --role {role}" if role is not Role.COORDINATOR else "")
            )

    def certificates(self, role: Role) -> Certificates:
        """The certificates of a process with this token; those of a join token are made anew each time."""
        self.check_role(role)
        return self.own or Authority(_derive(self.secret, "authority")).certificates(role, self.link_key)

    def is_viewer(self, presented: str) -> bool:
        """Whether this text is the viewer's token. Compares in constant time."""
        return hmac.compare_digest(_digest(presented), self.viewer_digest)

    def is_join(self, presented: str) -> bool:
        """Whether this text is the join token, which only its holders can tell. Compares in constant time."""
        return bool(self.secret) and hmac.compare_digest(_digest(presented), _digest(self.secret))

    def role_token(self, role: str) -> str:
        """The text of a token that is valid for ``role`` only: device, client or viewer."""
        if self.role is not None or role == Role.COORDINATOR:
            raise InvalidArgument(f"--role {role}: the join token makes tokens for the other roles, no other does")
        if role == _VIEWER:
            return _viewer_token(self.secret)
        made = self.certificates(Role(role))
        fields = {name: getattr(made, name).decode() for name in ("authority", "certificate", "key")}
        fields["links"] = self.link_key.hex() if role == Role.DEVICE else ""
        fields[_VIEWER] = self.viewer_digest.hex()
        return f"hoop-{role}.{base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()}"


def new_token() -> str:
    """The text of a random join token."""
    return f"join-{secrets.token_hex(32)}"


def token_of_user() -> Token:
    """The token of all processes of this user on this machine, made by the first that asks; it stays for the next."""
    with opened_runtime_folder(create=True) as opened:
        assert opened is not None, "it was made"
        folder, descriptor = opened
        path, temporary = folder / _USER_FILE, f".{secrets.token_hex(4)}.part"
        if not os.path.lexists(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o600, dir_fd=descriptor), "wb") as file:
                file.write(f"{new_token()}\n".encode())
            try:  # of two processes at once one links its file
                os.link(temporary, _USER_FILE, src_dir_fd=descriptor, dst_dir_fd=descriptor, follow_symlinks=False)
            except FileExistsError:
                pass
            finally:
                os.unlink(temporary, dir_fd=descriptor)
        token = Token.read(path)
    if token.role is not None:
        raise InvalidArgument(f"{path}: it is not the join token that Hoop made; remove it")
    return token


def _derive(secret: str, purpose: str) -> bytes:
    return hmac.digest(secret.encode(), f"hoop v1 {purpose}".encode(), hashlib.sha256)


def _viewer_token(secret: str) -> str:
    return f"hoop-{_VIEWER}-{_derive(secret, _VIEWER).hex()}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
