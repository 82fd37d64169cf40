"""torchrun (TorchElastic), and other programs that set PyTorch's variables: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

Only torchrun is detected. With ``--on torchrun`` the four variables suffice, for example those of Kubeflow's trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hoop.schedulers.base import LOOPBACK, Placement, derived_port, number, text
from hoop.topology import Address


@dataclass(frozen=True)
class Torchrun:
    name: str = "torchrun"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return all(environ.get(name) for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_PORT"))

    def placement(self, environ: Mapping[str, str]) -> Placement:
        world_size = number(environ, "WORLD_SIZE")
        local = any(environ.get(name) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))  # else one process a host
        local_world_size = number(environ, "LOCAL_WORLD_SIZE") if local else 1
        job = f"torchrun {environ.get('TORCHELASTIC_RUN_ID', '')} {number(environ, 'MASTER_PORT')}"
        host = text(environ, "MASTER_ADDR")
        if local_world_size == world_size:
            host = LOOPBACK
            # Processes of the last attempt may still be ending. Agents of several hosts count restarts differently.
            job += f" {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return Placement(
            self.name,
            rank=number(environ, "RANK"),
            world_size=world_size,
            local_rank=number(environ, "LOCAL_RANK") if local else 0,
            local_world_size=local_world_size,
            meeting_point=Address(host, derived_port(job)),
        )
