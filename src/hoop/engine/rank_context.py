"""What a device gives a worker: memory, and the other ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hoop.collectives.communicator import Communicator
from hoop.errors import HoopError
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport.base import SharedEndpoint
from hoop.transport.inproc import InprocTransport


@dataclass(frozen=True)
class RankContext:
    """One rank's place in a job."""

    arena: Arena
    communicator: Communicator
    """Of all ranks."""
    group: Callable[[Sequence[int]], Communicator]
    """A communicator of some of the ranks, this one included; the same ranks get the same one."""
    neighbours: tuple[int, int] = (0, 1)
    """Which of the job's devices on this host this is, and how many there are."""

    reseated: Callable[[float, HoopError | None], RankContext] | None = None
    """Waits, at most this many seconds, for a rank among the devices that are there now; None: nobody assigns ranks.

    The error, if there is one, is what the ranks that met last could not go on without.
    """
    moving: Callable[[], bool] = lambda: False
    """Whether there is another world to move to, for everybody, after a step that all agree on."""
    moved: Callable[[], RankContext] | None = None
    """That world; the links of this one stay open until everybody is there, and that one ``settled``."""
    settled: Callable[[], None] = lambda: None

    device: int = 0
    """The number by which a device is known to others; 0: only its rank is."""
    befall: Callable[[Any], None] | None = None
    """What is to go wrong with this rank's worker, which it is given: for tests. None: nothing."""
    hosts: tuple[str, ...] = ()
    """The machine of each rank, by rank; empty: all are on one."""
    outlives: bool = False
    """Whether the arena is there for who is restarted on it."""
    run: str = ""
    """This run's own name; empty: it has none, and nothing in the arena is believed to be of it."""
    left_out: bool = False
    """The others went on without this device: what it knows of the run may be of long ago."""

    @property
    def crowding(self) -> float:
        """Devices of this job a core of this host."""
        return self.neighbours[1] / (os.cpu_count() or 1)

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def size(self) -> int:
        return self.communicator.size

    @property
    def linked(self) -> bool:
        """Whether ranks have connections between them, and not memory that they share alone."""
        return self.size > 1 and not isinstance(self.communicator.endpoint, SharedEndpoint)


def alone(world: RankContext) -> RankContext:
    """A place to get ready in, for one whose peers are in trouble: the same device, and nobody else."""
    transport = InprocTransport(Address("alone", 0))
    one = Communicator(transport.endpoint(0, 1, 0, [transport.address]))
    return replace(world, communicator=one, group=lambda ranks: one, hosts=())


def settle(world: RankContext, threads: int, pin: bool) -> None:
    """Gives the calling thread its cores: devices of one host do not fight for the same ones."""
    torch.set_num_threads(threads)
    if not pin or not hasattr(os, "sched_setaffinity"):
        return
    index, count = world.neighbours
    cores = apart(sorted(os.sched_getaffinity(0)))
    if count * threads > len(cores) and threads > 1:
        return  # more than there are: the scheduler knows best
    mine = {cores[(index * threads + offset) % len(cores)] for offset in range(threads)}
    os.sched_setaffinity(0, mine)


def apart(cores: Sequence[int]) -> list[int]:
    """Cores in an order in which the first ones share nothing: two threads of one core come far from each other."""
    seen: dict[str, int] = {}
    turns = []
    for core in cores:
        place = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            siblings = place.read_text()
        except OSError:
            siblings = str(core)
        seen[siblings] = seen.get(siblings, 0) + 1
        turns.append((seen[siblings], core))
    return [core for _, core in sorted(turns)]
