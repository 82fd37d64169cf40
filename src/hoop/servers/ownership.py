"""Who may write the journal in etcd: the coordinator whose name the owner key holds.

    owner key ── hangs on ──▶ a lease of etcd's ◀── renewed by ── the owner, from a thread

A coordinator that dies takes its lease with it, etcd deletes the key, and whoever waits for that puts its own name
there. The revision at which that happened is the owner's term: every write compares it, so whoever was stopped, or
cut off, and does not know yet that it is the owner no longer, cannot write. By its own clock it knows when its lease
is over at the latest, and ends before that of etcd does.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from itertools import repeat

from hoop.errors import DeadlineExceeded, HoopError, PeerLost
from hoop.wire.channels import Knocking
from hoop.wire.etcd import TRY_S, Etcd
from hoop.wire.generated import etcd_pb2 as pb

START_S = 5.0
"""How long etcd may take to answer for the first time."""
LOOK_S = 5.0
"""How long one watch of another's key lasts, before it is looked at again."""
AGAIN_S = 0.2
Tell = Callable[[str], None]


class Ownership:
    """The right to write, while the lease lasts."""

    def __init__(
        self,
        etcd: Etcd,
        where: str,
        key: bytes,
        who: str,
        lease_s: float,
        on_lost: Callable[[PeerLost], None],
    ) -> None:
        """``on_lost`` is called, from a thread, when it is over without having been asked for."""
        self.key, self.term = key, 0
        self._etcd, self._where, self._who, self._on_lost = etcd, where, who, on_lost
        self._ttl, self._lease, self._until = math.ceil(lease_s), 0, 0.0
        self._away = ""
        self._lost: PeerLost | None = None
        self._closing, self._soon = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="hoop journal lease", daemon=True)

    # ---- taking it

    def take(self, tell: Tell) -> None:
        """Returns when the journal is ours; while it is another's, says whose, and waits for the end of its lease."""
        knocking = Knocking("etcd", self._etcd.endpoints, START_S)
        pauses: Iterator[float] = knocking.pauses()
        say = _once(tell)
        while not self._closing.is_set():
            try:
                owner = self._owner()
                if owner is None:
                    self._claim()
                elif self._lease and owner.lease == self._lease:
                    self.term = owner.create_revision
                    self._thread.start()
                    return
                else:
                    say(f"journal {self._where}: waiting, it belongs to {_name(owner)}")
                    self._etcd.until_deleted(self.key, owner.mod_revision + 1, LOOK_S)
                    pauses = repeat(AGAIN_S)  # etcd is there: that it is away later is no reason to give up
            except DeadlineExceeded as error:
                knocking.heard(str(error))
                say(f"journal {self._where}: etcd does not answer, trying again")
                self._closing.wait(next(pauses))
        raise PeerLost(f"journal {self._where}: closed while it was waited for")

    def _owner(self) -> pb.KeyValue | None:
        found = self._etcd.ask("Range", pb.RangeRequest(key=self.key), START_S)
        return found.kvs[0] if found.kvs else None

    def _claim(self) -> None:
        """Puts our name where there is none; whether another was faster, the next look shows."""
        sent = time.monotonic()
        granted = self._etcd.ask("LeaseGrant", pb.LeaseGrantRequest(TTL=self._ttl), START_S)
        self._lease, self._ttl, self._until = granted.ID, granted.TTL, sent + granted.TTL
        free = pb.Compare(target=pb.Compare.CREATE, key=self.key, create_revision=0)
        put = pb.PutRequest(key=self.key, value=self._who.encode(), lease=self._lease)
        txn = pb.TxnRequest(compare=[free], success=[pb.RequestOp(request_put=put)])
        self._etcd.ask("Txn", txn, START_S)

    # ---- holding it

    @property
    def ours(self) -> pb.Compare:
        """What every write compares."""
        return pb.Compare(target=pb.Compare.CREATE, key=self.key, create_revision=self.term)

    def check(self) -> None:
        """Raises if it is known that nothing can be written."""
        if self._lost is not None:
            raise self._lost
        if self._away:
            raise DeadlineExceeded(f"journal {self._where} is away, and nothing can be changed: {self._away}")

    def doubt(self, reason: str) -> None:
        """etcd did not answer: the journal is away, until a renewal gets through."""
        self._away = reason
        self._soon.set()

    def lose(self, why: str) -> PeerLost:
        """It is over."""
        if self._lost is None:
            text = "this coordinator owns it no longer, and stops; devices and jobs go on"
            self._lost = PeerLost(f"journal {self._where}: {why}: {text}")
            self._on_lost(self._lost)
        return self._lost

    def lose_to(self, owner: pb.KeyValue | None) -> PeerLost:
        another = owner is not None and owner.create_revision != self.term
        return self.lose(f"it was taken over by {_name(owner)}" if owner and another else "its lease ended")

    def _renew(self) -> None:
        while True:
            left = self._until - time.monotonic()
            self._soon.wait(min(AGAIN_S if self._away else self._ttl / 3, max(0.0, left)))
            self._soon.clear()
            if self._closing.is_set() or self._lost:
                return
            sent = time.monotonic()
            if sent >= self._until and self._away:
                self.lose(f"its lease of {self._ttl} s was not renewed in time ({self._away})")
                return
            try:
                # After its time, by our clock, a lease is not asked for: this process slept, and hears who is awake.
                ttl = self._etcd.renew(self._lease, self._until - sent) if sent < self._until else 0
                if ttl <= 0:
                    self.lose_to(self._owner())
                    return
                self._until, self._away = sent + ttl, ""
            except HoopError as error:
                self.doubt(str(error))
                self._soon.clear()

    def close(self) -> None:
        """Gives it back: whoever waits need not wait for the lease to end."""
        self._closing.set()
        self._soon.set()
        if self._thread.is_alive():
            self._thread.join()
            with contextlib.suppress(HoopError):  # it ends by itself
                self._etcd.ask("LeaseRevoke", pb.LeaseRevokeRequest(ID=self._lease), TRY_S)


def _once(tell: Tell) -> Tell:
    """Tells what is new, compared with what was told last."""
    said = ""

    def say(text: str) -> None:
        nonlocal said
        if text != said:
            tell(text)
        said = text

    return say


def _name(owner: pb.KeyValue) -> str:
    text = owner.value.decode(errors="replace")[:200]
    return "".join(one if one.isprintable() else "?" for one in text)
