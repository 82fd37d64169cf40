"""Tokens: what their texts hold, which are refused, and which certificates follow from them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec

from hoop.cli.commands import command_line
from hoop.errors import InvalidArgument
from hoop.wire.certificates import Authority, Certificates
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

TEXT = new_token()
JOIN = Token.parse(TEXT)


def issued(certificates: Certificates) -> x509.Certificate:
    """The certificate, which its authority has signed."""
    authority = x509.load_pem_x509_certificate(certificates.authority)
    found = x509.load_pem_x509_certificate(certificates.certificate)
    found.verify_directly_issued_by(authority)
    return found


def names(certificate: x509.Certificate) -> list[str]:
    alternative = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    common = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return [str(common[0].value), *alternative.get_values_for_type(x509.DNSName)]


@pytest.mark.parametrize("role", Role)
def test_every_process_with_the_join_token_signs_for_one_authority(role: Role) -> None:
    first, second = (Token.parse(TEXT).certificates(role) for _ in range(2))
    assert first.key != second.key
    assert issued(first).issuer == issued(second).issuer
    crossed = x509.load_pem_x509_certificate(second.certificate)
    crossed.verify_directly_issued_by(x509.load_pem_x509_certificate(first.authority))
    assert names(crossed) == [role, f"{role}.hoop"]


def test_another_token_is_another_authority() -> None:
    other = Token.parse(new_token()).certificates(Role.CLIENT)
    with pytest.raises(InvalidSignature):
        issued(Certificates(JOIN.certificates(Role.CLIENT).authority, other.certificate, other.key))


def test_a_role_s_certificate_cannot_sign() -> None:
    found = issued(JOIN.certificates(Role.DEVICE))
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not found.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32, b"\x7f" * 32])
def test_a_key_follows_from_every_secret(secret: bytes) -> None:
    keys = {Authority(secret).key for _ in range(2)}
    assert len(keys) == 1
    assert isinstance(Authority(secret)._key, ec.EllipticCurvePrivateKey)


def test_a_role_token_holds_its_role_and_no_other() -> None:
    for role in (Role.DEVICE, Role.CLIENT):
        text = JOIN.role_token(role)
        assert text.isascii()
        assert text.isprintable()
        assert " " not in text
        token = Token.parse(text)
        assert names(issued(token.certificates(role))) == [role, f"{role}.hoop"]
        assert token.link_key == (JOIN.link_key if role is Role.DEVICE else b"")
        assert token.is_viewer(JOIN.role_token("viewer"))
        held = base64.urlsafe_b64decode(text.partition(".")[2]).decode()
        assert TEXT not in held
        assert Authority(b"x" * 32).key.decode() not in held
        for other in set(Role) - {role}:
            with pytest.raises(InvalidArgument, match=f"it is a {role}'s"):
                token.certificates(other)
        for wanted in (*Role, "viewer"):
            with pytest.raises(InvalidArgument, match=r"--role .*: the join token makes"):
                token.role_token(wanted)
    with pytest.raises(InvalidArgument, match="--role coordinator"):
        JOIN.role_token(Role.COORDINATOR)


REFUSED = {
    "hoop-client-" + "ab" * 32: "a client's token of Hoop 0.2 or before.*hoop token FILE --role client",
    "hoop-device" + ("-" + "ab" * 32) * 5: "a device's token of Hoop 0.2 or before.*hoop token FILE --role device",
    "hoop-device-" + "ab" * 32: "a device's token of Hoop 0.2 or before",
    JOIN.role_token(Role.DEVICE)[:-9]: "a device's token that is damaged",
    "hoop-client." + base64.urlsafe_b64encode(json.dumps([1]).encode()).decode(): "that is damaged",
    "hoop-client.e30=": "that is damaged",
    JOIN.role_token("viewer"): "a viewer's token is for /metrics and the dashboard's login only",
    "hoop-coordinator-" + "ab" * 32: "characters that are no token",
    "short": "5 characters that are no token",
    "a" * 31: "31 characters that are no token",
    "ä" * 40: "characters that are no token",
    "a\tb" * 20: "characters that are no token",
}


@pytest.mark.parametrize("text", REFUSED, ids=map(str, range(len(REFUSED))))
def test_other_texts_are_refused_and_not_shown(text: str) -> None:
    with pytest.raises(InvalidArgument, match=rf"^field: .*{REFUSED[text]}") as refused:
        Token.parse(text, "field")
    assert text not in str(refused.value)


def test_secrets_are_not_shown() -> None:
    certificates = JOIN.certificates(Role.DEVICE)
    assert repr(JOIN) == "Token(join)"
    assert repr(Token.parse(JOIN.role_token(Role.DEVICE))) == "Token(device)"
    assert certificates.key.decode() not in repr(certificates)


def test_the_viewer_s_and_the_join_token_are_recognised() -> None:
    viewer = JOIN.role_token("viewer")
    assert JOIN.is_viewer(viewer)
    assert not any(JOIN.is_viewer(text) for text in ("", TEXT, viewer[:-1], JOIN.role_token(Role.CLIENT)))
    assert JOIN.is_join(TEXT)
    assert not any(JOIN.is_join(text) for text in ("", viewer, new_token()))
    assert not Token.parse(JOIN.role_token(Role.CLIENT)).is_join("")


def test_hoop_certs_makes_a_folder_a_role(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    command_line()(["certs", str(folder), "--days", "7"], standalone_mode=False)
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / "device")} == {0o700}
    for role in Role:
        found = issued(Certificates.load(folder, role))
        assert names(found) == [role, f"{role}.hoop"]
        assert 7 <= (found.not_valid_after_utc - found.not_valid_before_utc).days <= 8
        assert (folder / role / "key.pem").stat().st_mode & 0o777 == 0o600
    assert (folder / "ca.key").stat().st_mode & 0o777 == 0o600
    assert len(Certificates.load(folder, Role.DEVICE).link_key) == 32
    with pytest.raises(InvalidArgument, match="it exists"):
        command_line()(["certs", str(folder)], standalone_mode=False)
