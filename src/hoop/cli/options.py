"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Host = Annotated[str, typer.Option(help="The address to listen on. Loopback unless you say otherwise.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 picks a free one.")]
Memory = Annotated[str, typer.Option(help="A device's memory, in bytes or like 256MiB, 2GB.")]
Jobs = Annotated[
    Path,
    typer.Option(help="Where the code of jobs lies: my_job:job is FOLDER/my_job.py, or what is installed."),
]
AddressFile = Annotated[
    Path | None, typer.Option(help="Write host:port here once everything is up (and nothing else).")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen beyond loopback although nobody has to prove anything.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="The cluster's token, from hoop token; or set HOOP_TOKEN_FILE, or HOOP_TOKEN to the token."
    ),
]
Tls = Annotated[
    Path | None,
    typer.Option(help="The folder with this process's certificate, from hoop certs; or set HOOP_TLS."),
]
CoordinatorAddress = Annotated[
    str,
    typer.Option(
        "--coordinator",
        "-c",
        envvar="HOOP_COORDINATOR",
        help="The coordinator's host:port; with one that stands by: host:port,host:port.",
    ),
]
MaxMessage = Annotated[
    str, typer.Option(help="The largest message of a call, like 64MiB; refused before it is read.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
CountUnit = Annotated[
    str, typer.Option(help="What count means in the lab's AllReduce calls: bytes, or elements of float64.")
]
Lease = Annotated[str, typer.Option(help="Silence after which a device is dead.")]
Timeout = Annotated[str, typer.Option(help="How long an operation may take unless its caller says.")]
