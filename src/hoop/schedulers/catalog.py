"""All schedulers, in the order in which they are looked for, and the placement of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hoop.errors import InvalidArgument
from hoop.schedulers.base import Placement, Scheduler
from hoop.schedulers.kubernetes import Kubernetes
from hoop.schedulers.mpi import Mpi
from hoop.schedulers.slurm import Slurm
from hoop.schedulers.torchrun import Torchrun
from hoop.topology import Address

SCHEDULERS: tuple[Scheduler, ...] = (Torchrun(), Mpi(), Slurm(), Kubernetes())
"""All schedulers, the innermost first: torchrun and mpirun run in jobs of Slurm, and Slurm in pods."""
LOCAL = "local"
"""Value of ``--on`` without a scheduler: the devices are processes of this machine that ``hoop train`` starts."""
RAY = "ray"
"""Value of ``--on`` for devices that ``hoop train`` starts as actors on a Ray cluster."""
NAMES = (LOCAL, RAY, *sorted(one.name for one in SCHEDULERS))
"""All values of ``--on``."""


def detect(environ: Mapping[str, str]) -> Scheduler | None:
    """The scheduler that started the process with this environment; None: no known one."""
    return next((one for one in SCHEDULERS if one.detect(environ)), None)


def find_placement(
    environ: Mapping[str, str], on: str | None = None, meet: Address | None = None, port: int | None = None
) -> Placement | None:
    """The place of this process in a run that a scheduler started; None: it is a run of its own.

    ``on``: the scheduler's name, ``local`` or ``ray``; None: it is detected, and a single process is a run of its own.
    ``meet``: the meeting point, in place of the scheduler's; ``port``: only its port.
    """
    if on is not None and on not in NAMES:
        raise InvalidArgument(f"--on: {on!r} is not one of {', '.join(NAMES)}")
    if on in (LOCAL, RAY):
        return None  # whatever HOOP_MEET says
    if meet is not None and port is not None:
        raise InvalidArgument("--port: --meet HOST:PORT has a port already; give one of them")
    scheduler = detect(environ) if on is None else next((one for one in SCHEDULERS if one.name == on), None)
    found = None if scheduler is None else scheduler.placement(environ)
    if found is None or (on is None and found.world_size == 1):
        if meet is not None or port is not None:
            raise InvalidArgument(
                f"{'--meet' if meet else '--port'}: no scheduler has started several processes here; start them with "
                "srun, mpirun or torchrun, or name the scheduler with --on"
            )
        return None
    if port is not None and found.meeting_point is not None:
        meet = replace(found.meeting_point, port=port)
    point = meet or found.meeting_point
    if point is None:
        raise InvalidArgument(
            f"--meet: {found} is one of {found.local_world_size} on this host, and {found.scheduler} does not say on "
            "which host rank 0 is; give --meet HOST:PORT to all processes, with that host (the first of your hosts) "
            "and a free port there"
        )
    if point.is_loopback and found.spans_hosts:
        raise InvalidArgument(f"--meet: {point} cannot be reached from the other hosts of {found}; name rank 0's host")
    return replace(found, meeting_point=point)
