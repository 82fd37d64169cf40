"""Links between ranks: an endpoint is one rank's links in one generation. ``inproc`` connects threads, ``shm``
processes of a host, ``tcp`` hosts; ``hybrid`` chooses for each peer.
Collectives are unknown here.

May import: memory native wire.
"""

from hoop.transport.base import Endpoint, PendingSend, Transport
from hoop.transport.registry import open_transport

__all__ = ["Endpoint", "PendingSend", "Transport", "open_transport"]

PUBLIC = (
    "accepting",
    "base",
    "call_check",
    "fault_injection",
    "hybrid",
    "inproc",
    "interfaces",
    "link_key",
    "port_check",
    "shm_endpoint",
    "shm_listener",
    "shm_segment",
    "tcp_listener",
)
"""Modules that other rooms may import."""
