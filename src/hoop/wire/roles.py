"""The table of roles: which role may call which gRPC method. A method that is not in the table cannot be called.

A device cannot act as the coordinator, nor a client as a device. The coordinator calls devices. A device calls the
coordinator, and other devices to carry a stream. Clients call everything else.
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """The role of a process in the cluster."""

    COORDINATOR = "coordinator"
    DEVICE = "device"
    CLIENT = "client"


# Columns: service, role, methods that the role may call.
_TABLE = """
    hoop.v1.Coordinator     device       Join SendHeartbeats Leave
    hoop.v1.Coordinator     client       GetStatus WatchEvents Run Copy StartJob GetJob WatchJob StopJob KeepSession
    hoop.v1.Coordinator     client       DrainDevice ExamineHosts
    hoop.v1.Coordinator     client       CreateCommunicator GetCommunicator RebuildCommunicator DestroyCommunicator
    gpu_sim.GPUCoordinator  client       CommInit CommDestroy CommFinalize GetCommStatus GroupStart GroupEnd
    gpu_sim.GPUCoordinator  client       AllReduceRing NaiveAllReduce AllReduce CommRemoveDevice Memcpy
    hoop.v1.Device          coordinator  AssignRank Launch Abort
    hoop.v1.Device          coordinator  StartTask ReassignTask CommitReassignment WatchTask StopTask
    hoop.v1.Device          coordinator  Reserve Release Describe Write Read Free ListBuffers CheckLinks
    hoop.v1.Device          coordinator  Examine
    hoop.v1.Device          client       Describe Write Read Allocate Free ListBuffers TraceTask
    gpu_sim.GPUDevice       device       StreamSend
    gpu_sim.GPUDevice       client       GetDeviceMetadata BeginSend BeginReceive GetStreamStatus
    gpu_sim.GPUDevice       client       Memcpy SetupCommunication ResetGpu
"""


def _parse_table(table: str) -> dict[str, frozenset[Role]]:
    allowed: dict[str, frozenset[Role]] = {}
    for line in filter(None, map(str.split, table.splitlines())):
        service, role, *methods = line
        for method in methods:
            path = f"/{service}/{method}"
            allowed[path] = allowed.get(path, frozenset()) | {Role(role)}
    return allowed


ALLOWED = _parse_table(_TABLE)
"""Roles that may call each method, by its path (``/hoop.v1.Device/Read``)."""
