"""Opens a transport by the scheme of its URI."""

from __future__ import annotations

from collections.abc import Callable

from hoop.errors import InvalidArgument
from hoop.topology import Address
from hoop.transport.base import Transport
from hoop.transport.hybrid import HybridTransport
from hoop.transport.inproc import InprocTransport
from hoop.transport.shm_listener import ShmTransport
from hoop.transport.tcp_listener import TcpTransport

SCHEMES: dict[str, Callable[[Address], Transport]] = {
    HybridTransport.scheme: HybridTransport,
    InprocTransport.scheme: InprocTransport,
    ShmTransport.scheme: ShmTransport,
    TcpTransport.scheme: TcpTransport,
}


KEYED: dict[str, Callable[[Address, bytes], Transport]] = {
    HybridTransport.scheme: lambda address, key: HybridTransport(address, key=key),
    TcpTransport.scheme: lambda address, key: TcpTransport(address, key=key),
}
"""The transports that reach other hosts, with links that authenticate with a key."""


def open_transport(uri: str, key: bytes = b"") -> Transport:
    """Opens the transport of a URI such as ``tcp://127.0.0.1:0`` (port 0: any free one) or ``inproc://name:0``.

    ``key``: authenticates links to other hosts; empty: no authentication.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in SCHEMES:
        raise InvalidArgument(f"transport: {uri!r} has no known scheme; known: {', '.join(sorted(SCHEMES))}")
    address = Address.parse(rest, "transport")
    return KEYED[scheme](address, key) if key and scheme in KEYED else SCHEMES[scheme](address)
