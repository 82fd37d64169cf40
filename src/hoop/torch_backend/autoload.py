"""What ``import torch`` runs of Hoop: enters the backend's name, so that a script only says ``backend="hoop"``.

Every program with torch pays for this file, so it loads nothing; the rest comes with the first group.
"""

from __future__ import annotations

import sys
from typing import Any


def register() -> None:
    """The entry point ``torch.backends``; never raises, whatever this torch was built without."""
    try:
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None:
            import torch.distributed as dist

            if not dist.is_available():
                return
            from torch.distributed import distributed_c10d as c10d
        c10d.Backend.register_backend("hoop", _create, extended_api=True, devices=["cpu"])
    except Exception as error:  # a program that never asks for Hoop must not notice
        import warnings

        warnings.warn(f"hoop: torch.distributed did not take the backend: {error}", stacklevel=2)


def _create(options: Any, backend_options: Any) -> Any:
    """A process group, when torch.distributed wants one; the torch's version is checked before anything is imported."""
    import warnings

    from hoop import torch_versions

    untested = torch_versions.check(torch_versions.installed())
    is_default_group = not options.global_ranks_in_group
    if untested and is_default_group and options.group_rank == 0:  # one warning a job
        warnings.warn(untested, torch_versions.UntestedTorchWarning, stacklevel=2)
    from hoop.torch_backend.process_group import HoopProcessGroup

    return HoopProcessGroup.create(options)
