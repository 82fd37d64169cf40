"""Starting a gRPC server at an address, or saying why not."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.topology import Address
from hoop.wire.channels import server_options


def check_exposure(address: Address, insecure: bool) -> None:
    """Refuses to listen beyond this machine without a word that it is meant."""
    if not address.is_loopback and not insecure:
        raise InvalidArgument(
            f"host: {address.host} can be reached from other machines, and calls are not authenticated yet; "
            "use 127.0.0.1, or --insecure on a network you trust"
        )


async def serve(
    address: Address, services: Sequence[Any], max_message: int
) -> tuple[grpc.aio.Server, Address]:
    """A started server and where it listens (port 0: any free one)."""
    server = grpc.aio.server(options=server_options(max_message))
    server.add_generic_rpc_handlers(tuple(services))
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError:
        raise FailedPrecondition(
            f"cannot listen on {address}: the port is in use or not ours; choose another, or 0 for any"
        ) from None
    await server.start()
    return server, dataclasses.replace(address, port=port)


def write_address_file(path: Path, address: Address) -> None:
    """``host:port``, whole or not at all: whoever waits for the file never reads half of it."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(f"{address}\n")
    os.replace(fresh, path)
