"""Who may call what: every method of every service stands in the table, or nobody may call it.

A device must not pass for the coordinator, nor a client for a device. The coordinator's own calls go to devices; a
device calls the coordinator, and other devices to carry a stream; everything else is a client's.
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a process is to the others."""

    COORDINATOR = "coordinator"
    DEVICE = "device"
    CLIENT = "client"


# A service, a role that may call it, and the methods that it may call.
_TABLE = """
    hoop.v1.Coordinator     device       Join Attend Leave
    hoop.v1.Coordinator     client       GetStatus WatchEvents Run Copy StartJob GetJob WatchJob StopJob Hold
    hoop.v1.Coordinator     client       CreateCommunicator GetCommunicator RebuildCommunicator DestroyCommunicator
    gpu_sim.GPUCoordinator  client       CommInit CommDestroy CommFinalize GetCommStatus GroupStart GroupEnd
    gpu_sim.GPUCoordinator  client       AllReduceRing NaiveAllReduce Memcpy
    hoop.v1.Device          coordinator  Seat Launch Abort StartTask ReseatTask MoveTask WatchTask StopTask
    hoop.v1.Device          coordinator  Reserve Release Describe Write Read
    hoop.v1.Device          client       Describe Write Read Allocate Free ListBuffers
    gpu_sim.GPUDevice       device       StreamSend
    gpu_sim.GPUDevice       client       GetDeviceMetadata BeginSend BeginReceive GetStreamStatus
"""


def _read(table: str) -> dict[str, frozenset[Role]]:
    allowed: dict[str, frozenset[Role]] = {}
    for line in filter(None, map(str.split, table.splitlines())):
        service, role, *methods = line
        for method in methods:
            path = f"/{service}/{method}"
            allowed[path] = allowed.get(path, frozenset()) | {Role(role)}
    return allowed


ALLOWED = _read(_TABLE)
"""By a method's path, ``/hoop.v1.Device/Read``: the roles that may call it."""
