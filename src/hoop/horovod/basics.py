"""``hvd.init`` and the questions that every program asks: rank, size, what was built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hoop.errors import InvalidArgument
from hoop.horovod.context import close_context, current, has_context, open_context
from hoop.horovod.process_sets import ProcessSet, add_process_set, forget_process_sets


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Joins the run that the environment describes; without one this process is a run of size 1.

    ``process_sets``: sets to register at once, the same on every rank; ``"dynamic"``, which Horovod needs for later
    ``add_process_set`` calls, is accepted and changes nothing. ``comm``: only None; ranks of a part are a process set.
    """
    if comm is not None:
        raise InvalidArgument("comm: communicators and lists of ranks are not supported; use process_sets")
    if has_context():
        return
    open_context()
    if process_sets is not None and not isinstance(process_sets, str):
        for one in process_sets:
            add_process_set(one)


def shutdown() -> None:
    """Leaves the run. ``init`` may be called again where the environment still describes one."""
    if has_context():
        rendezvous = current().rendezvous
        if rendezvous is not None:
            rendezvous.finish()
    forget_process_sets()
    close_context()


def is_initialized() -> bool:
    """Whether ``init`` was called and ``shutdown`` was not."""
    return has_context()


def rank() -> int:
    """The number of this process in the run."""
    return current().rank_info.rank


def size() -> int:
    """The number of processes of the run."""
    return current().rank_info.size


def local_rank() -> int:
    """The number of this process among those of this host: the GPU that it should use."""
    return current().rank_info.local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return current().rank_info.local_size


def cross_rank() -> int:
    """The number of this host."""
    return current().rank_info.cross_rank


def cross_size() -> int:
    """The number of hosts."""
    return current().rank_info.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    info = current().rank_info
    return info.size == info.local_size * info.cross_size


def mpi_threads_supported() -> bool:
    """False: MPI carries nothing here."""
    return False


def mpi_enabled() -> bool:
    """False: MPI carries nothing here."""
    return False


def mpi_built() -> bool:
    """False: MPI carries nothing here."""
    return False


def gloo_enabled() -> bool:
    """False: Hoop's own links take Gloo's place."""
    return False


def gloo_built() -> bool:
    """False: Hoop's own links take Gloo's place."""
    return False


def nccl_built() -> bool:
    """False: CUDA tensors go through Hoop's links, on one host by CUDA IPC."""
    return False


def cuda_built() -> bool:
    """Whether CUDA tensors can be used."""
    return torch.cuda.is_available()


def rocm_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def ddl_built() -> bool:
    """False."""
    return False
