"""``hoop dashboard``: a live web page of a cluster."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hoop.cli import options
from hoop.cli.output import echo
from hoop.errors import FailedPrecondition

if TYPE_CHECKING:
    from hoop.client.cluster import Cluster

CALL_S = 5.0
"""Time limit of the feed's calls: a coordinator that does not answer is shown soon."""


def dashboard(
    coordinator: options.CoordinatorAddress,
    host: options.Host = options.LOOPBACK,
    port: options.Port = 8787,
    login: Annotated[
        bool, typer.Option("--login", help="Ask for the login on loopback too; beyond loopback it always is.")
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="Another name under which browsers reach the page, e.g. a proxy's."),
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file, to serve the page by HTTPS.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's private key.")] = None,
    token_file: options.TokenFile = None,
    tls: options.Tls = None,
    json: options.Json = False,
    leave_with_stdin: Annotated[
        bool, typer.Option("--leave-with-stdin", help="Leave when standard input closes.", hidden=True)
    ] = False,
) -> None:
    """Show a cluster live in the browser: devices, jobs, a timeline of faults and recoveries, events.

    The page only shows; it changes nothing. It is for this machine unless you give --host; then it asks for a
    client's token of the cluster, or, if you gave none, for a password that this command prints.
    """
    import hoop
    from hoop.cli.running import Stopping, run_event_loop
    from hoop.topology import Address, Addresses
    from hoop.wire.auth import find_credentials
    from hoop.wire.roles import Role

    try:
        from hoop.dashboard.access import Login
        from hoop.dashboard.feed import ClusterFeed
        from hoop.dashboard.server import DashboardConfig, DashboardServer
    except ModuleNotFoundError as error:
        raise FailedPrecondition(f"hoop dashboard needs {error.name}: pip install 'hoop[dashboard]'") from None

    address = Addresses.parse(coordinator, "--coordinator")
    credentials = find_credentials(Role.CLIENT, token_file=token_file, tls=tls)
    needs_login = login or not Address(host, port).is_loopback
    access = Login(credentials.token) if needs_login else None
    config = DashboardConfig(host, port, access, tuple(allow_origin or ()), certificate, key)

    async def wait() -> None:
        stopping = Stopping(leave_with_stdin)
        await stopping.wait()
        if stopping.number:
            raise typer.Exit(128 + stopping.number)

    def connect() -> Cluster:
        return hoop.connect(address, timeout=CALL_S, credentials=credentials)

    feed = ClusterFeed(connect, _predicted_seconds)
    try:
        server = DashboardServer(lambda: feed.view, config)
        try:
            feed.start()
            server.start()
            password = access.password if access is not None and access.token is None else None
            if json:
                shown = {"dashboard": server.url, **({"password": password} if password else {})}
                typer.echo(json_module.dumps(shown))
            else:
                if password:
                    echo(f"password {password}", err=True)
                echo(f"dashboard {server.url}")
            run_event_loop(wait)
        finally:
            server.close()
    finally:
        feed.close()


def _predicted_seconds(costs: dict[str, Any], settings: str) -> float | None:
    """Seconds of a step by the simulator. Loads PyTorch, and only when a job has reported its costs."""
    from hoop.engine.settings import Settings
    from hoop.runs.prediction import predicted_step_seconds

    return predicted_step_seconds(costs, Settings.from_json(settings))
