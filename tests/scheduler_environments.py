"""Environments that schedulers give to the processes of a run, as recorded, without the variables that Hoop ignores.

One host of 2 processes: Slurm 22.05, Open MPI 5.0.11, MPICH 5.0.2 (Hydra), torch 2.13. The runs of several hosts are
the same with the values that each scheduler's manual states for them: hosts ``n01`` and ``n02`` with 3 and 1 processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HOSTS = (("n01", 3), ("n02", 1))
SPREAD = [(node, local) for node, (_, count) in enumerate(HOSTS) for local in range(count)]
"""Node and local rank of each rank of the runs on several hosts."""


@dataclass(frozen=True)
class Recorded:
    """The processes of one run."""

    name: str
    scheduler: str
    environments: list[dict[str, str]]
    """By rank."""
    host: str = "127.0.0.1"
    """Of the meeting point."""
    hosts: list[str] = field(default_factory=lambda: ["here"] * 2)
    """By rank."""
    needs_meet: bool = False
    """The scheduler does not say on which host rank 0 is."""

    def __str__(self) -> str:
        return self.name


def slurm(rank: int, **changes: Any) -> dict[str, str]:
    """A task of ``srun --ntasks 2``."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "vm",
        "SLURM_LOCALID": str(rank),
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "vm",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "vm",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_TASKS_PER_NODE": "2",
        **changes,
    }


BATCH_SCRIPT = {key: value for key, value in slurm(0).items() if not key.startswith("SLURM_STEP_")}
"""The script of ``sbatch --ntasks 2`` itself, which is no task."""


def open_mpi(rank: int, **changes: Any) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": str(rank),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-vm-2790@1",
        "PMIX_RANK": str(rank),
        **changes,
    }


def mpich(rank: int, **changes: Any) -> dict[str, str]:
    return {
        "MPI_LOCALNRANKS": "2",
        "MPI_LOCALRANKID": str(rank),
        "PMI_FD": "11",
        "PMI_RANK": str(rank),
        "PMI_SIZE": "2",
        **changes,
    }


def torchrun(rank: int, **changes: Any) -> dict[str, str]:
    return {
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "46403",
        "RANK": str(rank),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "2baa4029-ce71-4075-8a9f-3c4fdb2b2587",
        "WORLD_SIZE": "2",
        **changes,
    }


def kubernetes(rank: int, **changes: Any) -> dict[str, str]:
    """A pod of an Indexed Job ``digits``."""
    return {
        "HOOP_WORLD_SIZE": "2",
        "HOSTNAME": f"digits-{rank}",
        "JOB_COMPLETION_INDEX": str(rank),
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        **changes,
    }


def stateful_set(rank: int) -> dict[str, str]:
    """A pod of a StatefulSet ``digits`` whose service is ``digits-pods``."""
    return {
        "HOOP_SERVICE": "digits-pods",
        "HOOP_WORLD_SIZE": "2",
        "HOSTNAME": f"digits-{rank}",
        "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    }


def _spread(rank: int) -> tuple[int, int, str]:
    node, local = SPREAD[rank]
    return node, local, str(HOSTS[node][1])


def _slurm_spread(rank: int) -> dict[str, str]:
    node, local, _ = _spread(rank)
    return slurm(
        rank,
        SLURM_JOB_NODELIST="n[01-02]",
        SLURM_LOCALID=str(local),
        SLURM_NODEID=str(node),
        SLURM_NODELIST="n[01-02]",
        SLURM_NTASKS="4",
        SLURM_STEP_NODELIST="n[01-02]",
        SLURM_STEP_NUM_TASKS="4",
        SLURM_STEP_TASKS_PER_NODE="3,1",
        SLURM_TASKS_PER_NODE="3,1",
    )


def _open_mpi_spread(rank: int) -> dict[str, str]:
    _, local, count = _spread(rank)
    return open_mpi(
        rank,
        OMPI_COMM_WORLD_LOCAL_RANK=str(local),
        OMPI_COMM_WORLD_LOCAL_SIZE=count,
        OMPI_COMM_WORLD_NODE_RANK=str(local),
        OMPI_COMM_WORLD_SIZE="4",
    )


def _mpich_spread(rank: int) -> dict[str, str]:
    _, local, count = _spread(rank)
    return mpich(rank, MPI_LOCALNRANKS=count, MPI_LOCALRANKID=str(local), PMI_SIZE="4")


def _torchrun_spread(rank: int) -> dict[str, str]:
    node, local, count = _spread(rank)
    return torchrun(
        rank,
        GROUP_RANK=str(node),
        GROUP_WORLD_SIZE="2",
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE=count,
        MASTER_ADDR="n01",
        TORCHELASTIC_RESTART_COUNT=str(node),  # agents count differently
        WORLD_SIZE="4",
    )


_ON_HOSTS = [HOSTS[node][0] for node, _ in SPREAD]
RUNS = [
    Recorded("srun", "slurm", [slurm(rank) for rank in range(2)]),
    Recorded("srun, 2 hosts", "slurm", [_slurm_spread(rank) for rank in range(4)], "n01", _ON_HOSTS),
    Recorded(
        "srun --mpi=pmi2",
        "slurm",
        [slurm(rank) | {"PMI_FD": "13", "PMI_JOBID": "2.0", "PMI_RANK": str(rank), "PMI_SIZE": "2"} for rank in (0, 1)],
    ),
    Recorded("Open MPI", "mpi", [open_mpi(rank) for rank in range(2)]),
    Recorded("Open MPI, 2 hosts", "mpi", [_open_mpi_spread(rank) for rank in range(4)], "", _ON_HOSTS, needs_meet=True),
    Recorded(  # mpirun starts its daemons with srun: each process has the variables of its daemon's task
        "Open MPI in a Slurm job",
        "mpi",
        [
            slurm(SPREAD[rank][0], SLURM_JOB_NODELIST="n[01-02]", SLURM_STEP_TASKS_PER_NODE="1(x2)")
            | _open_mpi_spread(rank)
            for rank in range(4)
        ],
        "n01",
        _ON_HOSTS,
    ),
    Recorded("MPICH", "mpi", [mpich(rank) for rank in range(2)]),
    Recorded("MPICH, 2 hosts", "mpi", [_mpich_spread(rank) for rank in range(4)], "", _ON_HOSTS, needs_meet=True),
    Recorded("torchrun", "torchrun", [torchrun(rank) for rank in range(2)]),
    Recorded("torchrun, 2 hosts", "torchrun", [_torchrun_spread(rank) for rank in range(4)], "n01", _ON_HOSTS),
    Recorded("torchrun in a Slurm job", "torchrun", [slurm(0) | torchrun(rank) for rank in range(2)]),
    Recorded(
        "Indexed Job",
        "kubernetes",
        [kubernetes(rank) for rank in range(2)],
        "digits-0.digits",
        ["digits-0", "digits-1"],
    ),
    Recorded(
        "StatefulSet",
        "kubernetes",
        [stateful_set(rank) for rank in range(2)],
        "digits-0.digits-pods",
        ["digits-0", "digits-1"],
    ),
]
