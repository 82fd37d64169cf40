"""``RankContext``: the memory, communicators and rank assignments that a device gives to the engine.

``servers/tasks.py`` makes a ``RankContext``; the engine sees nothing else of the device. A context is immutable. After
a membership change the trainer gets a new one, with another rank and communicator.

``RankActivity`` is what the rank does while it trains: sums that the training thread makes, and that other threads
read. ``engine/live_activity.py`` implements ``ActivitySource``; the device's heartbeats and its trace call use it.
Nothing here is done per step: a reader copies sums that exist anyway.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from hoop.collectives.communicator import Communicator
from hoop.errors import HoopError
from hoop.memory import Arena
from hoop.memory.cuda_arena import CudaArena
from hoop.topology import Address
from hoop.transport.base import SharedEndpoint
from hoop.transport.inproc import InprocTransport

_GROUP_BITS = 32


@dataclass(frozen=True)
class RankActivity:
    """Sums since the rank's task began. Readers take differences of two of them."""

    steps: int = 0
    load_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    communicate_s: float = 0.0
    update_s: float = 0.0
    idle_s: float = 0.0
    """Waiting for other ranks."""
    bytes_sent: int = 0
    """To other ranks, over links and through shared memory."""
    shards: tuple[int, ...] = ()
    """Shards that the rank computes in a step."""
    stages: tuple[int, ...] = ()
    """Stages of the model that the rank holds."""


@dataclass(frozen=True)
class InstructionSpan:
    """One instruction of a trace."""

    instruction: str
    category: str
    start: float
    """Seconds since 1970, by this machine's clock."""
    seconds: float


@dataclass(frozen=True)
class StepTrace:
    """The instructions of a few steps of one rank."""

    rank: int
    first_step: int
    """Steps done in the job when the trace began."""
    steps: int
    spans: tuple[InstructionSpan, ...]


@dataclass(frozen=True)
class RankProgress:
    """Whether a rank gets on with its work."""

    count: object
    """Equal as long as the rank makes no progress."""
    step: int
    """Number of the step under way."""
    hang_s: float
    """The setting of this name."""
    limit_s: float
    """Seconds without progress after which the rank hangs; 0: never."""
    unusual_limit_s: float
    """The same for what may take long: a first step, an evaluation, the loading of data."""
    on_gpu: bool


class ActivitySource(Protocol):
    """The trainer of one rank, as other threads see it."""

    def progress(self) -> RankProgress | None:
        """How far the rank is; None: it is not watched. Any thread may call it; it does not wait."""

    def read(self) -> RankActivity:
        """The newest sums. Any thread may call it; it does not wait."""

    def trace(self, steps: int, timeout_s: float) -> StepTrace:
        """Records the next ``steps`` steps; returns fewer if ``timeout_s`` is over before."""


@dataclass(frozen=True)
class RankContext:
    """One rank's view of a job, for one generation of its membership."""

    arena: Arena
    communicator: Communicator
    """Connects all ranks."""
    group: Callable[[Sequence[int]], Communicator]
    """Returns a communicator of these ranks, which include this one. Cached: equal ranks give the same object."""
    local_rank_and_size: tuple[int, int] = (0, 1)
    """Index of this device among the job's devices on this host, and their number."""

    wait_reassignment: Callable[[float, HoopError | None], RankContext] | None = None
    """``(timeout_s, error)``: closes the links and blocks until the coordinator assigns a rank in a newer generation.

    ``error`` reports why the ranks of the last generation could not continue (a part of the state is lost, memory is
    too small), or is None; the coordinator then waits for more devices, or ends the job with that error. Raises
    ``MembershipChanged`` when the coordinator has released this device, and ``DeadlineExceeded`` after ``timeout_s``.
    The field is None if the run is not elastic.
    """
    reassignment_ready: Callable[[], bool] = lambda: False
    """True if all ranks have a rank in a planned next generation, to be taken after a step that all ranks agree on."""
    commit_reassignment: Callable[[], RankContext] | None = None
    """Takes that rank. The links of the old generation stay open until the new context's ``close_previous_links``."""
    close_previous_links: Callable[[], None] = lambda: None
    """Called once every rank has reached this generation."""

    job_id: int = 0
    device: int = 0
    """Device id in the cluster; 0: the device has no id, only a rank."""
    joining: bool = False
    """The job runs on other devices. This context is for loading code and data, with a world of one rank."""
    future_size: int = 0
    """Ranks of the job that this rank will train with, if it only sets up alone in this context; 0: it trains here.

    The engine checks memory for that many ranks, and allocates gradient slots when the rank begins.
    """
    wait_delivered: Callable[[float], bool] = lambda timeout: False
    """``wait_delivered(timeout)`` waits until a watcher was sent all emitted events; False if that takes longer."""
    publish_activity: Callable[[ActivitySource | None], None] = lambda source: None
    """Gives the device a source of this rank's activity, which its heartbeats read; None: there is none any more."""
    inject_faults: Callable[[Any], None] | None = None
    """For tests: attaches the fault injector to this rank's executor. None: no faults."""
    hosts: tuple[str, ...] = ()
    """Host of each rank; empty: all ranks are on one host."""
    persistent_memory: bool = False
    """The arena survives this process: a restarted device finds it again."""
    run: str = ""
    """Run id. If it is empty, no state in the arena is taken as state of this run."""
    left_out: bool = False
    """The other ranks continued without this device, which they took for dead: its state may be stale."""
    gpu_arenas: list[CudaArena] = field(default_factory=list)
    """The device's arenas on GPUs, of all its jobs. A job adds its own, and removes it when it closes it."""

    @property
    def oversubscription(self) -> float:
        """Devices of this job per core of this host."""
        return self.local_rank_and_size[1] / (os.cpu_count() or 1)

    @property
    def shared_cores(self) -> int | None:
        """Cores of this host, if all ranks are on it and outnumber them: then equal on all ranks. Else None."""
        cores = os.cpu_count() or 1
        return cores if len(set(self.hosts)) <= 1 and self.size > cores else None

    @property
    def rank(self) -> int:
        return self.communicator.rank

    @property
    def size(self) -> int:
        return self.communicator.size

    @property
    def linked(self) -> bool:
        """True if ranks talk over links, not only through shared memory."""
        return self.size > 1 and not isinstance(self.communicator.endpoint, SharedEndpoint)


def group_id(communicator: int, ranks: Sequence[int]) -> int:
    """The id of the communicator of some ranks of ``communicator``, whose own id has at most 32 bits.

    The upper 32 bits have a bit for each rank, so no two groups have the same id. Above rank 31 they are a checksum of
    the ranks: two groups with a rank in common have the same id in one of four billion cases.
    """
    if max(ranks) < _GROUP_BITS:
        upper = sum(1 << rank for rank in ranks)
    else:
        upper = zlib.crc32(" ".join(map(str, ranks)).encode())
    return communicator | upper << _GROUP_BITS


def single_rank(context: RankContext) -> RankContext:
    """The same device in a world of size 1: a rank sets up alone when its peers have failed, and trains with others."""
    transport = InprocTransport(Address("alone", 0))
    one = Communicator(transport.endpoint(0, 1, 0, [transport.address]))
    return replace(context, communicator=one, group=lambda ranks: one, hosts=(), future_size=context.size)
