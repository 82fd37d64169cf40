"""``hoop demo``: a cluster to disturb from its dashboard, with the weights compared at the end."""

from __future__ import annotations

import json as json_module
import tempfile
import threading
import webbrowser
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.cli import options
from hoop.cli.dashboard import CALL_S, close_tools, predicted_seconds, simulated
from hoop.cli.output import echo
from hoop.errors import FailedPrecondition, InternalError
from hoop.texts import counted

if TYPE_CHECKING:
    from hoop.client.cluster import Cluster


def demo(
    devices: Annotated[int, typer.Option("--devices", "-n", metavar="N", min=2, max=16, help="How many devices.")] = 6,
    steps: Annotated[
        int, typer.Option(metavar="N", min=10, help="Steps of the job; the page can finish it before.")
    ] = 4000,
    pace: Annotated[
        int, typer.Option(metavar="N", min=1, help="Slow every device down by this factor, so that there is time.")
    ] = 20,
    port: options.Port = 8787,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in the browser of this machine.")
    ] = True,
    once: Annotated[
        bool, typer.Option("--once", help="End when the weights are compared, in place of at Ctrl-C.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Train a model on devices of this machine, and disturb them from a web page.

    The page has buttons that kill, stop, slow down, remove and add devices. At the end it shows the hash of the weights
    beside that of the same steps on one device that nobody disturbed. The page is for this machine alone, and every
    user of it can press the buttons. Ctrl-C ends all processes.
    """
    import hoop
    from hoop.lab.chaos.processes import ClusterProcesses
    from hoop.lab.demo import MEMORY, Demo, DemoActor, DemoConfig

    try:
        from hoop.dashboard.actions import ActionQueue
        from hoop.dashboard.document import PageTools
        from hoop.dashboard.feed import ClusterFeed
        from hoop.dashboard.server import DashboardConfig, DashboardServer
        from hoop.dashboard.simulator import Simulator
        from hoop.dashboard.tracer import Tracer
    except ModuleNotFoundError as error:
        raise FailedPrecondition(f"hoop demo needs {error.name}: pip install 'hoop[dashboard]'") from None

    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="hoop-demo-"))
        echo(f"starting {counted(devices, 'device')} …", err=True)
        processes = stack.enter_context(ClusterProcesses(Path(scratch), devices, MEMORY))
        actor = DemoActor(processes)
        stack.callback(actor.close)

        def connect() -> Cluster:
            return hoop.connect(processes.address, timeout=CALL_S, background=True)

        feed = ClusterFeed(connect, predicted_seconds)
        stack.callback(feed.close)
        tools = PageTools(Tracer(connect), Simulator(simulated, feed.job_inputs), feed.jobs_shown)
        stack.callback(close_tools, tools)
        queue = ActionQueue(actor)
        stack.callback(queue.close)
        server = DashboardServer(lambda: feed.view, DashboardConfig(port=port), tools, queue)
        stack.callback(server.close)
        feed.start()
        server.start()
        running = Demo(DemoConfig(devices, steps, pace), processes, actor)
        stack.callback(running.close)
        running.start()
        typer.echo(json_module.dumps({"dashboard": server.url}) if json else f"dashboard {server.url}")
        if browser:
            webbrowser.open(server.url)
        verdict = running.wait()
        if json:
            found = {"steps": verdict.steps, "weights": verdict.weights, "undisturbed": verdict.undisturbed}
            typer.echo(json_module.dumps({**found, "equal": verdict.equal}))
        else:
            for sentence in verdict.sentences():
                echo(sentence)
        if not verdict.equal:
            raise InternalError("the weights are not those of the undisturbed run")
        if not once:
            echo("Ctrl-C ends the demo", err=True)
            threading.Event().wait()
