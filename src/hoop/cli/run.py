"""``hoop run``: starts a program as several ranks on this machine."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hoop.cli.output import echo
from hoop.errors import InvalidArgument

if TYPE_CHECKING:
    from hoop.launch.rank_processes import RankExit, RunOutcome, Stream

CONTEXT_SETTINGS = {"allow_interspersed_args": False}
"""Click's settings of the command: arguments after SCRIPT belong to the script, options too."""
ELASTIC_PANEL = "Elastic (a script that uses hoop.elastic or hvd.elastic)"
MAX_RESTARTS = 3
"""Number of failed ranks that are started again, if the user states none."""
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")
SHOWN_LINES = 10
_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A Python file, or a program such as python.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", "-np", "-n", metavar="N", help="How many processes.", show_default="one a GPU"),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", "-H", metavar="localhost:N", help="The same, as horovodrun has it: this host only."),
    ] = None,
    output_filename: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write each rank's output to DIR/rank.N/stdout and DIR/rank.N/stderr."),
    ] = None,
    start_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long hvd.init() waits for the other ranks.")
    ] = 600.0,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long a rank may take to end before it is killed.")
    ] = 5.0,
    network_interface: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Accepted and not used: all ranks are on this machine."),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Say when a process starts and ends.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print a last line of JSON: exit codes, restarts, seconds.")
    ] = False,
    min_np: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="A failed rank does not end the others while N are left.", rich_help_panel=ELASTIC_PANEL
        ),
    ] = None,
    max_np: Annotated[
        int | None,
        typer.Option(metavar="N", help="Never more processes than this.", rich_help_panel=ELASTIC_PANEL),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="How many failed ranks are started again.",
            rich_help_panel=ELASTIC_PANEL,
            show_default="3",
        ),
    ] = None,
    elastic_timeout: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=1, help="How long ranks wait to go on after a loss.", rich_help_panel=ELASTIC_PANEL
        ),
    ] = 600.0,
) -> None:
    """Start a program as several ranks on this machine: horovodrun and torchrun for one host.

    [bold]hoop run -np 4 train.py --epochs 3[/bold] starts four processes of train.py, each with RANK, WORLD_SIZE,
    LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The script makes a [bold]hoop.elastic.Run[/bold], or
    calls [bold]hvd.init()[/bold] (import hoop.horovod as hvd) or [bold]dist.init_process_group("hoop")[/bold]. Each
    line of output begins with the rank that wrote it. When a rank fails the others are ended, and the exit code is that
    rank's. Ctrl-C ends all of them.

    With [bold]--min-np[/bold] a script that uses [bold]hoop.elastic[/bold] or [bold]hvd.elastic[/bold] goes on when a
    rank is lost, and the rank is started again. On several hosts use srun, mpirun, torchrun or Ray: docs/clusters.md.
    """
    from hoop.launch.rank_processes import RankProcesses, RunConfig, program_command
    from hoop.launch.rendezvous_server import RendezvousServer
    from hoop.launch.run_coordinator import RunCoordinator

    size = _count(devices, hosts, max_np)
    variables = {"HOOP_START_TIMEOUT": f"{start_timeout:g}", "HOOP_ELASTIC_TIMEOUT": f"{elastic_timeout:g}"}
    command = program_command(script, arguments or [])
    if max_restarts is None:
        max_restarts = 0 if min_np is None else MAX_RESTARTS
    config = RunConfig(command, size, variables, min_np, max_restarts, grace, output_filename)
    if network_interface is not None:
        echo(f"--network-interface {network_interface}: not used, all ranks are on this machine", err=True)
    server = None if min_np is None else RendezvousServer(size, min_np)
    coordinator = RunCoordinator()

    def on_exit(ended: RankExit, replaced: bool) -> None:
        if server is not None:
            server.process_ended(replaced)
        if replaced:
            echo(f"hoop: rank {ended.rank} ended with exit code {ended.code}; it is started again", err=True)
        elif verbose or (ended.code and min_np is not None):
            echo(f"hoop: rank {ended.rank} ended with exit code {ended.code}", err=True)

    def on_start(rank: int, pid: int, restarts: int) -> None:
        if verbose:
            echo(f"hoop: rank {rank} is process {pid}{f', restart {restarts}' if restarts else ''}", err=True)

    began = time.monotonic()
    try:
        with coordinator:
            meeting = {} if server is None else server.variables
            config = replace(config, env={**variables, **meeting, **coordinator.variables})
            outcome = RankProcesses(config, _printer(), on_exit, on_start).run()
    finally:
        if server is not None:
            server.close()
    if outcome.failure is not None:
        _explain(outcome.failure, size)
    if json:
        typer.echo(json_module.dumps(_summary(outcome, time.monotonic() - began)))
    if outcome.code:
        raise typer.Exit(outcome.code)


