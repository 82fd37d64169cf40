"""``hoop drain``: moves the work of a device to others, and makes it leave."""

from __future__ import annotations

import json as json_module
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.cli import options
from hoop.cli.output import echo
from hoop.config import parse_duration
from hoop.topology import Addresses

if TYPE_CHECKING:
    from hoop.client.cluster import DrainProgress

LINE_S = 5.0
"""Seconds between two lines about the same wait."""


def drain(
    device: Annotated[int, typer.Argument(min=1, help="The device's id (hoop status lists them).")],
    coordinator: options.CoordinatorAddress,
    timeout: Annotated[
        str,
        typer.Option(help="How long to wait for a device that takes its place; one that loads a job is waited for."),
    ] = "60s",
    token_file: options.TokenFile = None,
    tls: options.Tls = None,
    json: options.Json = False,
) -> None:
    """Move the work of a device to others, then make the device leave; its process ends with code 0.

    Each of its jobs moves to a device without work, or to one that joins meanwhile ([bold]hoop device --join[/bold]).
    If none is there in time, the job goes on with its other devices. The weights do not change. A job that cannot go on
    without the device keeps it, and the command says so. Ctrl-C cancels: the device keeps its work. If the coordinator
    is restarted meanwhile, the drain goes on.
    """
    from hoop.client.cluster import connect
    from hoop.wire.auth import find_credentials
    from hoop.wire.roles import Role

    address = Addresses.parse(coordinator, "--coordinator")
    seconds = parse_duration(timeout, "--timeout")
    view = _View(quiet=json)
    began = time.monotonic()
    with connect(address, credentials=find_credentials(Role.CLIENT, token_file=token_file, tls=tls)) as cluster:
        try:
            cluster.drain(device, seconds, view.show)
        except (KeyboardInterrupt, SystemExit):
            if view.stage in ("leaving", "left"):
                echo(f"too late to cancel: device {device} has handed over everything, and leaves", err=True)
            else:
                echo(f"the drain is cancelled: device {device} keeps its work", err=True)
            raise
    if json:
        found = {"device": device, "jobs": view.jobs, "seconds": round(time.monotonic() - began, 3)}
        typer.echo(json_module.dumps(found))


class _View:
    """Prints what a drain waits for, when it changes and every few seconds."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self.stage = ""
        self.jobs: list[int] = []
        """The jobs that go on without the device."""
        self._printed: dict[int, tuple[str, float]] = {}
        """Stage and time of the last printed line about each job."""

    def show(self, progress: DrainProgress) -> None:
        if progress.stage != "interrupted":
            self.stage = progress.stage
        if progress.stage == "handed_over":
            self.jobs.append(progress.job)
        now = time.monotonic()
        stage, when = self._printed.get(progress.job, ("", 0.0))
        if self._quiet or (stage == progress.stage and now - when < LINE_S):
            return
        self._printed[progress.job] = progress.stage, now
        echo(progress.text, err=progress.stage != "left")
