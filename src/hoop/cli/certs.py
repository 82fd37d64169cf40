"""``hoop certs``: makes a certificate authority, and one certificate a role."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated

import typer

from hoop.errors import InvalidArgument

_AUTHORITY_DAYS = 3650


def certs(
    folder: Annotated[Path, typer.Argument(help="A new folder for the authority and a folder a role.")],
    days: Annotated[
        int, typer.Option(metavar="N", min=1, max=_AUTHORITY_DAYS, help="How long certificates are good for.")
    ] = 825,
) -> None:
    """Make a certificate authority, and certificates for the coordinator, devices and clients.

    Copy FOLDER/coordinator, FOLDER/device and FOLDER/client to the machines of that role, and name the folder with
    [bold]--tls[/bold]; on one machine --tls FOLDER is enough. Calls are encrypted, and a caller without a certificate
    is refused, as with a token; unlike a token's, these certificates end, and other programs can use them.
    FOLDER/ca.key signs further certificates: keep it private.
    """
    from hoop.wire.certificates import AUTHORITY, CERTIFICATE, KEY, LINK_KEY, Authority
    from hoop.wire.private_files import write_private
    from hoop.wire.roles import Role

    if folder.exists():
        raise InvalidArgument(f"{folder}: it exists; name a new folder")
    folder.mkdir(parents=True, mode=0o700)
    authority, links = Authority(days=_AUTHORITY_DAYS), secrets.token_hex(32)
    write_private(folder / "ca.key", authority.key.decode())
    (folder / AUTHORITY).write_bytes(authority.certificate)
    for role in Role:
        place, made = folder / role, authority.certificates(role, days=days)
        place.mkdir(mode=0o700)
        (place / AUTHORITY).write_bytes(made.authority)
        (place / CERTIFICATE).write_bytes(made.certificate)
        write_private(place / KEY, made.key.decode())
        if role is Role.DEVICE:
            write_private(place / LINK_KEY, links)
    typer.echo(f"{folder}: coordinator, device and client, good for {days} days; use them with --tls {folder}")
