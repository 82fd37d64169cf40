"""Hoop: train a PyTorch model across whatever devices you have; no failure changes what comes out.

with hoop.connect("127.0.0.1:4021") as cluster:
    comm = cluster.communicator(3)
    sums = comm.all_reduce([a, b, c])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hoop.errors import HoopError, PeerError, UserError

if TYPE_CHECKING:
    from hoop.client.buffer import Buffer
    from hoop.client.calls import Handle
    from hoop.client.cluster import Cluster, connect
    from hoop.client.communicator import Communicator
    from hoop.client.device import Device

__version__ = "0.1.0"
__all__ = [
    "Buffer",
    "Cluster",
    "Communicator",
    "Device",
    "Handle",
    "HoopError",
    "PeerError",
    "UserError",
    "connect",
]

# Loaded when first used: most rooms must do without gRPC, and importing hoop must cost next to nothing.
_ROOMS = {
    "Buffer": "hoop.client.buffer",
    "Cluster": "hoop.client.cluster",
    "Communicator": "hoop.client.communicator",
    "Device": "hoop.client.device",
    "Handle": "hoop.client.calls",
    "connect": "hoop.client.cluster",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'hoop' has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOMS[name]), name)
