"""Transports: how one rank sends bytes to another. Every transport implements the contract in ``base.py``.

A process has one transport, which listens at an address. A communicator asks it for an endpoint: one rank's links to
its peers at one generation.
"""

from hoop.transport.base import Endpoint, PendingSend, Transport
from hoop.transport.registry import open_transport

__all__ = ["Endpoint", "PendingSend", "Transport", "open_transport"]
