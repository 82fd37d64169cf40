"""``hoop doctor``: checks this machine, or a cluster, and says what to do about each problem."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.cli import options
from hoop.cli.output import plain
from hoop.config import parse_size
from hoop.errors import InvalidArgument
from hoop.topology import Addresses, PortRange

if TYPE_CHECKING:
    from hoop.runs.doctor import Examination

_COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    coordinator: Annotated[
        str | None,
        typer.Option(
            "--coordinator", "-c", help="Check the cluster at host:port: its devices, their hosts, and the way to them."
        ),
    ] = None,
    job: Annotated[
        str | None, typer.Option(help="Also load this job's code and data: a recipe, file.py:name or module:name.")
    ] = None,
    devices: Annotated[int, typer.Option(metavar="N", min=1, help="How many devices are to run here.")] = 4,
    memory: options.Memory = "256MiB",
    host: options.Host = "127.0.0.1",
    interface: options.Interface = None,
    port: options.Ports = "0",
    data_port: options.DataPorts = "0",
    jobs: options.Jobs = None,
    token_file: options.TokenFile = None,
    tls: options.Tls = None,
    json: options.Json = False,
) -> None:
    """Check what a training needs, and say what to do about each problem.

    On this machine: versions, memory, /dev/shm, ports, open files, the processor, GPUs, the native core, and with --job
    a job's code and data. With --coordinator the same on every host of a cluster, and between them: connections,
    versions, types of processors, clocks, data. Ends with code 1 if there is a problem, with 0 if there are only
    warnings.
    """
    if coordinator is not None:
        found = _examine_cluster(coordinator, job, token_file, tls, json)
    else:
        from hoop.runs.doctor import MachineOptions, examine_machine

        if token_file is not None or tls is not None:
            raise InvalidArgument("--token-file, --tls: for a cluster, with --coordinator")
        machine = MachineOptions(
            devices,
            parse_size(memory, "--memory"),
            options.listening_host(host, interface),
            PortRange.parse(port, "--port"),
            PortRange.parse(data_port, "--data-port"),
            job or "",
            jobs,
        )
        found = examine_machine(machine, _say(json))
    if json:
        typer.echo(found.to_json())
    else:
        _print(found)
    if found.problems:
        raise typer.Exit(1)


def _examine_cluster(
    coordinator: str, job: str | None, token_file: Path | None, tls: Path | None, json: bool
) -> Examination:
    from hoop.runs.doctor import examine_cluster
    from hoop.wire.auth import find_credentials
    from hoop.wire.roles import Role

    address = Addresses.parse(coordinator, "--coordinator")
    credentials = find_credentials(Role.CLIENT, token_file=token_file, tls=tls)
    return examine_cluster(address, credentials, _sent_name(job), _say(json))


def _sent_name(job: str | None) -> str:
    """The name by which devices know a job: no path of this machine is sent."""
    if not job:
        return ""
    from hoop.engine.job import import_path

    return import_path(job)


def _say(json: bool) -> Callable[[str], None]:
    """Prints progress to standard error, unless the output is for a script."""
    return (lambda _: None) if json else (lambda text: typer.echo(text, err=True))


def _print(found: Examination) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    columns = ["check", "verdict", "found"]
    if any(one.host for one in found.checks):
        columns.insert(0, "host")
    for name in columns:
        table.add_column(name, overflow="fold")
    for one in found.checks:
        cells = [plain(one.name), plain(one.verdict, _COLOURS[one.verdict]), plain(one.found)]
        table.add_row(*([plain(one.host)] if columns[0] == "host" else []), *cells)
    console = Console()
    console.print(table)
    for one in found.checks:
        if one.remedy:
            where = f" on {one.host}" if one.host else ""
            console.print(plain(f"{one.verdict}: {one.name}{where}: {one.remedy}"))
    console.print(plain(f"{found.problems} problem{'s' * (found.problems != 1)}" if found.problems else "no problem"))
