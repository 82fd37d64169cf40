"""Options that several commands share, and the check of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hoop.errors import InvalidArgument

if TYPE_CHECKING:
    from hoop.servers.coordinator import CoordinatorConfig
    from hoop.topology import Address

LOOPBACK = "127.0.0.1"
OPEN_LAB = "every user of this machine can make the lab's calls, which read and write the devices' memory"
Host = Annotated[str, typer.Option(help="The address to listen on. Loopback unless you say otherwise.")]
Interface = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Listen on the address of this network interface, e.g. eth1, in place of --host."
    ),
]
Ports = Annotated[
    str,
    typer.Option(
        metavar="N|LOW-HIGH", help="The port to listen on, or a range: the first free one. 0 is any free one."
    ),
]
DataPorts = Annotated[
    str, typer.Option(metavar="N|LOW-HIGH", help="The same for its data links; it may be the same range.")
]
Port = Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="The port to listen on; 0 picks a free one.")]
Memory = Annotated[
    str,
    typer.Option(
        help="A device's memory, in bytes or like 256MiB, 2GB. A device that uses a GPU has as much on the GPU too."
    ),
]
JobMemory = Annotated[
    str | None,
    typer.Option(
        help="A device's memory, in bytes or like 256MiB, 2GB. A device that uses a GPU has as much on the GPU too.",
        show_default="what the job needs",
    ),
]
DeviceAccelerator = Annotated[
    str,
    typer.Option(
        help="Where the memory of the lab's calls and of named buffers is: cpu (host memory), cuda (the first GPU), "
        "cuda:N, auto (a GPU if there is one), emulated (as for a GPU, in host memory). Jobs choose for themselves: "
        "hoop train --accelerator."
    ),
]
Jobs = Annotated[
    Path | None,
    typer.Option(
        show_default="the current folder",
        help="Folder with the code of jobs, in which no other user can write: my_job:job is FOLDER/my_job.py, or an "
        "installed module.",
    ),
]
AddressFile = Annotated[Path | None, typer.Option(help="File to write host:port to, once everything is up.")]
LeaveWithStdin = Annotated[
    bool, typer.Option("--leave-with-stdin", help="Leave when standard input closes.", hidden=True)
]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure",
        help="Use no token unless one is given: every user of this machine can call, and everyone on the network if "
        "--host is not loopback.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="The cluster's token, from hoop token; or set HOOP_TOKEN_FILE, or HOOP_TOKEN to the token. Without one, "
        "your processes on this machine share one that the coordinator makes."
    ),
]
Tls = Annotated[
    Path | None, typer.Option(help="The folder with this process's certificate, from hoop certs; or set HOOP_TLS.")
]
CoordinatorAddress = Annotated[
    str,
    typer.Option(
        "--coordinator",
        "-c",
        envvar="HOOP_COORDINATOR",
        help="The coordinator's host:port; with a standby coordinator: host:port,host:port.",
    ),
]
MaxMessage = Annotated[
    str, typer.Option(help="Largest message of a call, like 64MiB; a larger one is refused before it is read.")
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Start devices of this machine again if all were lost, up to N times, each from a newer checkpoint in "
        "--out.",
        show_default="3",
    ),
]
RAY_PANEL = "Ray (--on ray)"
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Ray's head; this command runs on a node of its cluster.",
        show_default="RAY_ADDRESS, or the one of this machine, or a new one",
        rich_help_panel=RAY_PANEL,
    ),
]
RayCpus = Annotated[
    float | None,
    typer.Option(min=0, help="CPUs that Ray reserves for a device.", show_default="1", rich_help_panel=RAY_PANEL),
]
RayGpus = Annotated[
    float | None,
    typer.Option(min=0, help="GPUs for a device, or a part of one.", show_default="0", rich_help_panel=RAY_PANEL),
]
RayPlacement = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Where devices go: pack (few nodes), spread (many), strict_pack or strict_spread.",
        show_default="pack",
        rich_help_panel=RAY_PANEL,
    ),
]
REPLICAS_HELP = (
    "Replicas of each part, on different devices (and hosts, if there are enough): as many may be lost at once."
)
Replicas = Annotated[int, typer.Option(metavar="N", help=REPLICAS_HELP)]
StoredCosts = Annotated[
    Path | None,
    typer.Option(
        help="What hoop calibrate wrote.", show_default="costs that come with Hoop; your own job's are measured"
    ),
]
BatchSize = Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples an update.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Lab = Annotated[
    bool,
    typer.Option("--lab", help="Open the lab's calls (gpu_sim), which have no token, to every user of this machine."),
]
LabDialect = Annotated[
    str | None,
    typer.Option(
        show_default="starter",
        help="Dialect of the lab's clients: starter (SUM is 0), nil-first (NIL is 0, SUM is 1), or auto: found out. "
        "It implies --lab.",
    ),
]
CountUnit = Annotated[
    str,
    typer.Option(
        help="Unit of count in the lab's AllReduce calls: bytes, elements of float64, auto (whichever is the length of "
        "the last copy to the vectors), or dialect: bytes in starter, elements in nil-first."
    ),
]
MaxCommunicators = Annotated[int, typer.Option(metavar="N", min=1, help="Most communicators in all.")]
CommunicatorsPerClient = Annotated[
    int, typer.Option(metavar="N", min=1, help="Most communicators of one client (by the address that it calls from).")
]
MaxStreams = Annotated[int, typer.Option(metavar="N", min=1, help="Most transfers of a device that are open at once.")]
Metrics = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT",
        help="Serve metrics for Prometheus there (path /metrics); loopback unless you give a host, and beyond it "
        "for scrapers that send a viewer's token. 0 picks a free port.",
    ),
]
Lease = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION",
        help="Lease of a device: it is dead after this long without a sign of life. A process that ends is noticed at "
        "once, and one that runs on the coordinator's host is never dead. Default: 20s if the coordinator listens on "
        "loopback, else 1.5s.",
    ),
]
Timeout = Annotated[str, typer.Option(help="Default timeout of an operation.")]


def check_dialect(text: str | None) -> str:
    """The value of ``--lab-dialect``, if it is valid; None: the default."""
    from hoop.servers.lab_dialect import AUTO, Dialect

    known = (*Dialect, AUTO)
    if text is None:
        return Dialect.STARTER
    if text not in known:
        raise InvalidArgument(f"--lab-dialect: {text!r} is not one of {', '.join(known)}")
    return text


def check_metrics(text: str | None) -> Address | None:
    """The value of ``--metrics``; None: no metrics."""
    from hoop.servers.metrics_options import parse_metrics

    return None if text is None else parse_metrics(text)


def listening_host(host: str, interface: str | None) -> str:
    """The address to listen on: of ``--interface`` if it is given, else ``--host``."""
    if interface is None:
        return host
    from hoop.servers.advertised_address import interface_address

    if host != LOOPBACK:
        raise InvalidArgument(f"--interface: {interface}, and --host {host}; give one of them")
    return interface_address(interface)


def check_jobs(folder: Path | None) -> Path:
    """The value of ``--jobs``, or the current folder. One that was given must not be writable by other users.

    The current folder is checked when a job is taken from it: most clusters take none.
    """
    from hoop.engine.job_source import check_writers

    if folder is None:
        return Path.cwd()
    check_writers(folder, "--jobs")
    return folder.resolve()


def warn_of_open_lab(config: CoordinatorConfig) -> None:
    """Says on standard error that the lab's calls are open, if they are."""
    if config.lab:
        typer.echo(f"--lab: {OPEN_LAB}", err=True)
