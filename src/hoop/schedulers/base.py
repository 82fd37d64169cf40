"""The shape that all schedulers share: ``Scheduler`` reads an environment, ``Placement`` is what it finds there."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from hoop.errors import InvalidArgument, NotFound
from hoop.topology import Address

LOOPBACK = "127.0.0.1"
FIRST_PORT = 20_000
"""First port of meeting points that are derived from a job's name."""
PORTS = 10_000
"""Number of these ports; all are below those that systems give to outgoing connections."""


@dataclass(frozen=True)
class Placement:
    """One process of a run: its rank and the world size, in the run and on its host, and the address where all meet."""

    scheduler: str
    rank: int
    world_size: int
    local_rank: int
    """Rank of this process among the run's processes on its host."""
    local_world_size: int
    meeting_point: Address | None
    """Address where the coordinator of rank 0 listens, a loopback address on one host; None: the scheduler does not
    say."""

    def __post_init__(self) -> None:
        for name, value, size in (
            ("rank", self.rank, self.world_size),
            ("local rank", self.local_rank, self.local_world_size),
        ):
            if not 0 <= value < size:
                raise InvalidArgument(f"{self.scheduler}: the {name} is {value} of {size}; it must be in 0..{size - 1}")
        if self.local_world_size > self.world_size:
            raise InvalidArgument(
                f"{self.scheduler}: {self.local_world_size} processes on this host are more than all {self.world_size}"
            )

    @property
    def spans_hosts(self) -> bool:
        return self.local_world_size < self.world_size

    @property
    def device_id(self) -> int:
        """The id of this process's device: devices are numbered as the ranks, from 1."""
        return self.rank + 1

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} ({self.scheduler})"


class Scheduler(Protocol):
    """A program that starts the processes of a run. Both methods read the environment and nothing else of the system,
    but for the number of the parent process where the environment does not name the job."""

    @property
    def name(self) -> str:
        """The value of ``--on``."""

    def detect(self, environ: Mapping[str, str]) -> bool:
        """Whether this scheduler started the process with this environment."""

    def placement(self, environ: Mapping[str, str]) -> Placement:
        """The place of the process with this environment; raises NotFound or InvalidArgument with the variable."""


def text(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is set and not empty; NotFound if none is."""
    for name in names:
        if environ.get(name):
            return environ[name]
    raise NotFound(f"{' or '.join(names)}: not set in the environment of this process; did the scheduler start it?")


def number(environ: Mapping[str, str], *names: str) -> int:
    """The first of these variables that is set, as a number."""
    found = text(environ, *names)
    if not (found.isascii() and found.isdigit()):
        raise InvalidArgument(f"{' or '.join(names)}: {found[:40]!r} is not a whole number")
    return int(found)


def derived_port(job: str) -> int:
    """A port for the meeting point of a job, the same in all of its processes, in 20000..29999.

    Two jobs get the same one in 1 of 10,000 cases; then the second cannot listen there, and says so.
    """
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS
