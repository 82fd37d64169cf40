"""Starts a gRPC server at an address, and refuses to expose one without authentication."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.files import write_text
from hoop.resources import descriptor_limit, raise_descriptor_limit
from hoop.topology import Address, Addresses
from hoop.wire.auth import Credentials
from hoop.wire.channels import server_options

log = logging.getLogger("hoop.servers")
OPEN_FILES = 65536
"""A server raises its soft limit of open files if it is below this."""


def check_exposure(address: Address, credentials: Credentials, insecure: bool) -> None:
    """Raises if other hosts could call without authentication, unless ``insecure`` allows it (then it warns)."""
    if address.is_loopback or credentials.required:
        return
    where = f"{address.host} can be reached from other machines"
    if not insecure:
        raise InvalidArgument(
            f"host: {where}, and any caller can run jobs here; authenticate callers with a token "
            "(hoop token FILE, then --token-file FILE everywhere) or certificates (hoop certs DIR, then --tls DIR); "
            "or use 127.0.0.1, or --insecure on a network you trust"
        )
    log.warning("insecure: %s, and callers are not authenticated (SECURITY.md)", where)


async def serve(
    address: Address,
    services: Sequence[Any],
    max_message: int,
    credentials: Credentials,
    advertised: Callable[[], Address] | None = None,
) -> tuple[grpc.aio.Server, Address]:
    """Starts a server. Returns it and its address; port 0 picks a free port.

    ``advertised``: the address of a device by which callers know it, as soon as it is known.

    Its connections take at most half of the open files of this process, so that callers cannot use up what devices,
    links and files need.
    """
    raise_descriptor_limit(OPEN_FILES)
    limit = descriptor_limit()
    options = server_options(max_message, None if limit is None else limit // 2)
    interceptors = credentials.interceptors(*([] if advertised is None else [lambda: str(advertised())]))
    server = grpc.aio.server(options=options, interceptors=interceptors)
    server.add_generic_rpc_handlers(tuple(services))
    try:
        port = credentials.add_port(server, address)
    except RuntimeError:
        raise FailedPrecondition(
            f"cannot listen on {address}: the port is in use or not ours; choose another, or 0 for any"
        ) from None
    await server.start()
    return server, dataclasses.replace(address, port=port)


def write_address_file(path: Path, address: Address | Addresses) -> None:
    """Writes ``host:port`` atomically: a process that waits for the file never reads half of it."""
    if not path.parent.is_dir():
        raise FailedPrecondition(f"address file {path}: there is no folder {path.parent}; make it first")
    write_text(path, f"{address}\n")
