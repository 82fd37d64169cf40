"""NCCL between the GPUs of the ranks of a communicator: whether all ranks can use it, and how the group is made.

PyTorch's ``ProcessGroupNCCL`` is used without ``init_process_group``: a program's own process groups are not touched.
NCCL's id, which it passes through a store, goes over Hoop's links, so no store listens at a port:

    rank 0     a thread connects NCCL, which puts the id into a store in memory; all_gather of the id over the links
    others     a thread connects NCCL, which waits for the id in a store in memory; the all_gather brings it there

NCCL opens sockets of its own. They listen on the interface of the address that this rank has in the communicator, or on
loopback if all ranks are on this host, unless ``NCCL_SOCKET_IFNAME`` names another one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from hoop.collectives.communicator import Communicator, all_gather_object
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.device_group import DeviceGroup
from hoop.transport.base import SharedEndpoint
from hoop.transport.interfaces import interface_of

SWITCH = "HOOP_NCCL"
"""Environment variable: 0 keeps Hoop from using NCCL."""
INTERFACE = "NCCL_SOCKET_IFNAME"
ID_KEY = "0"
"""Key in the store under which PyTorch's group puts the id of its first NCCL communicator."""
CONNECT_SHARE = 0.5
"""Share of the time that a rank waits for others in which NCCL must connect; afterwards the others are still there."""
_MODES = {
    # wait() of a collective raises its error, and PyTorch starts no thread that ends the process on an error or timeout
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "0",
    "TORCH_NCCL_RANKS_PER_ROOT": "4096",  # one id, also for more than 128 ranks
}
"""Environment variables that PyTorch reads while it makes a group."""


class _Past:
    """Results of earlier NCCL set-ups in this process: NCCL reads its environment only once."""

    problem = ""
    """Text that says why NCCL failed here before; it is not tried again. Empty: it has not failed."""
    interface = ""
    """Name of the network interface on which NCCL listens, if Hoop chose it."""


def open_nccl_group(communicator: Communicator, accelerator: Accelerator, timeout: float) -> DeviceGroup | str:
    """Collective. The group of these ranks, or at all of them the same reason why there is none."""
    mine = [_problem(communicator, accelerator), accelerator.identity]
    everyone = all_gather_object(communicator, mine, timeout)
    if problem := _first([problem for problem, _ in everyone]) or _shared_gpu([identity for _, identity in everyone]):
        return problem
    deadline = time.monotonic() + CONNECT_SHARE * timeout
    with _environment(_MODES):
        group, problem = _connect(communicator, accelerator, timeout, deadline)
    return agree(communicator, group, problem, timeout)


def agree(communicator: Communicator, group: DeviceGroup, problem: str, timeout: float) -> DeviceGroup | str:
    """Collective. The group if no rank has a problem with it, else the problem, and it is not tried again."""
    if problem := _first(all_gather_object(communicator, problem, timeout)):
        group.abort()
        _Past.problem = f"NCCL failed before ({problem})"
        return problem
    return group


def _connect(
    communicator: Communicator, accelerator: Accelerator, timeout: float, deadline: float
) -> tuple[DeviceGroup, str]:
    """Make the group and connect its ranks; returns why that failed, or ""."""
    distributed: Any = torch.distributed
    store, rank = distributed.HashStore(), communicator.rank
    store.set_timeout(timedelta(seconds=timeout))
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    backend = distributed.ProcessGroupNCCL(store, rank, communicator.size, options)
    group = DeviceGroup(backend, communicator.endpoint, accelerator.device)
    connecting = group.start_on_thread(partial(backend.eager_connect_single_device, accelerator.device))
    identity = b""
    if rank == 0:
        while not connecting.done() and not store.check([ID_KEY]) and time.monotonic() < deadline:
            time.sleep(0.001)
        if store.check([ID_KEY]):
            identity = store.get(ID_KEY)
    sent = bytes.fromhex(all_gather_object(communicator, identity.hex(), timeout)[0])
    if rank:
        store.set(ID_KEY, sent)  # an empty one makes NCCL fail here, and not wait
    problem = group.wait_for_thread(connecting, deadline)
    return group, problem or ("" if sent else "PyTorch did not give NCCL's id")


def _problem(communicator: Communicator, accelerator: Accelerator) -> str:
    """Why this rank cannot use NCCL, or "". Chooses the interface that NCCL listens on."""
    distributed: Any = torch.distributed
    if not accelerator.cuda:
        return "the GPU is emulated"
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if not distributed.is_available() or not distributed.is_nccl_available():
        return f"PyTorch {torch.__version__} is built without NCCL"
    kind = distributed.ProcessGroupNCCL
    if not hasattr(kind, "abort") or not hasattr(kind, "eager_connect_single_device"):
        return f"the process group of PyTorch {torch.__version__} cannot be aborted"
    return _Past.problem or _choose_interface(communicator)


def _choose_interface(communicator: Communicator) -> str:
    """Let NCCL listen where this rank does; returns why that is impossible, or ""."""
    if not _Past.interface and os.environ.get(INTERFACE):
        return ""
    endpoint = communicator.endpoint
    host = "127.0.0.1" if isinstance(endpoint, SharedEndpoint) else endpoint.peers[communicator.rank].host
    found = interface_of(host)
    if not found:
        return f"no network interface of this host has the address {host}; {INTERFACE} can name one"
    if _Past.interface not in ("", found):
        return f"NCCL of this process listens on {_Past.interface}, and these ranks need {found}"
    _Past.interface, os.environ[INTERFACE] = found, f"={found}"
    return ""


def _shared_gpu(identities: list[str]) -> str:
    for rank, one in enumerate(identities):
        if (first := identities.index(one)) < rank:
            return f"ranks {first} and {rank} share a GPU, which NCCL refuses"
    return ""


def _first(problems: list[str]) -> str:
    """The first problem, with its rank; empty if there is none."""
    return next((f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem), "")


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, these environment variables have these values."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
