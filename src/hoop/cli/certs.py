"""``hoop certs``: makes a certificate authority, and one certificate a role, with the openssl command.

A library would be Hoop's largest dependency, for a command that runs once on one machine.
"""

from __future__ import annotations

import secrets
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from hoop.errors import FailedPrecondition, InvalidArgument

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
_AUTHORITY_DAYS = 3650
_WAIT_S = 60.0


def certs(
    folder: Annotated[Path, typer.Argument(help="A new folder for the authority and a folder a role.")],
    days: Annotated[
        int, typer.Option(metavar="N", min=1, max=_AUTHORITY_DAYS, help="How long certificates are good for.")
    ] = 825,
) -> None:
    """Make a certificate authority, and certificates for the coordinator, devices and clients.

    Copy FOLDER/coordinator, FOLDER/device and FOLDER/client to the machines of that role, and name the folder with
    [bold]--tls[/bold]; on one machine --tls FOLDER is enough. Calls are then encrypted, and a caller without a
    certificate is refused. FOLDER/ca.key signs further certificates: keep it private. Needs the openssl command.
    """
    from hoop.wire.auth import AUTHORITY, LINK_KEY
    from hoop.wire.roles import Role
    from hoop.wire.tokens import write_private

    if folder.exists():
        raise InvalidArgument(f"{folder}: it exists; name a new folder")
    folder.mkdir(parents=True, mode=0o700)
    _openssl(
        "req", "-x509", *_CURVE, "-keyout", folder / "ca.key", "-out", folder / AUTHORITY,
        "-days", _AUTHORITY_DAYS, "-subj", "/O=hoop/CN=hoop authority",
    )  # fmt: skip
    links = secrets.token_hex(32)
    for role in Role:
        _sign(folder, role, days)
        (folder / role / AUTHORITY).write_bytes((folder / AUTHORITY).read_bytes())
        if role is Role.DEVICE:
            write_private(folder / role / LINK_KEY, links)
    typer.echo(f"{folder}: coordinator, device and client, good for {days} days; use them with --tls {folder}")


def _sign(folder: Path, role: str, days: int) -> None:
    """Makes a key and a certificate for a role."""
    from hoop.wire.auth import CERTIFICATE, KEY, certificate_name
    from hoop.wire.roles import Role

    place = folder / role
    place.mkdir(mode=0o700)
    with tempfile.TemporaryDirectory(prefix="hoop-") as scratch:
        request, extensions = Path(scratch, "request"), Path(scratch, "extensions")
        extensions.write_text(
            f"subjectAltName=DNS:{certificate_name(Role(role))}\nextendedKeyUsage=serverAuth,clientAuth\n"
            "basicConstraints=critical,CA:FALSE\nkeyUsage=critical,digitalSignature\n"
        )
        _openssl("req", "-new", *_CURVE, "-keyout", place / KEY, "-out", request, "-subj", f"/O=hoop/CN={role}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key",
            "-set_serial", f"0x{secrets.token_hex(16)}", "-days", days, "-sha256",
            "-extfile", extensions, "-out", place / CERTIFICATE,
        )  # fmt: skip


def _openssl(*arguments: object) -> None:
    """Runs openssl with a umask of 077: only this user can read the files."""
    try:
        done = subprocess.run(
            ["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=_WAIT_S, umask=0o077, check=False
        )
    except FileNotFoundError:
        raise FailedPrecondition("hoop certs: the openssl command is not here; install it, or use a token") from None
    if done.returncode:
        raise FailedPrecondition(f"openssl {arguments[0]}: {done.stderr.strip()[-500:]}")
