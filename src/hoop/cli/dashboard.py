"""``hoop dashboard``: a live web page of a cluster."""

from __future__ import annotations

import json as json_module
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hoop.cli import options
from hoop.cli.output import echo
from hoop.errors import FailedPrecondition

if TYPE_CHECKING:
    from hoop.client.cluster import Cluster
    from hoop.dashboard.document import PageTools
    from hoop.dashboard.simulator import Answer, Question

CALL_S = 5.0
"""Time limit of the feed's calls: a coordinator that does not answer is shown soon."""
NICENESS = 10
"""Nice value of a dashboard that ``hoop train`` or ``hoop up`` started: devices share the machine with it and come
first."""


def dashboard(
    coordinator: options.CoordinatorAddress,
    host: options.Host = options.LOOPBACK,
    port: options.Port = 8787,
    login: Annotated[
        bool, typer.Option("--login", help="Ask for the login on loopback too; beyond loopback it always is.")
    ] = False,
    actions: Annotated[
        bool,
        typer.Option(
            "--actions",
            help="Let an administrator act at /admin: make a device leave, stop a job. Asks for the login, with the "
            "cluster's join token or a password that is printed.",
        ),
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
    leave_with_stdin: options.LeaveWithStdin = False,
) -> None:
    """Show a cluster live in the browser: devices, jobs, a timeline of faults and recoveries, events.

    The page only shows, unless you give --actions. It is for this machine unless you give --host; then it asks for a
    viewer's token of the cluster, or, if you gave none, for a password that this command prints.
    """
    import hoop
    from hoop.cli.running import Stopping, run_event_loop
    from hoop.topology import Address, Addresses
    from hoop.wire.auth import find_credentials
    from hoop.wire.roles import Role

    try:
        from hoop.dashboard.access import ADMIN_PATH, Login
        from hoop.dashboard.actions import ActionQueue, ClusterActor
        from hoop.dashboard.document import PageTools
        from hoop.dashboard.feed import ClusterFeed
        from hoop.dashboard.server import DashboardConfig, DashboardServer
        from hoop.dashboard.simulator import Simulator
        from hoop.dashboard.tracer import Tracer
    except ModuleNotFoundError as error:
        raise FailedPrecondition(f"hoop dashboard needs {error.name}: pip install 'hoop[dashboard]'") from None

    if leave_with_stdin:  # a run or ``hoop up`` started it, on the machine of the devices
        os.nice(NICENESS)
    address = Addresses.parse(coordinator, "--coordinator")
    credentials = find_credentials(Role.CLIENT, token_file=token_file, tls=tls)
    needs_login = login or actions or not Address(host, port).is_loopback
    access = Login(credentials.token) if needs_login else None
    config = DashboardConfig(host, port, access, tuple(allow_origin or ()), certificate, key)

    async def wait() -> None:
        stopping = Stopping(leave_with_stdin)
        await stopping.wait()
        if stopping.number:
            raise typer.Exit(128 + stopping.number)

    def connect() -> Cluster:
        return hoop.connect(address, timeout=CALL_S, credentials=credentials, background=True)

    with ExitStack() as stack:
        feed = ClusterFeed(connect, predicted_seconds)
        stack.callback(feed.close)
        tools = PageTools(Tracer(connect), Simulator(simulated, feed.job_inputs), feed.jobs_shown)
        stack.callback(close_tools, tools)
        queue = ActionQueue(ClusterActor(connect)) if actions else None
        if queue is not None:
            stack.callback(queue.close)
        server = DashboardServer(lambda: feed.view, config, tools, queue)
        stack.callback(server.close)
        feed.start()
        server.start()
        shown = {}
        if access is not None and access.token is None:
            shown["password"] = access.password
        if access is not None and actions:
            shown |= {"admin": f"{server.url}{ADMIN_PATH}", "admin_password": access.admin_password}
        if json:
            typer.echo(json_module.dumps({"dashboard": server.url, **shown}))
        else:
            for name, value in shown.items():
                echo(f"{name} {value}", err=True)
            if access is None:
                echo("every user of this machine can open the page; with --login it asks for a token", err=True)
            echo(f"dashboard {server.url}")  # Last: a script that has read the address finds the passwords printed.
        run_event_loop(wait)


def predicted_seconds(costs: dict[str, Any], settings: str) -> float | None:
    """Seconds of a step by the simulator."""
    from hoop.engine.settings import Settings
    from hoop.runs.prediction import predicted_step_seconds

    return predicted_step_seconds(costs, Settings.from_json(settings))


def simulated(costs: dict[str, Any], settings: str, question: Question) -> Answer:
    """The answer of the simulator from a job's measured costs."""
    from hoop.dashboard.simulator import Answer
    from hoop.engine.settings import Settings
    from hoop.runs.prediction import MOST_INSTRUCTIONS, measured_job_costs
    from hoop.simulate.cluster import Cluster, Link
    from hoop.simulate.simulation import simulate
    from hoop.strategies.catalog import parse

    given, strategy = Settings.from_json(settings), parse(question.strategy)
    shards = max(given.num_microbatches, question.devices)
    size = 6 * shards * strategy.stages(question.devices) * (1 if strategy.synchronous else 32)
    if size > MOST_INSTRUCTIONS:
        return Answer(problem=f"{size:,} instructions are more than {MOST_INSTRUCTIONS:,}; choose fewer devices")
    priced = measured_job_costs(costs)
    rows = max(1, round(priced.rows * given.num_microbatches / shards))
    cores = max(1, int(costs["cores"]) // given.threads_per_device)
    cluster = Cluster.even(question.devices, question.per_host, Link.parse(question.link), cores=cores)
    found = simulate(
        strategy,
        priced.with_rows(rows),
        cluster,
        num_microbatches=shards,
        trace=False,
        replicate=given.replicate,
        replicas=min(given.replicas, max(1, question.devices - 1)),
    )
    shares = tuple(
        (
            one.seconds["compute"] / found.steps,
            one.seconds["communicate"] / found.steps,
            one.seconds["idle"] / found.steps,
        )
        for one in found.accounts
    )
    return Answer(found.step_seconds, found.speedup, found.bytes, shares)


def close_tools(tools: PageTools) -> None:
    """Ends the threads of a server's tools."""
    for one in (tools.tracer, tools.simulator):
        if one is not None:
            one.close()
