"""How ranks that have called ``hvd.join`` take part in the collectives of the others.

A rank that has joined does not know what the others call next. The backend has no coordinator to ask, and a message
before every collective would slow down programs that never join. So a rank says what it calls only when somebody has
asked: a rank that waits longer than ``PATIENCE_S`` for a collective looks into the store, and if a rank has joined, it
publishes the calls that are not finished, and from then on every call as it begins. The joined rank makes the same
call with values that change nothing (zeros for a sum).

Keys in the store, below ``horovod/join/<epoch>``; an epoch ends when all ranks have joined:

    any               set by the first rank that joins
    calls/<rank>      how many collectives this rank had called when it joined
    joined            how many ranks have joined
    last              the rank that joined last
    call/<number>     a ``Call``, as JSON
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

from hoop.errors import DeadlineExceeded, InternalError
from hoop.horovod.errors import peer_errors

PATIENCE_S = 0.05
KEPT_CALLS = 4096
_POLL_SHARE, _LONGEST_POLL_S = 0.1, 0.02


class Kind(Enum):
    """A collective that a joined rank can take part in."""

    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    REDUCE_SCATTER = "reduce_scatter"
    BARRIER = "barrier"
    BROADCAST_OBJECT = "broadcast_object"
    ALL_GATHER_OBJECT = "all_gather_object"


@dataclass(frozen=True)
class Call:
    """One collective of the global process set, as the other ranks need to know it."""

    kind: Kind
    shape: tuple[int, ...] = ()
    dtype: str = ""
    """Name of the elements' type in ``torch``, such as float32."""
    device: str = "cpu"
    reduction: str = ""
    """Name of a ``Reduction``."""
    root: int = 0

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "kind": self.kind.value})

    @classmethod
    def from_json(cls, text: bytes) -> Call:
        fields = json.loads(text)
        return cls(**{**fields, "kind": Kind(fields["kind"]), "shape": tuple(fields["shape"])})


class JoinLedger:
    """Counts the collectives of this rank on the global process set, and publishes them when a rank has joined."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._epoch = 0
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._calls = 0
        self._recent: deque[Call] = deque(maxlen=KEPT_CALLS)
        self._publishing = self._has_joined = False

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("horovod/join", self._epoch, *parts)))

    # ---- a rank that has not joined

    def record(self, call: Call) -> None:
        """Called before each collective of the global process set begins."""
        if self._size == 1 or self._has_joined:
            return
        self._recent.append(call)
        self._calls += 1
        if self._publishing:
            self._publish(self._calls - 1, call)

    def wait(self, work: Any) -> None:
        """Waits for an operation of the backend; publishes calls if a rank has joined."""
        with peer_errors():
            if work.is_completed():
                work.wait()
                return
            while True:
                try:
                    work.wait(timedelta(seconds=PATIENCE_S))
                    return
                except DeadlineExceeded:
                    if work.is_completed():  # it failed by the deadline of the operation, not of this wait
                        raise
                self.answer_joined()

    def answer_joined(self) -> None:
        """Publishes the calls of this rank if another has joined."""
        if self._publishing or self._size == 1:
            return
        try:
            asked = self._store.check([self._key("any")])
        except RuntimeError:  # the rank that has the store is lost: the operation that is waited for says so
            return
        if asked:
            self._publish_all()

    def _publish_all(self) -> None:
        self._publishing = True
        first = self._calls - len(self._recent)
        for number, call in enumerate(self._recent, first):
            self._publish(number, call)

    def _publish(self, number: int, call: Call) -> None:
        with contextlib.suppress(RuntimeError):  # the store is lost, and with it a rank: the operation says so
            self._store.set(self._key("call", number), call.to_json())

    # ---- a rank that has joined

    def join(self, take_part: Callable[[Call], None], timeout_s: float) -> int:
        """Takes part in the calls of the others until all have joined; returns the rank that joined last.

        ``take_part``: makes a call with values that change nothing. ``timeout_s``: for each of the others' calls.
        """
        if self._size == 1:
            return self._rank
        store = self._store
        store.set(self._key("any"), "1")
        self._publish_all()  # calls that this rank has not waited for
        self._has_joined = True
        store.set(self._key("calls", self._rank), str(self._calls))
        if store.add(self._key("joined"), 1) == self._size:
            store.set(self._key("last"), str(self._rank))
        while self._wait_call(timeout_s):
            call = Call.from_json(store.get(self._key("call", self._calls)))
            self._calls += 1
            take_part(call)
        last = int(store.get(self._key("last")))
        self._epoch += 1
        self._begin_epoch()
        return last

    def _wait_call(self, timeout_s: float) -> bool:
        """Waits for the next call of another rank; False if all have joined and there is none."""
        start = time.monotonic()
        while True:
            everyone = self._store.check([self._key("last")])
            if self._store.check([self._key("call", self._calls)]):
                return True
            if everyone:
                counts = [int(self._store.get(self._key("calls", rank))) for rank in range(self._size)]
                if max(counts) <= self._calls:
                    return False
                if max(counts) - self._calls > KEPT_CALLS:
                    raise InternalError(f"a rank is {max(counts) - self._calls} calls ahead of this one, which joined")
            waited = time.monotonic() - start
            if waited > timeout_s:
                raise DeadlineExceeded(
                    f"join: rank {self._rank} has waited {timeout_s:g} s for the next collective of the other ranks"
                )
            time.sleep(min(0.001 + _POLL_SHARE * waited, _LONGEST_POLL_S))
