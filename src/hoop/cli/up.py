"""``hoop up``: starts a coordinator and devices on this machine."""

from __future__ import annotations

import asyncio
import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.cli import options
from hoop.cli.coordinator import AccessOptions, LabOptions, configure
from hoop.cli.output import log_event
from hoop.config import format_size, parse_size
from hoop.errors import InvalidArgument
from hoop.texts import counted

if TYPE_CHECKING:
    from hoop.launch.local import LocalConfig


def up(
    devices: Annotated[int, typer.Option(help="How many devices to start.")] = 4,
    memory: options.Memory = "256MiB",
    accelerator: options.DeviceAccelerator = "cpu",
    host: options.Host = "127.0.0.1",
    port: options.Port = 0,
    jobs: options.Jobs = None,
    address_file: options.AddressFile = None,
    state: Annotated[
        Path | None, typer.Option(help="Keep arenas and journal in this folder, and start from them if they are there.")
    ] = None,
    lab: options.Lab = False,
    lab_dialect: options.LabDialect = None,
    count_unit: options.CountUnit = "dialect",
    lease: options.Lease = None,
    timeout: options.Timeout = "60s",
    max_communicators: options.MaxCommunicators = 1024,
    communicators_per_client: options.CommunicatorsPerClient = 512,
    max_streams: options.MaxStreams = 4096,
    max_message: options.MaxMessage = "64MiB",
    metrics: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve metrics for Prometheus: the coordinator's there (path /metrics), device N's at PORT + N. "
            "Loopback unless you give a host, and beyond it for scrapers that send a viewer's token. 0 picks free "
            "ports.",
        ),
    ] = None,
    dashboard: Annotated[
        int | None,
        typer.Option(metavar="[PORT]", help="Show the cluster live in the browser, on loopback; 8787 without a port."),
    ] = None,
    token_file: options.TokenFile = None,
    tls: options.Tls = None,
    insecure: options.Insecure = False,
    json: options.Json = False,
    leave_with_stdin: options.LeaveWithStdin = False,
) -> None:
    """Start a coordinator and its devices here, until Ctrl-C.

    It prints [bold]coordinator HOST:PORT[/bold]: your Hoop commands and clients connect there, and with
    [bold]--lab[/bold] programs that speak the lab's gpu_sim protocol. Ctrl-C ends all processes and removes their
    files.
    """
    from hoop.cli.run_dashboard import check_port
    from hoop.cli.running import run_event_loop
    from hoop.launch.local import LocalConfig

    if dashboard is not None:
        check_port(dashboard)
    if devices < 0:
        raise InvalidArgument(f"--devices: {devices} is negative")
    if state is not None:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    access, for_lab = AccessOptions(token_file, tls, insecure), LabOptions(lab, lab_dialect, count_unit)
    coordinator = replace(
        configure(host, port, access, for_lab, lease, timeout, state and state / "journal"),
        max_communicators=max_communicators,
        communicators_per_client=communicators_per_client,
        max_message=parse_size(max_message, "--max-message"),
        command="hoop up",
        metrics=options.check_metrics(metrics),
    )
    # Paths, never a secret: every user of the machine can read a command's arguments.
    credentials = [
        *(["--token-file", str(token_file)] if token_file else []),
        *(["--tls", str(tls)] if tls else []),
    ]
    more = [
        *(["--jobs", str(options.check_jobs(jobs))] if jobs else []),
        *(["--lab"] if lab else []),
        *(["--lab-dialect", lab_dialect] if lab_dialect else []),
        *("--max-streams", str(max_streams)),
        *("--max-message", max_message),
        *credentials,
    ]
    config = LocalConfig(
        devices,
        parse_size(memory, "--memory"),
        state,
        coordinator,
        device_options=tuple(more),
        accelerator=accelerator,
        dashboard=dashboard,
        dashboard_options=(*(["--json"] if json else []), *credentials),
    )
    run_event_loop(lambda: _run(config, address_file, json, leave_with_stdin))


async def _run(config: LocalConfig, address_file: Path | None, json: bool, leave_with_stdin: bool) -> None:
    """Runs the cluster until Ctrl-C, and says where its coordinator is."""
    from hoop.cli.running import Stopping
    from hoop.launch.local import LocalCluster

    stopping = Stopping(leave_with_stdin)
    cluster = LocalCluster(config)
    unwatch = cluster.watch(log_event)
    started = False
    try:
        started = await stopping.unless(asyncio.ensure_future(cluster.start(address_file)))
        if not started:
            return
        options.warn_of_open_lab(config.coordinator)
        if json:
            typer.echo(json_module.dumps({"coordinator": str(cluster.address), "devices": config.devices}))
        else:
            typer.echo(f"coordinator {cluster.address}")
            typer.echo(
                f"{counted(config.devices, 'device')} of {format_size(config.memory)} are up; Ctrl-C ends them. "
                f"In another terminal: hoop status --coordinator {cluster.address}",
                err=True,
            )
        await stopping.unless(asyncio.ensure_future(cluster.wait_failed()))
    finally:
        unwatch()
        await cluster.stop()
        if address_file is not None and started:  # else the file is another command's
            address_file.unlink(missing_ok=True)  # noqa: ASYNC240 - the loop has nothing else to do
