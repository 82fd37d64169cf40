"""Certificates: a process's own, its key, and the authority that all of the cluster trust.

A certificate says what its holder is, not where: its name is its role (``device``, and ``device.hoop`` for whoever
calls it), so it can be copied to any machine, and a device's does not pass for the coordinator's. ``hoop certs`` makes
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from hoop.errors import InvalidArgument, NotFound
from hoop.wire.roles import Role
from hoop.wire.tokens import check_private

AUTHORITY, CERTIFICATE, KEY, LINKS = "ca.pem", "cert.pem", "key.pem", "links.key"
"""The files in a role's folder; ``links.key`` is for devices only."""


def name_of(role: Role) -> str:
    """What a caller expects to find in the certificate of whom it calls."""
    return f"{role}.hoop"


@dataclass(frozen=True)
class Certificates:
    """What a process needs to speak TLS in its role."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    links: bytes = field(default=b"", repr=False)
    """The key with which data links prove themselves."""

    @classmethod
    def load(cls, folder: Path, role: Role) -> Certificates:
        """From a role's folder, or from what ``hoop certs`` made, where each role has one."""
        folder = folder / role if (folder / role).is_dir() else folder

        def content(name: str) -> bytes:
            path = folder / name
            try:
                if name in (KEY, LINKS):
                    check_private(path, path.stat())
                return path.read_bytes()
            except OSError as error:
                raise NotFound(
                    f"--tls {folder}: {name}: {error.strerror}; make a folder a role with: hoop certs DIR"
                ) from None

        links = b""
        if role is Role.DEVICE:
            text = content(LINKS).strip()
            if not re.fullmatch(rb"[0-9a-f]{64}", text):
                raise InvalidArgument(
                    f"{folder / LINKS}: not a key; make the certificates again: hoop certs DIR"
                )
            links = bytes.fromhex(text.decode())
        return cls(content(AUTHORITY), content(CERTIFICATE), content(KEY), links)
