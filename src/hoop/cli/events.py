"""``hoop events``: the events of a coordinator."""

from __future__ import annotations

import json as json_module
import sys
import time
from typing import Annotated

import typer

from hoop.cli import options
from hoop.cli.output import echo
from hoop.standard_streams import lost


def events(
    coordinator: options.CoordinatorAddress,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep on until Ctrl-C.")] = False,
    after: Annotated[int, typer.Option(metavar="N", min=0, help="Only events numbered higher than this.")] = 0,
    token_file: options.TokenFile = None,
    tls: options.Tls = None,
    json: options.Json = False,
) -> None:
    """Show a coordinator's events: devices that join, fall silent, die; communicators; failures."""
    import hoop
    from hoop.wire.auth import find_credentials
    from hoop.wire.roles import Role

    credentials = find_credentials(Role.CLIENT, token_file=token_file, tls=tls)
    with hoop.connect(coordinator, credentials=credentials) as cluster:
        for event in cluster.events(after, follow):
            if lost(sys.stdout):  # its reader has left
                break
            if json:
                plain = {"sequence": event.sequence, "time": event.time, "kind": event.kind, "text": event.text}
                typer.echo(json_module.dumps({**plain, "fields": dict(event.fields)}))
            else:
                clock = time.strftime("%H:%M:%S", time.localtime(event.time))
                echo(f"{event.sequence:>5} {clock} {event.kind:<22} {event.text}")
