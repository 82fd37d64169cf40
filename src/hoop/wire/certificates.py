"""Certificates of the roles of a cluster, and the authority that signs them.

A certificate names a role, not a host: the common name is the role (``device``), and callers expect the server name
``device.hoop``. It can therefore be copied to any machine, and a device's is not accepted as the coordinator's.

The authority of a token follows from the token (``tokens``): every process with it signs its own certificate, and
accepts those of all the others. That of ``hoop certs`` is random. Certificates of a token are valid at all times, so
that no clock can keep a cluster from starting; the token is what is replaced.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hoop.errors import InvalidArgument, NotFound
from hoop.wire.private_files import read_credential
from hoop.wire.roles import Role

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

AUTHORITY, CERTIFICATE, KEY, LINK_KEY = "ca.pem", "cert.pem", "key.pem", "links.key"
"""File names in a role's folder; only devices have ``links.key``."""
_MAX_FILE_BYTES = 1 << 20
_P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_ALWAYS = (
    datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC),
    datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC),
)
"""Validity without an end (RFC 5280, 4.1.2.5)."""
_CLOCKS = datetime.timedelta(days=1)
"""By how much the clocks of two machines may differ when a new certificate is used."""
_AUTHORITY_NAME = "hoop authority"


def certificate_name(role: Role) -> str:
    """The server name that a caller expects in the certificate of a server with this role."""
    return f"{role}.hoop"


@dataclass(frozen=True)
class Certificates:
    """The TLS files of one role, in PEM."""

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


class Authority:
    """Signs certificates. Imports ``cryptography``, which takes as long as a tenth of a command's start."""

    def __init__(self, secret: bytes | None = None, days: int | None = None) -> None:
        """``secret``: 32 bytes, from which the key follows; None: it is random. ``days`` None: valid at all times."""
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = (
            ec.generate_private_key(ec.SECP256R1())
            if secret is None
            else ec.derive_private_key(int.from_bytes(secret, "big") % (_P256_ORDER - 1) + 1, ec.SECP256R1())
        )
        self.certificate = self._sign(_AUTHORITY_NAME, self._key, None, days)

    @property
    def key(self) -> bytes:
        """The key in PEM; who has it can sign certificates of every role."""
        return _pem(self._key)

    def certificates(self, role: Role, link_key: bytes = b"", days: int | None = None) -> Certificates:
        """A new key of this role, and its certificate."""
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        return Certificates(self.certificate, self._sign(str(role), key, role, days), _pem(key), link_key)

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, role: Role | None, days: int | None) -> bytes:
        """A certificate of ``key``; ``role`` None: the authority's own."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.x509.oid import ExtendedKeyUsageOID

        ca, public, issuer = role is None, key.public_key(), self._key.public_key()
        now = datetime.datetime.now(datetime.UTC)
        begin, end = _ALWAYS if days is None else (now - _CLOCKS, now + datetime.timedelta(days=days))
        uses = x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)  # signatures; or certificates
        builder = (
            x509.CertificateBuilder(_name(_AUTHORITY_NAME), _name(name), public)
            .serial_number(1 if ca else x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(uses, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        )
        if role is not None:
            both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
            names = x509.SubjectAlternativeName([x509.DNSName(certificate_name(role))])
            builder = builder.add_extension(both, critical=False).add_extension(names, critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    attributes = ((NameOID.ORGANIZATION_NAME, "hoop"), (NameOID.COMMON_NAME, text))
    return x509.Name([x509.NameAttribute(kind, value) for kind, value in attributes])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
