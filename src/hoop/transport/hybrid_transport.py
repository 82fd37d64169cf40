"""The transport of ranks on several hosts: TCP and shared memory behind one address."""

from __future__ import annotations

from collections.abc import Sequence

from hoop.errors import FailedPrecondition
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport.base import Endpoint, Transport
from hoop.transport.hybrid import spanning_endpoint
from hoop.transport.shm import ShmTransport
from hoop.transport.tcp import TcpTransport

_TRIES = 20


class HybridTransport(Transport):
    """Peers whose addresses have the same host part share memory with each other."""

    scheme = "hybrid"

    def __init__(self, address: Address, arena: Arena | None = None, key: bytes = b"") -> None:
        for left in reversed(range(_TRIES)):
            self._links = TcpTransport(address, key=key)
            self.address = self._links.address
            try:
                self._shared = ShmTransport(self.address, arena)
                return
            except FailedPrecondition:  # its port is free for TCP, and not for shared memory
                self._links.close()
                if address.port or not left:
                    raise

    def endpoint(
        self,
        communicator: int,
        generation: int,
        rank: int,
        peers: Sequence[Address],
        hosts: Sequence[str | None] = (),
    ) -> Endpoint:
        """``hosts`` says who shares memory where addresses do not tell: those with the same; None: with nobody."""
        places = [
            Address(host, peer.port) if host is not None else None
            for peer, host in zip(peers, hosts or [peer.host for peer in peers], strict=True)
        ]
        return spanning_endpoint(self._links, self._shared, communicator, generation, rank, peers, places)

    def close(self) -> None:
        self._shared.close()
        self._links.close()
