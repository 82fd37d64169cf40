"""Starting a gRPC server at an address, or saying why not."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.topology import Address, Addresses
from hoop.wire.auth import Credentials
from hoop.wire.channels import server_options

log = logging.getLogger("hoop")


def check_exposure(address: Address, credentials: Credentials, insecure: bool) -> None:
    """Refuses to listen beyond this machine where callers need prove nothing, without a word that it is meant."""
    if address.is_loopback or credentials.asked:
        return
    where = f"{address.host} can be reached from other machines"
    if not insecure:
        raise InvalidArgument(
            f"host: {where}, and whoever calls can run jobs here; let callers prove themselves with a token "
            "(hoop token FILE, then --token-file FILE everywhere) or certificates (hoop certs DIR, then --tls DIR); "
            "or use 127.0.0.1, or --insecure on a network you trust"
        )
    log.warning("insecure: %s, and nobody who calls has to prove anything (SECURITY.md)", where)


async def serve(
    address: Address, services: Sequence[Any], max_message: int, credentials: Credentials
) -> tuple[grpc.aio.Server, Address]:
    """A started server and where it listens (port 0: any free one)."""
    server = grpc.aio.server(options=server_options(max_message), interceptors=credentials.interceptors())
    server.add_generic_rpc_handlers(tuple(services))
    try:
        port = credentials.listen(server, address)
    except RuntimeError:
        raise FailedPrecondition(
            f"cannot listen on {address}: the port is in use or not ours; choose another, or 0 for any"
        ) from None
    await server.start()
    return server, dataclasses.replace(address, port=port)


def write_address_file(path: Path, address: Address | Addresses) -> None:
    """``host:port``, whole or not at all: whoever waits for the file never reads half of it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(f"{address}\n")
    os.replace(fresh, path)
