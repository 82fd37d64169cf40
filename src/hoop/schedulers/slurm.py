"""Slurm: a task that ``srun`` started. A batch script, and a shell of ``salloc``, are no tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hoop.errors import InvalidArgument
from hoop.schedulers.base import LOOPBACK, Placement, derived_port, number, text
from hoop.topology import Address

_GROUP = re.compile(r"\[([^\],-]+)[^\]]*\]")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Slurm:
    name: str = "slurm"

    def detect(self, environ: Mapping[str, str]) -> bool:
        return all(environ.get(name) for name in ("SLURM_STEP_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"))

    def placement(self, environ: Mapping[str, str]) -> Placement:
        world_size = number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        per_node = tasks_per_node(text(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
        node = number(environ, "SLURM_NODEID")
        if node >= len(per_node) or sum(per_node) != world_size:
            raise InvalidArgument(
                f"SLURM_STEP_TASKS_PER_NODE: {per_node} has no node {node} (SLURM_NODEID) of a step of {world_size} "
                "tasks (SLURM_STEP_NUM_TASKS); start the step with srun"
            )
        host = LOOPBACK if len(per_node) == 1 else first_host(text(environ, "SLURM_STEP_NODELIST", "SLURM_NODELIST"))
        return Placement(
            self.name,
            rank=number(environ, "SLURM_PROCID"),
            world_size=world_size,
            local_rank=number(environ, "SLURM_LOCALID"),
            local_world_size=per_node[node],
            meeting_point=Address(host, _port(environ)),
        )


def _port(environ: Mapping[str, str]) -> int:
    """The first port that ``srun --resv-ports`` reserved for the step, else one that follows from job and step."""
    reserved = re.match(r"\d+", environ.get("SLURM_STEP_RESV_PORTS", ""))
    if reserved:
        return int(reserved[0])
    return derived_port(f"slurm {text(environ, 'SLURM_JOB_ID')}.{text(environ, 'SLURM_STEP_ID')}")


def first_host(nodes: str) -> str:
    """The first host of a node list: ``gpu[03-05,9]n[1-2],login`` is ``gpu03n1``. Task 0 runs there."""
    return _GROUP.sub(r"\1", nodes).partition(",")[0]


def tasks_per_node(counts: str) -> list[int]:
    """``2(x3),1`` is [2, 2, 2, 1]: the number of tasks of each node of a step."""
    found = []
    for one in counts.split(","):
        match = _TASKS.fullmatch(one)
        if match is None:
            raise InvalidArgument(f"SLURM_STEP_TASKS_PER_NODE: {counts[:80]!r} is no list of counts such as 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found
