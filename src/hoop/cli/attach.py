"""``hoop attach``: follow a job that runs on a cluster, or has ended there."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from hoop import job_events as ev
from hoop.cli import options
from hoop.topology import Address, Addresses


def attach(
    coordinator: options.CoordinatorAddress,
    job: Annotated[
        int | None, typer.Argument(min=1, help="Which job (hoop status lists them).", show_default="the one that runs")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write what hoop train --out would: metrics, checkpoints, plots, result.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="Ask the job to stop after a step.")] = False,
    token_file: options.TokenFile = None,
    tls: options.Tls = None,
    json: options.Json = False,
) -> None:
    """Follow a job that was started elsewhere, from its beginning to its result.

    The command that started it may have been closed, killed, or detached ([bold]hoop train --detach[/bold]). Ctrl-C
    ends only this command, not the job. Come back as often as you like, also after the job has ended, as long as its
    devices are there.
    """
    from hoop.cli.training_view import check_kept, find_view, show_result
    from hoop.runs import job_follower
    from hoop.wire.auth import find_credentials
    from hoop.wire.roles import Role

    address = Addresses.parse(coordinator, "--coordinator")
    credentials = find_credentials(Role.CLIENT, token_file=token_file, tls=tls)
    view = find_view(json)
    result: dict[str, Any] = {}
    number = 0
    events = job_follower.attach(address, job, out, stop, credentials)
    try:
        with view:
            view.say(f"asking {address} …")
            for observed in events:
                match observed.event:
                    case ev.Attached() as event:
                        number = event.job
                        view.say(f"job {number}, {event.name}: {event.status}")
                    case ev.Finished() as event:
                        result = event.result
                view.show(observed.event)
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM, the terminal was closed
        if number:
            again = attach_command(number, address, token_file, tls)
            typer.echo(f"job {number} goes on; come back with: {again}", err=True)
        raise
    finally:
        events.close()  # type: ignore[attr-defined]
    show_result({"job_id": number, **result}, out, json)
    check_kept(result, out)


def attach_command(job: int, address: Address | Addresses, token_file: Path | None, tls: Path | None) -> str:
    """The command line that attaches to this job, with the same credentials."""
    words = ["hoop", "attach", str(job), "-c", str(address)]
    if token_file is not None:
        words += ["--token-file", str(token_file)]
    if tls is not None:
        words += ["--tls", str(tls)]
    return shlex.join(words)
