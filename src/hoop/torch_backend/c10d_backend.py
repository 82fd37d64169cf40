"""The ``Backend`` object that c10d's C++ code finds in a HoopProcessGroup (``process_group.py``).

HoopProcessGroup is a ProcessGroup written in Python: torch's Python code and its C++ code (DDP's reducer, functional
collectives) call the group's own methods. Since torch 2.15 C++ code also asks a group for its default ``Backend`` and
raises when there is none: the flight recorder does so for every new group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

_Backend: Any = c10d.Backend  # its type stub does not describe the constructor of a Python subclass


class RegisteredBackend(_Backend):  # type: ignore[misc]
    """Gives C++ code the name, rank and size of a HoopProcessGroup. It runs no operation: the group does."""

    # torch 2.15 looks these up in the subclass; if it finds its own property instead, it recurses without end.
    supports_splitting = supports_coalescing = supports_shrinking = False
    supports_reconfigure = supports_window = _supports_time_estimate = False

    def getBackendName(self) -> str:  # noqa: N802 - torch's C++ name
        return "hoop"


def register(group: Any, rank: int, size: int) -> RegisteredBackend | None:
    """Makes a RegisteredBackend the default backend of ``group``; the group must keep the returned object alive.

    Returns None with an older torch, whose ``Backend`` cannot be subclassed in Python. Its C++ code does not ask a
    Python group for a backend.
    """
    try:
        backend = RegisteredBackend(rank, size)
    except TypeError:  # "No constructor defined!"
        return None
    custom = c10d.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), custom, backend)
    group._set_default_backend(custom)
    return backend
