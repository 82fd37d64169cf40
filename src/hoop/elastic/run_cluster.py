"""The cluster of a run: the coordinator that the device of this process joins.

hoop run                     the launcher's coordinator, which survives every process of the script
torchrun, srun, mpirun …     a coordinator in the process of rank 0, at the scheduler's meeting point
python train.py              a coordinator in this process, for this device alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hoop.launch.forked import meeting_coordinator, own_coordinator
from hoop.launch.rank_processes import RESTART_COUNT
from hoop.launch.run_coordinator import COORDINATOR
from hoop.resources import TRAINING, largest_arena
from hoop.runs.meeting import rank_credentials, rank_device
from hoop.schedulers.base import Placement
from hoop.schedulers.catalog import find_placement
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.device import DeviceConfig
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.roles import Role

MEET = "HOOP_MEET"
"""Environment variable with the meeting point, where the scheduler does not name one; the same as for ``hoop
train``."""
MEET_TIMEOUT_S = 300.0
"""Seconds that a process waits for the others before the first step."""


@dataclass(frozen=True)
class RunCluster:
    """What this process needs to take part in a run."""

    rank: int
    """Rank of this process, as its launcher numbers them."""
    size: int
    """Number of processes that the launcher has started."""
    coordinator: CoordinatorConfig | None
    """Configuration of the coordinator that this process runs; None: another process runs it."""
    device: DeviceConfig
    """Configuration of this process's device. In a run of one process the coordinator's port is known when it has
    started."""
    restarted: bool = False
    """True if the launcher has started this process again: the job runs already."""

    @property
    def starts_job(self) -> bool:
        return self.rank == 0 and not self.restarted


def find_cluster(environ: Mapping[str, str], memory: int | None, on: str | None = None) -> RunCluster:
    """The cluster of the process with this environment. ``memory``: bytes of its device's arena; None: it
    grows with what the run needs, up to the process's share of this machine.

    ``on``: name of the scheduler, as in ``hoop train --on``; None: it is detected.
    """
    if COORDINATOR in environ:
        device = DeviceConfig(
            Address.parse(environ[COORDINATOR], COORDINATOR),
            memory or largest_arena(int(environ["LOCAL_WORLD_SIZE"]), TRAINING),
            grows=memory is None,
            credentials=Credentials(Role.DEVICE, local=True),
        )
        restarted = environ.get(RESTART_COUNT, "0") != "0"
        return RunCluster(int(environ["RANK"]), int(environ["WORLD_SIZE"]), None, device, restarted)
    meet = Address.parse(environ[MEET], MEET) if environ.get(MEET) else None
    placement = find_placement(environ, on, meet)
    return _alone(memory) if placement is None else _scheduled(placement, memory)


def _alone(memory: int | None) -> RunCluster:
    coordinator = own_coordinator()
    device = DeviceConfig(
        Address("127.0.0.1", 0),
        memory or largest_arena(1, TRAINING),
        grows=memory is None,
        credentials=coordinator.credentials.for_role(Role.DEVICE),
    )
    return RunCluster(0, 1, coordinator, device)


def _scheduled(placement: Placement, memory: int | None) -> RunCluster:
    credentials, point = rank_credentials(placement), placement.meeting_point
    assert point is not None, "checked by find_placement"
    coordinator = None
    if placement.rank == 0:
        coordinator = meeting_coordinator(point, credentials)
        credentials = coordinator.credentials.for_role(Role.DEVICE)
    device = rank_device(placement, memory, credentials, MEET_TIMEOUT_S)
    return RunCluster(placement.rank, placement.world_size, coordinator, device)