def _count(devices: int | None, hosts: str | None, max_np: int | None) -> int:
    """The number of processes, from the options that can name it."""
    from hoop.launch.mps import count_gpus

    slots = None if hosts is None else _local_slots(hosts)
    size = devices or slots or (None if devices is not None else count_gpus()) or None
    if size is None:
        raise InvalidArgument(
            "--devices: there is no GPU here; say how many processes to start, such as -np 2"
            if devices is None
            else f"--devices: {devices} processes; start at least 1"
        )
    if slots is not None and size > slots:
        raise InvalidArgument(f"--hosts: {hosts} has {slots} slots, and --devices is {size}; give it {size}")
    if max_np is not None and size > max_np:
        raise InvalidArgument(f"--max-np: {max_np} is less than --devices, {size}")
    return size


def _local_slots(hosts: str) -> int:
    """The slots of a host list that names this machine only: ``localhost:4``."""
    import socket

    total = 0
    for one in hosts.split(","):
        host, _, slots = one.strip().rpartition(":") if ":" in one else (one.strip(), "", "1")
        if host not in (*_LOCAL_HOSTS, socket.gethostname()):
            raise InvalidArgument(
                f"--hosts: {host!r} is another host, and hoop run starts processes on this one; start the script on "
                "several with srun, mpirun, torchrun or Ray (docs/clusters.md): hvd.init() finds its rank there too"
            )
        if not slots.isdigit() or int(slots) < 1:
            raise InvalidArgument(f"--hosts: {one!r} is not HOST:SLOTS, such as localhost:4")
        total += int(slots)
    return total


def _printer() -> Callable[[int, Stream, bytes], None]:
    """Prints a rank's line on the stream that it was written to, after ``[rank]``, which has a colour on a terminal."""
    from hoop.launch.rank_processes import Stream

    targets = {Stream.STDOUT: sys.stdout, Stream.STDERR: sys.stderr}
    prefixes = {stream: _prefix(target) for stream, target in targets.items()}

    def show(rank: int, stream: Stream, line: bytes) -> None:
        targets[stream].buffer.write(prefixes[stream](rank) + line + b"\n")
        targets[stream].buffer.flush()

    return show


def _prefix(target: Any) -> Callable[[int], bytes]:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=target)
    if not console.is_terminal or console.no_color:
        return lambda rank: f"[{rank}] ".encode()

    def coloured(rank: int) -> bytes:
        with console.capture() as captured:
            console.print(Text(f"[{rank}] ", style=COLOURS[rank % len(COLOURS)]), end="")
        return captured.get().encode()

    return coloured


def _explain(failure: RankExit, size: int) -> None:
    cause = f"signal {failure.code - 128}" if failure.code > 128 else f"exit code {failure.code}"
    others = "; the others were ended" if size > 1 else ""
    echo(f"hoop: rank {failure.rank} of {size} failed with {cause}{others}. Its last lines:", err=True)
    for line in failure.last_lines[-SHOWN_LINES:]:
        echo(f"  {line}", err=True)


def _summary(outcome: RunOutcome, seconds: float) -> dict[str, Any]:
    ranks = [{"rank": one.rank, "exit_code": one.code, "restarts": one.restarts} for one in outcome.exits]
    failed = None if outcome.failure is None else outcome.failure.rank
    return {"exit_code": outcome.code, "failed_rank": failed, "ranks": ranks, "seconds": round(seconds, 3)}
