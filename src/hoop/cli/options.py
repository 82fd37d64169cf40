"""Options that several commands share, and the check of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hoop.errors import InvalidArgument

Host = Annotated[str, typer.Option(help="The address to listen on. Loopback unless you say otherwise.")]
Port = Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="The port to listen on; 0 picks a free one.")]
Memory = Annotated[str, typer.Option(help="A device's memory, in bytes or like 256MiB, 2GB.")]
Jobs = Annotated[
    Path, typer.Option(help="Folder with the code of jobs: my_job:job is FOLDER/my_job.py, or an installed module.")
]
AddressFile = Annotated[Path | None, typer.Option(help="File to write host:port to, once everything is up.")]
Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Allow listening beyond loopback without a token or certificates: anyone can then call."
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(help="The cluster's token, from hoop token; or set HOOP_TOKEN_FILE, or HOOP_TOKEN to the token."),
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
REPLICAS_HELP = (
    "Replicas of each part, on different devices (and hosts, if there are enough): as many may be lost at once."
)
Replicas = Annotated[int, typer.Option(metavar="N", help=REPLICAS_HELP)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
LabDialect = Annotated[
    str,
    typer.Option(
        help="Dialect of the lab's clients: starter (SUM is 0), nil-first (NIL is 0, SUM is 1), or auto: found out."
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
Lease = Annotated[str, typer.Option(help="Lease of a device: it is dead after this long without a heartbeat.")]
Timeout = Annotated[str, typer.Option(help="Default timeout of an operation.")]


def check_dialect(text: str) -> str:
    """The value of ``--lab-dialect``, if it is valid."""
    from hoop.servers.lab_dialect import AUTO, Dialect

    known = (*Dialect, AUTO)
    if text not in known:
        raise InvalidArgument(f"--lab-dialect: {text!r} is not one of {', '.join(known)}")
    return text
