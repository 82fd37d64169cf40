"""``hoop token``: what the processes of one cluster know each other by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hoop.cli import options
from hoop.errors import InvalidArgument

_ROLES = ("join", "device", "client")


def token(
    file: Annotated[Path, typer.Argument(help="Where to write it; a new file, for your eyes only.")],
    role: Annotated[
        str,
        typer.Option(
            help="join: for everything; device or client: good for that alone, made from the join token."
        ),
    ] = "join",
    token_file: options.TokenFile = None,
) -> None:
    """Make a token, with which a cluster may listen beyond this machine.

    [bold]hoop token cluster.token[/bold] makes the join token: give it to the coordinator, and to devices and clients
    that may be anything. [bold]hoop token mine.token --role client --token-file cluster.token[/bold] makes one for a
    machine that is to be a client and nothing else. It is written to a file (mode 600) and never printed. A token does
    not encrypt: where others can listen on the network use [bold]hoop certs[/bold].
    """
    from hoop.wire.auth import find
    from hoop.wire.roles import Role
    from hoop.wire.tokens import new_token, write_private

    if role not in _ROLES:
        raise InvalidArgument(f"--role: {role!r} is not one of {', '.join(_ROLES)}")
    if role == "join":
        write_private(file, new_token())
        return
    held = find(Role.COORDINATOR, token_file=token_file).token
    if held is None:
        raise InvalidArgument(
            f"--role {role}: made from the join token; name it with --token-file or HOOP_TOKEN"
        )
    write_private(file, held.of_role(Role(role)))
