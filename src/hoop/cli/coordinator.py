"""``hoop coordinator``: starts a coordinator without devices."""

from __future__ import annotations

import asyncio
import json as json_module
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.cli import options
from hoop.cli.output import log_event
from hoop.config import parse_duration, parse_size
from hoop.errors import InvalidArgument

if TYPE_CHECKING:
    from hoop.servers.coordinator import CoordinatorConfig, JournalLocation


@dataclass(frozen=True)
class AccessOptions:
    """How a coordinator authenticates its callers: ``--token-file``, ``--tls`` and ``--insecure``, as given."""

    token_file: Path | None
    tls: Path | None
    insecure: bool


@dataclass(frozen=True)
class LabOptions:
    """What programs that speak the lab's protocol get: ``--lab``, ``--lab-dialect`` and ``--count-unit``, as given."""

    open: bool
    dialect: str | None
    count_unit: str


def configure(
    host: str,
    port: int,
    access: AccessOptions,
    lab: LabOptions,
    lease: str | None,
    timeout: str,
    journal: JournalLocation | None,
) -> CoordinatorConfig:
    """Builds and checks a coordinator's configuration from the options of ``hoop coordinator`` and ``hoop up``.

    On loopback without credentials and without ``--insecure`` it is for processes of its user alone.
    """
    from hoop.membership.heartbeats import DetectorConfig
    from hoop.servers.coordinator import COUNT_UNITS, CoordinatorConfig
    from hoop.topology import Address
    from hoop.wire.auth import Credentials, find_credentials
    from hoop.wire.channels import default_lease_s
    from hoop.wire.roles import Role
    from hoop.wire.tokens import token_of_user

    if lab.count_unit not in COUNT_UNITS:
        raise InvalidArgument(f"--count-unit: {lab.count_unit!r} is not one of {', '.join(COUNT_UNITS)}")
    seconds = parse_duration(timeout, "--timeout")
    if not seconds:
        raise InvalidArgument("--timeout: an operation needs more than 0 s")
    lease_s = default_lease_s(Address(host, port)) if lease is None else parse_duration(lease, "--lease")
    credentials = find_credentials(Role.COORDINATOR, token_file=access.token_file, tls=access.tls)
    dialect = options.check_dialect(lab.dialect)
    open_lab = lab.open or lab.dialect is not None
    if Address(host, port).is_loopback and not credentials.required and not access.insecure:
        # A successor on the journal may have another port. Callers that know both call TCP ports, with TLS.
        succeeded = journal is not None and not open_lab
        credentials = Credentials(Role.COORDINATOR, token_of_user() if succeeded else None, local=True)
    return CoordinatorConfig(
        host=host,
        port=port,
        journal=journal,
        count_unit=lab.count_unit,
        timeout_s=seconds,
        detector=DetectorConfig(lease_s=lease_s),
        insecure=access.insecure,
        credentials=credentials,
        lab=open_lab,
        lab_dialect=dialect,
    )


def coordinator(
    host: options.Host = "127.0.0.1",
    interface: options.Interface = None,
    port: options.Port = 0,
    address_file: options.AddressFile = None,
    journal: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL",
            help="Journal of devices, communicators and jobs, to survive a restart: a file. In etcd, "
            "etcd://HOST:PORT/PREFIX also survives the loss of a machine: a second coordinator on the same journal "
            "stands by, and takes over when the first is gone.",
        ),
    ] = None,
    journal_lease: Annotated[
        str, typer.Option(help="etcd: lease of the leading coordinator; a standby takes over when it expires.")
    ] = "10s",
    journal_tls: Annotated[
        Path | None,
        typer.Option(help="etcd over TLS: a folder with ca.pem and, if etcd asks for them, cert.pem and key.pem."),
    ] = None,
    lab: options.Lab = False,
    lab_dialect: options.LabDialect = None,
    count_unit: options.CountUnit = "dialect",
    lease: options.Lease = None,
    timeout: options.Timeout = "60s",
    restart_grace: Annotated[
        str,
        typer.Option(help="How long a job that lost all devices waits for those started with --arena; 0s: not at all."),
    ] = "60s",
    max_communicators: options.MaxCommunicators = 1024,
    communicators_per_client: options.CommunicatorsPerClient = 512,
    max_jobs: Annotated[int, typer.Option(metavar="N", min=1, help="Most jobs that run at the same time.")] = 64,
    max_message: options.MaxMessage = "64MiB",
    metrics: options.Metrics = None,
    token_file: options.TokenFile = None,
    tls: options.Tls = None,
    insecure: options.Insecure = False,
    json: options.Json = False,
    leave_with_stdin: options.LeaveWithStdin = False,
) -> None:
    """Start a coordinator; devices join it with [bold]hoop device --join HOST:PORT[/bold]."""
    from hoop.cli.running import Stopping, run_event_loop
    from hoop.servers.coordinator import journal_location
    from hoop.servers.coordinator_service import CoordinatorServer
    from hoop.servers.grpc_server import write_address_file

    place = (
        journal_location(journal, parse_duration(journal_lease, "--journal-lease"), journal_tls) if journal else None
    )
    config = replace(
        configure(
            options.listening_host(host, interface),
            port,
            AccessOptions(token_file, tls, insecure),
            LabOptions(lab, lab_dialect, count_unit),
            lease,
            timeout,
            place,
        ),
        restart_grace_s=parse_duration(restart_grace, "--restart-grace"),
        max_communicators=max_communicators,
        communicators_per_client=communicators_per_client,
        max_jobs=max_jobs,
        metrics=options.check_metrics(metrics),
        max_message=parse_size(max_message, "--max-message"),
    )

    async def run() -> None:
        stopping = Stopping(leave_with_stdin)
        server = CoordinatorServer(config)
        server.coordinator.events.subscribe(log_event)
        written = False
        try:
            starting = asyncio.ensure_future(server.start())
            if not await stopping.unless(starting):
                return
            address = starting.result()
            if address_file is not None:
                write_address_file(address_file, address)
                written = True
            options.warn_of_open_lab(config)
            served = {"metrics": server.metrics.url} if server.metrics is not None else {}
            typer.echo(json_module.dumps({"coordinator": str(address)} | served) if json else f"coordinator {address}")
            await stopping.unless(asyncio.ensure_future(server.coordinator.wait_failed()))
        finally:
            await server.stop()
            if address_file is not None and written:  # else the file is another command's
                address_file.unlink(missing_ok=True)

    run_event_loop(run)
