"""Transports by the scheme of their address."""

from __future__ import annotations

from collections.abc import Callable

from hoop.errors import InvalidArgument
from hoop.topology import Address
from hoop.transport.base import Transport
from hoop.transport.hybrid_transport import HybridTransport
from hoop.transport.inproc import InprocTransport
from hoop.transport.shm import ShmTransport
from hoop.transport.tcp import TcpTransport

SCHEMES: dict[str, Callable[[Address], Transport]] = {
    HybridTransport.scheme: HybridTransport,
    InprocTransport.scheme: InprocTransport,
    ShmTransport.scheme: ShmTransport,
    TcpTransport.scheme: TcpTransport,
}


def open_transport(uri: str) -> Transport:
    """A transport from ``tcp://127.0.0.1:0`` (port 0: any free one) or ``inproc://name:0``."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in SCHEMES:
        raise InvalidArgument(f"transport: {uri!r} has no known scheme; known: {', '.join(sorted(SCHEMES))}")
    return SCHEMES[scheme](Address.parse(rest, "transport"))
