"""One group's way to its other ranks: the communicator for collectives, the post for messages.

What goes wrong is told here: the first error breaks the group and names the rank that was lost or waited for, by its
number in the group and in the world; every later operation says so at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hoop.collectives.communicator import Communicator, PreparedOperation
from hoop.collectives.exchange import exchange
from hoop.collectives.registry import Operation
from hoop.collectives.work_queue import PendingWork
from hoop.errors import (
    CollectiveMismatch,
    DeadlineExceeded,
    HoopError,
    MembershipChanged,
    PeerError,
    PeerLost,
)
from hoop.memory.dtypes import DType
from hoop.torch_backend.errors import for_torch
from hoop.torch_backend.p2p import P2PEngine
from hoop.torch_backend.tensor_views import Array, Described
from hoop.transport.calls import Call

CULPRIT_SECONDS = 1.0
"""How long an operation that lost a link waits for news of the rank that died, or left, first."""

_OVER = "this process group is destroyed"
_KEPT = 4096
"""Operations that are found at once; then all are looked up anew."""


SOON_SECONDS = 0.002
"""How long the caller of an asynchronous operation may be kept: ranks that train together come together, and then it is
cheaper to finish at once than to hand over to a thread. Later than that, the thread waits."""
T = TypeVar("T")


class GroupLinks:
    """A rank's communicator and post in one group."""

    def __init__(
        self, name: str, communicator: Communicator, post: P2PEngine, world: Sequence[int], timeout: float
    ) -> None:
        self.name = name
        self.rank, self.size = communicator.rank, communicator.size
        self.world = tuple(world)
        """The global rank of every rank of the group."""
        self.timeout = timeout
        self.post = post
        self._communicator = communicator
        self.lane = communicator.lane
        self._ready: dict[tuple[str, int, str, str, int, str, Described | None], PreparedOperation] = {}
        self._calls: dict[Described, Call] = {}
        self._broken: HoopError | None = None
        post.on_death, post.named = self._lost, self.named
        post.open()

    # ---- operations

    def run(
        self,
        collective: str,
        count: int,
        kind: DType,
        source: Array,
        destination: Array,
        timeout: float,
        op: str = "sum",
        root: int = 0,
        compression: str = "",
        what: Described | None = None,
    ) -> None:
        """One planned operation of all ranks; ``what``: the call that it is made for, if not for itself."""
        ready = self._operation(collective, count, kind, op, root, compression, what)
        ready(source, destination, time.monotonic() + timeout)

    def begin_all_reduce(
        self, data: Array, kind: DType, op: str, timeout: float
    ) -> Callable[[], None] | None:
        """An all_reduce in place, if the others come soon; else how to go on with it."""
        ready, now = self._operation("all_reduce", data.size, kind, op, 0), time.monotonic()
        return ready.begin(data, data, now + min(SOON_SECONDS, timeout), now + timeout)

    def _operation(
        self,
        collective: str,
        count: int,
        kind: DType,
        op: str,
        root: int,
        compression: str = "",
        what: Described | None = None,
    ) -> PreparedOperation:
        key = collective, count, kind.name, op, root, compression, what
        ready = self._ready.get(key)
        if ready is None:
            if len(self._ready) >= _KEPT:
                self._ready.clear()
            operation = Operation(collective, count, kind, op, root=root, compression=compression)
            ready = self._ready[key] = self._communicator.ready(operation, str(what) if what else "")
        return ready

    def exchange(
        self, sources: Sequence[Array], destinations: Sequence[Array], what: Described, timeout: float
    ) -> None:
        """Message i goes to rank i, of whatever length; all ranks must agree on ``what``."""
        call = self._calls.get(what)
        if call is None:
            if len(self._calls) >= _KEPT:
                self._calls.clear()
            call = self._calls[what] = self._communicator.call(str(what))
        exchange(self._communicator, call, sources, destinations, time.monotonic() + timeout)

    def start(
        self, work: PendingWork, job: Callable[[float], None], timeout: float, entered: bool = False
    ) -> None:
        """Attempts an operation behind those that were started before, and returns at once."""
        try:
            self.lane.start(work, partial(self.attempt, work.title, job, timeout), entered)
        except PeerLost as error:
            raise for_torch(PeerLost, f"{work.title}: {_OVER}") from error

    def attempt(self, title: str, job: Callable[[float], T], timeout: float) -> T:
        """Runs an operation; what goes wrong on the way is told with names, and breaks the group."""
        if self._broken is not None:
            raise for_torch(type(self._broken), f"{self.who}: {title} cannot run any more: {self._broken}")
        try:
            return job(timeout)
        except (PeerError, MembershipChanged, CollectiveMismatch) as error:
            raise self._explained(title, error, timeout) from error
        except HoopError as error:
            raise for_torch(type(error), f"{self.who}: {title}: {error}") from error
        except BaseException as error:  # an interrupt, perhaps: nobody knows how far it had come
            self._break(PeerLost(f"{title} was broken off on this rank: {error!r}"))
            raise

    # ---- errors

    @property
    def who(self) -> str:
        return f"{self.named(self.rank)} of group {self.name!r}"

    def named(self, rank: int) -> str:
        return f"rank {rank} (global rank {self.world[rank]})"

    def _lost(self, peer: int, why: str) -> None:
        """A peer is gone without a word; from the post's thread."""
        self._break(PeerLost(f"{self.named(peer)} {why}"))

    def _break(self, error: HoopError) -> None:
        self._broken = self._broken or error
        self._communicator.endpoint.abort(error)

    def _explained(self, title: str, error: HoopError, timeout: float) -> HoopError:
        absent = self.post.first_absent(CULPRIT_SECONDS) if isinstance(error, PeerLost) else None
        if absent is not None and (reason := f"{self.named(absent[0])} {absent[1]}") not in str(error):
            error = PeerLost(f"{reason}; {error}")
        self._break(error)
        return self.told(title, error, timeout)

    def told(self, title: str, error: HoopError, timeout: float) -> HoopError:
        """An error as the user gets it: who, what, and what happened."""
        what = f"ran into its timeout of {timeout:g} s" if isinstance(error, DeadlineExceeded) else "failed"
        return for_torch(type(error), f"{self.who}: {title} {what}: {error}{self._legend}")

    @property
    def _legend(self) -> str:
        """Which global ranks the group's are, where they differ."""
        if self.world == tuple(range(self.size)):
            return ""
        return f" (ranks of this group are global ranks {', '.join(map(str, self.world))})"

    def close(self) -> None:
        """Says goodbye and closes every link; operations under way end with an error."""
        self._broken = self._broken or PeerLost(_OVER)
        self.post.close()
        self._communicator.close()
