"""MPI: a process that ``mpirun`` started, of Open MPI or of MPICH (Hydra).

Hoop does not call MPI: mpirun only starts the processes. Neither tells a process where rank 0 runs, so on several
hosts the meeting point is the first host of the Slurm job that mpirun runs in, or must be given (``--meet``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hoop.schedulers.base import LOOPBACK, Placement, derived_port, number
from hoop.schedulers.slurm import first_host
from hoop.topology import Address

_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")
"""Environment variables that name the job: of Open MPI 5, Open MPI 4, and some versions of Hydra."""


@dataclass(frozen=True)
class Mpi:
    name: str = "mpi"

    def detect(self, environ: Mapping[str, str]) -> bool:
        """Not the variables that Slurm sets for MPI programs (``srun --mpi``): there srun starts the processes."""
        open_mpi = all(environ.get(name) for name in ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))
        hydra = all(environ.get(name) for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"))
        return open_mpi or hydra

    def placement(self, environ: Mapping[str, str]) -> Placement:
        world_size = number(environ, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        local_world_size = number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
        # Hydra names no job. Its processes on a host are children of one proxy, and two jobs have different ones.
        job = next((environ[name] for name in _JOB if environ.get(name)), f"parent {os.getppid()}")
        host: str | None = LOOPBACK
        if local_world_size < world_size:
            nodes = environ.get("SLURM_JOB_NODELIST")
            host = first_host(nodes) if nodes else None
            job = f"job {environ.get('SLURM_JOB_ID', '')}"  # the same on all hosts
        return Placement(
            self.name,
            rank=number(environ, "OMPI_COMM_WORLD_RANK", "PMI_RANK"),
            world_size=world_size,
            local_rank=number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
            local_world_size=local_world_size,
            meeting_point=None if host is None else Address(host, derived_port(f"mpi {job}")),
        )
