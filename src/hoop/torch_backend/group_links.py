"""One rank's connections in one process group: the communicator for collectives, the P2P engine for messages.

This module also turns Hoop's errors into the errors that the user of torch.distributed sees. The first error breaks
the group: it names the rank that died or was waited for, by its rank in the group and its global rank. Every later
operation of the group fails at once with the same reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

from hoop.collectives.communicator import Communicator, PreparedOperation
from hoop.collectives.link_executor import all_to_all_v
from hoop.collectives.registry import Operation
from hoop.collectives.work_queue import PendingWork
from hoop.errors import CollectiveMismatch, DeadlineExceeded, HoopError, MembershipChanged, PeerError, PeerLost
from hoop.memory.dtypes import DType
from hoop.torch_backend.errors import torch_error
from hoop.torch_backend.late_ranks import WaitWatch, patience
from hoop.torch_backend.p2p import P2PEngine
from hoop.torch_backend.tensor_views import Array, Described
from hoop.transport.call_check import Call

INLINE_WAIT_SECONDS = 0.002
"""How long an asynchronous all_reduce may block its caller. Ranks that train together usually arrive together; then
finishing in the caller's thread is cheaper than a hand-over. After this time the work queue's thread waits instead."""

_DESTROYED = "this process group is destroyed"
_CACHE_SIZE = 4096
"""Entries of each cache of prepared operations and calls; a full cache is cleared."""
T = TypeVar("T")


class GroupLinks:
    """A rank's communicator and P2P engine in one process group."""

    def __init__(
        self, name: str, communicator: Communicator, p2p: P2PEngine, world: Sequence[int], timeout: float
    ) -> None:
        self.name = name
        self.rank, self.size = communicator.rank, communicator.size
        self.world = tuple(world)
        """The global rank of each rank of the group."""
        self.timeout = timeout
        """Default timeout of an operation, in seconds."""
        self.p2p = p2p
        self._communicator = communicator
        self.endpoint = communicator.endpoint
        self.on_close: list[Callable[[], None]] = []
        """Called by ``close`` after the links are closed."""
        self.on_break: list[Callable[[], None]] = []
        """Called, from any thread, when a rank was lost or an operation was broken off."""
        self.before_close: list[Callable[[], None]] = []
        self.work_queue = communicator.work_queue
        self._prepared: dict[tuple[str, int, str, str, int, str, Described | None], PreparedOperation] = {}
        self._calls: dict[Described, Call] = {}
        self._broken: HoopError | None = None
        """The error that broke the group; None while it works."""
        p2p.on_peer_death, p2p.rank_label = self._on_peer_death, self.rank_label
        p2p.start()
        self._watch = WaitWatch(f"hoop-{name}-watch", timeout, self._waits) if self.size > 1 else None

    # ---- operations

    def try_all_reduce(self, data: Array, kind: DType, op: str, timeout: float) -> Callable[[], None] | None:
        """Runs an in-place all_reduce if the other ranks arrive within INLINE_WAIT_SECONDS.

        Returns None if it is done, else the function that resumes it.
        """
        prepared, now = self.prepared("all_reduce", data.size, kind, op), time.monotonic()
        return prepared.try_run(data, data, now + min(INLINE_WAIT_SECONDS, timeout), now + timeout)

    def prepared(
        self,
        collective: str,
        count: int,
        kind: DType,
        op: str = "sum",
        root: int = 0,
        compression: str = "",
        description: Described | None = None,
    ) -> PreparedOperation:
        """One collective, to be called with source, destination and deadline in a thread that holds the work queue.

        ``description``: the torch call that it is part of, which all ranks compare; None: the collective itself.
        """
        key = collective, count, kind.name, op, root, compression, description
        prepared = self._prepared.get(key)
        if prepared is None:
            if len(self._prepared) >= _CACHE_SIZE:
                self._prepared.clear()
            operation = Operation(collective, count, kind, op, root=root, compression=compression)
            prepared = self._prepared[key] = self._communicator.prepared(
                operation, str(description) if description else ""
            )
        return prepared

    def native_sum(self, count: int, kind: DType) -> PreparedOperation | None:
        """The in-place sum of this many elements, if it has run before and runs in the native core; else None."""
        prepared = self.prepared("all_reduce", count, kind)
        return prepared if prepared.native is not None else None

    def exchange(
        self, sources: Sequence[Array], destinations: Sequence[Array], description: Described, timeout: float
    ) -> None:
        """Sends ``sources[i]`` to rank i, of any length; all ranks must pass the same ``description``."""
        endpoint, deadline = self._communicator.endpoint, time.monotonic() + timeout
        all_to_all_v(endpoint, self.call(description), sources, destinations, deadline)

    def call(self, description: Described) -> Call:
        """The call that the ranks of this group compare."""
        call = self._calls.get(description)
        if call is None:
            if len(self._calls) >= _CACHE_SIZE:
                self._calls.clear()
            call = self._calls[description] = self._communicator.call(str(description))
        return call

    def submit(self, work: PendingWork, job: Callable[[float], None], timeout: float, acquired: bool = False) -> None:
        """Queues a job behind the jobs submitted before it, and returns at once.

        ``acquired``: the caller holds the work queue and passes on the rest of its operation, which runs next.
        """
        try:
            self.work_queue.submit(work, partial(self.run_guarded, work.title, job, timeout), acquired)
        except PeerLost as error:
            raise torch_error(PeerLost, f"{work.title}: {_DESTROYED}") from error

    def run_guarded(self, title: str, job: Callable[[float], T], timeout: float) -> T:
        """Returns ``job(timeout)``; an error is raised as the user's error, and if ranks may now differ in how far
        they are, it breaks the group."""
        if self._broken is not None:
            raise torch_error(type(self._broken), f"{self.own_label}: {title} cannot run any more: {self._broken}")
        try:
            return job(timeout)
        except (PeerError, MembershipChanged, CollectiveMismatch) as error:
            raise self._diagnose(title, error, timeout) from error
        except HoopError as error:
            raise torch_error(type(error), f"{self.own_label}: {title}: {error}") from error
        except BaseException as error:  # for example an interrupt: the operation may have stopped anywhere
            self._break(PeerLost(f"{title} was broken off on this rank: {error!r}"))
            raise

    def _waits(self) -> dict[Hashable, str]:
        """What operations of this rank wait for now (``WaitWatch``)."""
        if self._broken is not None:
            return {}
        waits: dict[Hashable, str] = {request: f"{self.own_label}: {request}" for request in self.p2p.pending()}
        peers, state = self.endpoint.current_wait()
        if peers:
            ranks = ", ".join(map(self.rank_label, peers))
            waits[state] = f"{self.own_label}: a collective waits for {ranks}"
        return waits

    # ---- errors

    @property
    def own_label(self) -> str:
        return f"{self.rank_label(self.rank)} of group {self.name!r}"

    def rank_label(self, rank: int) -> str:
        return f"rank {rank} (global rank {self.world[rank]})"

    def _on_peer_death(self, peer: int, reason: str) -> None:
        """Called by the P2P engine's thread when a peer's link ends without a goodbye."""
        self._break(PeerLost(f"{self.rank_label(peer)} {reason}"))

    def _break(self, error: HoopError) -> None:
        self._broken = self._broken or error
        self._communicator.endpoint.abort(error)
        if not isinstance(error, CollectiveMismatch):  # then all ranks are there, and earlier operations go on
            for release in self.on_break:
                release()

    @property
    def error(self) -> HoopError | None:
        """The error that has broken the group, or that it is closed; None while it works."""
        return self._broken

    @property
    def broken(self) -> bool:
        """Whether an error has broken the group, or it is closed."""
        return self._broken is not None

    def check_working(self) -> None:
        """Raises the error that has broken the group, if there is one."""
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))

    def _diagnose(self, title: str, error: HoopError, timeout: float) -> HoopError:
        """Breaks the group and returns the user's error, which names the rank that died or left first."""
        departed = None
        if isinstance(error, PeerLost):
            departed = self.p2p.first_departed(error.rank, patience(self.timeout))
        if departed is not None and (reason := f"{self.rank_label(departed[0])} {departed[1]}") not in str(error):
            error = PeerLost(f"{reason}; {error}")
        self._break(error)
        return self.user_error(title, error, timeout)

    def user_error(self, title: str, error: HoopError, timeout: float) -> HoopError:
        """The error as torch.distributed raises it: rank, operation, cause."""
        what = f"ran into its timeout of {timeout:g} s" if isinstance(error, DeadlineExceeded) else "failed"
        return torch_error(type(error), f"{self.own_label}: {title} {what}: {error}{self._rank_mapping}")

    @property
    def _rank_mapping(self) -> str:
        """The global ranks of the group as a note for errors; empty where they equal the group's ranks."""
        if self.world == tuple(range(self.size)):
            return ""
        return f" (ranks of this group are global ranks {', '.join(map(str, self.world))})"

    # ---- closing

    def close(self) -> None:
        """Says goodbye to all peers and closes every link; pending operations fail."""
        if self._watch is not None:
            self._watch.close()
        for finish in self.before_close:
            finish()
        self._broken = self._broken or PeerLost(_DESTROYED)
        self.p2p.close()
        self._communicator.close()
        for close in self.on_close:
            close()
