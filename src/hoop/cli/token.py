"""``hoop token``: makes the tokens by which a cluster authenticates callers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hoop.cli import options
from hoop.errors import InvalidArgument

_ROLES = ("join", "device", "client", "viewer")


def token(
    file: Annotated[Path, typer.Argument(help="New file for the token, readable by you alone.")],
    role: Annotated[
        str,
        typer.Option(
            help="join: for every role. Made from the join token: device or client, for that role alone; viewer, for "
            "scrapers of --metrics and the dashboard's login."
        ),
    ] = "join",
    token_file: options.TokenFile = None,
) -> None:
    """Make a token, with which a cluster may listen beyond this machine.

    [bold]hoop token cluster.token[/bold] makes the join token, for the coordinator and for trusted devices and clients.
    [bold]hoop token mine.token --role client --token-file cluster.token[/bold] makes one for a machine that may only be
    a client. A token is written to a file (mode 600) and never printed. Calls are then encrypted, as with
    [bold]hoop certs[/bold].
    """
    from hoop.wire.auth import find_credentials
    from hoop.wire.private_files import write_private
    from hoop.wire.roles import Role
    from hoop.wire.tokens import new_token

    if role not in _ROLES:
        raise InvalidArgument(f"--role: {role!r} is not one of {', '.join(_ROLES)}")
    if role == "join":
        write_private(file, new_token())
        return
    held = find_credentials(Role.COORDINATOR, token_file=token_file).token
    if held is None:
        raise InvalidArgument(f"--role {role}: made from the join token; name it with --token-file or HOOP_TOKEN")
    write_private(file, held.role_token(role))
