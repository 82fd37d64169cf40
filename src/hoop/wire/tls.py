"""TLS files of a process: its certificate, its key, and the cluster's certificate authority.

A certificate names a role, not a host: the common name is the role (``device``), and callers expect the server name
``device.hoop``. The files can therefore be copied to any machine, and a device's certificate is not accepted as the
coordinator's. ``hoop certs`` makes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from hoop.errors import InvalidArgument, NotFound
from hoop.wire.roles import Role
from hoop.wire.tokens import read_credential

AUTHORITY, CERTIFICATE, KEY, LINK_KEY = "ca.pem", "cert.pem", "key.pem", "links.key"
"""File names in a role's folder; only devices have ``links.key``."""
_MAX_FILE_BYTES = 1 << 20


def certificate_name(role: Role) -> str:
    """The server name that a caller expects in the certificate of a server with this role."""
    return f"{role}.hoop"


@dataclass(frozen=True)
class Certificates:
    """The TLS files of one role."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    link_key: bytes = field(default=b"", repr=False)
    """Key that authenticates data links."""

    @classmethod
    def load(cls, folder: Path, role: Role) -> Certificates:
        """Load from a role's folder, or from the output folder of ``hoop certs``, which has one folder a role."""
        folder = folder / role if (folder / role).is_dir() else folder

        def content(name: str) -> bytes:
            try:
                return read_credential(folder / name, _MAX_FILE_BYTES, private=name in (KEY, LINK_KEY))
            except OSError as error:
                raise NotFound(
                    f"--tls {folder}: {name}: {error.strerror}; make a folder a role with: hoop certs DIR"
                ) from None

        link_key = b""
        if role is Role.DEVICE:
            text = content(LINK_KEY).strip()
            if not re.fullmatch(rb"[0-9a-f]{64}", text):
                raise InvalidArgument(f"{folder / LINK_KEY}: not a key; make the certificates again: hoop certs DIR")
            link_key = bytes.fromhex(text.decode())
        return cls(content(AUTHORITY), content(CERTIFICATE), content(KEY), link_key)
