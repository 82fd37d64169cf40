"""Registers the backend "hoop" when torch is imported, so that a script only names ``backend="hoop"``.

``import torch`` runs this file in every program, so it imports nothing else of Hoop; the first process group does.

With ``HOOP_REPLACE_GLOO=1`` in the environment the name "gloo" means Hoop too. It is for programs that name Gloo
themselves: Hugging Face's accelerate accepts no other name on CPUs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

REPLACE_GLOO = "HOOP_REPLACE_GLOO"


def register() -> None:
    """The entry point ``torch.backends``. It never raises, whatever this build of torch lacks."""
    try:
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None:
            import torch.distributed as dist

            if not dist.is_available():
                return
            from torch.distributed import distributed_c10d as c10d
        c10d.Backend.register_backend("hoop", _create, extended_api=True, devices=["cpu", "cuda"])
        if os.environ.get(REPLACE_GLOO) == "1":
            _replace_gloo(c10d.Backend)
    except Exception as error:  # a program that does not use Hoop must not fail because of it
        import warnings

        warnings.warn(f"hoop: torch.distributed did not take the backend: {error}", stacklevel=2)


def _replace_gloo(backend: Any) -> None:
    """Makes ``Backend("gloo")`` the name of Hoop.

    torch.distributed parses every name of a backend by this class: of ``init_process_group``, ``new_group``, each part
    of ``cpu:gloo,cuda:nccl``, and the default of a device. ``Backend.GLOO`` stays "gloo".
    """
    if backend("gloo") == "hoop":  # registered twice
        return
    parse = backend.__new__

    def parse_and_replace(cls: Any, name: str) -> Any:
        value = parse(cls, name)
        return "hoop" if value == "gloo" else value

    backend.__new__ = staticmethod(parse_and_replace)


def _create(options: Any, backend_options: Any) -> Any:
    """Creates a process group for torch.distributed; checks torch's version before importing anything else."""
    import warnings

    from hoop import torch_versions

    untested = torch_versions.check_version(torch_versions.installed_version())
    is_default_group = not options.global_ranks_in_group
    if untested and is_default_group and options.group_rank == 0:  # one warning for each job
        warnings.warn(untested, torch_versions.UntestedTorchWarning, stacklevel=2)
    from hoop.torch_backend.process_group import HoopProcessGroup

    return HoopProcessGroup.create(options)
