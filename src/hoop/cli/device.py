"""``hoop device``: starts a device, which joins a coordinator."""

from __future__ import annotations

import asyncio
import json as json_module
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.cli import options
from hoop.config import parse_duration, parse_size
from hoop.errors import InvalidArgument
from hoop.topology import Address, Addresses, PortRange, is_v6

if TYPE_CHECKING:
    from hoop.cli.running import Stopping
    from hoop.servers.device import DeviceConfig, DeviceServer
    from hoop.servers.tasks import TrainFunction


def device(
    join: Annotated[
        str,
        typer.Option(
            envvar="HOOP_COORDINATOR",
            help="Coordinator to join, host:port; with a standby coordinator both, separated by a comma.",
        ),
    ],
    memory: options.Memory = "256MiB",
    accelerator: options.DeviceAccelerator = "cpu",
    host: options.Host = "127.0.0.1",
    interface: options.Interface = None,
    port: options.Ports = "0",
    data_port: options.DataPorts = "0",
    arena: Annotated[
        Path | None,
        typer.Option(
            help="Keep this device's memory in this file: a restart on it finds id, buffers and training state."
        ),
    ] = None,
    id: Annotated[  # noqa: A002 - the option's name
        int, typer.Option(metavar="N", min=0, help="This device's id; 0: the id in the arena, or a new one.")
    ] = 0,
    jobs: options.Jobs = None,
    address_file: options.AddressFile = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Name or address at which others reach this device, if not the one it listens on. With a port: for "
            "calls only.",
        ),
    ] = None,
    advertise_data: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The same for its data links, with their port.")
    ] = None,
    checksums: Annotated[
        bool, typer.Option(help="Checksum every TCP message and retransmit damaged ones; the same on all devices.")
    ] = True,
    lab: options.Lab = False,
    lab_dialect: options.LabDialect = None,
    max_streams: options.MaxStreams = 4096,
    max_message: options.MaxMessage = "64MiB",
    connect_timeout: Annotated[str, typer.Option(help="How long to try to reach the coordinator.")] = "30s",
    metrics: options.Metrics = None,
    token_file: options.TokenFile = None,
    tls: options.Tls = None,
    insecure: options.Insecure = False,
    json: options.Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")] = False,
    leave_with_stdin: options.LeaveWithStdin = False,
) -> None:
    """Start one device and join it to a coordinator. A job that is running takes it in.

    Ctrl-C or SIGTERM makes it leave: it finishes the step, hands over, and ends with code 0. If the device that takes
    over is still loading the job, it waits for that; a second Ctrl-C or SIGTERM makes it leave at once.
    """
    from hoop.cli.running import Stopping, run_event_loop
    from hoop.engine.entrypoint import train_rank
    from hoop.servers.device import DeviceConfig
    from hoop.servers.grpc_server import write_address_file
    from hoop.wire.auth import find_credentials
    from hoop.wire.roles import Role

    folder = options.check_jobs(jobs)
    named, proxied = _advertised(advertise)
    config = DeviceConfig(
        coordinator=Addresses.parse(join, "--join"),
        memory=parse_size(memory, "--memory"),
        host=options.listening_host(host, interface),
        port=PortRange.parse(port, "--port"),
        data_port=PortRange.parse(data_port, "--data-port"),
        arena=arena,
        device_id=id,
        advertise=proxied,
        advertised_host=named,
        advertise_data=Address.parse(advertise_data, "--advertise-data") if advertise_data else None,
        checksums=checksums,
        join_timeout_s=parse_duration(connect_timeout, "--connect-timeout"),
        max_message=parse_size(max_message, "--max-message"),
        max_streams=max_streams,
        accelerator=accelerator,
        lab=lab or lab_dialect is not None,
        lab_dialect=options.check_dialect(lab_dialect),
        insecure=insecure,
        jobs=folder,
        metrics=options.check_metrics(metrics),
        credentials=find_credentials(Role.DEVICE, token_file=token_file, tls=tls),
    )

    async def run() -> None:
        stopping = Stopping(leave_with_stdin)
        server = await join_device(config, partial(train_rank, jobs=folder), stopping)
        if server is None:
            return
        info = server.info
        written = False
        try:
            if address_file is not None:
                write_address_file(address_file, info.address)
                written = True
            if json:
                served = {"metrics": server.metrics.url} if server.metrics is not None else {}
                typer.echo(json_module.dumps({"device": info.device_id, "address": str(info.address)} | served))
            elif not quiet:
                typer.echo(f"device {info.device_id} {info.address}")
            await stopping.wait(server.dismissed)
            if server.failure is not None:
                raise server.failure
        finally:
            await stop_device(server, stopping)
            if address_file is not None and written:
                address_file.unlink(missing_ok=True)

    run_event_loop(run)


def _advertised(text: str | None) -> tuple[str, Address | None]:
    """The value of ``--advertise``: a host by itself, or an address with a port."""
    if text is None:
        return "", None
    bare = text.strip("[]") if text.startswith("[") and text.endswith("]") else text
    try:
        if ":" in bare and not is_v6(bare):
            return "", Address.parse(text, "--advertise")
        return Address.parse(f"[{bare}]:1" if ":" in bare else f"{bare}:1").host, None
    except InvalidArgument:
        raise InvalidArgument(
            f"--advertise: {text[:80]!r} is neither a host, such as node7 or 10.0.0.7, nor host:port"
        ) from None


async def join_device(config: DeviceConfig, trainer: TrainFunction, stopping: Stopping) -> DeviceServer | None:
    """Starts a device that joins its coordinator; None if a signal came before it had joined.

    On loopback without credentials it is a device of this user's own coordinator, unless it may be insecure.
    """
    from hoop.servers.device import DeviceServer
    from hoop.wire.auth import Credentials
    from hoop.wire.roles import Role

    on_loopback = all(one.is_loopback for one in (Address(config.host, 0), *config.coordinator.addresses))
    if on_loopback and not (config.credentials.required or config.insecure or config.advertise):
        config = replace(config, credentials=Credentials.of_user(Role.DEVICE, config.coordinator))
    server = DeviceServer(config, trainer, report=lambda text: typer.echo(text, err=True))
    return server if await stopping.unless(asyncio.ensure_future(server.start())) else None


async def stop_device(server: DeviceServer, stopping: Stopping) -> None:
    """Hands over and leaves. A second signal makes it leave at once."""
    if not stopping.abandoned:
        again = asyncio.ensure_future(stopping.wait_again())
        handing_over = asyncio.ensure_future(server.hand_over())
        await asyncio.wait([again, handing_over], return_when="FIRST_COMPLETED")
        again.cancel()
        handing_over.cancel()
        await asyncio.gather(again, handing_over, return_exceptions=True)
        if not handing_over.cancelled() and (error := handing_over.exception()) is not None:
            await server.stop()
            raise error
    await server.stop()
