"""How bytes get from one rank to another: one contract, one file a way.

A transport belongs to a process and is dialled at an address. From it a communicator gets an
endpoint: one rank's links to the others at one generation.
"""

from hoop.transport.base import Endpoint, PendingSend, Transport
from hoop.transport.registry import open_transport

__all__ = ["Endpoint", "PendingSend", "Transport", "open_transport"]
