"""etcd's v3 API, as far as a journal needs it: spoken to whichever of its endpoints answers.

Every call has a deadline. etcd ends connections that are pinged more often than every five seconds, so there is no
keepalive here: a call that gets no answer goes to the next endpoint.

Who may write the journal in etcd: the coordinator whose name the owner key holds.

    owner key ── hangs on ──▶ a lease of etcd's ◀── renewed by ── the owner, from a thread

A coordinator that dies takes its lease with it, etcd deletes the key, and whoever waits for that puts its own name
there. The revision at which that happened is the owner's term: every write compares it, so whoever was stopped, or
cut off, and does not know yet that it is the owner no longer, cannot write. By its own clock it knows when its lease
is over at the latest, and ends before that of etcd does.

The journal in etcd, for coordinators on several machines: one writes, the others wait to take over.

    PREFIX/owner                       who writes, while its lease lasts (``ownership``)
    PREFIX/current                     the term whose entries count
    PREFIX/entries/TERM/NUMBER         the lines of one step, checksummed as in a file

A new owner writes a snapshot under its own term, then makes it current and deletes what was before, as one. An
append compares the owner's term and that its number is still free: of two coordinators one writes, the other ends.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import grpc

from hoop.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HoopError,
    InvalidArgument,
    NotFound,
    PeerLost,
    ResourceExhausted,
    UserError,
    named,
)
from hoop.membership.failure_detector import DetectorConfig
from hoop.membership.journal import Entry, decode, encode, restore, snapshot
from hoop.membership.state import State
from hoop.topology import Addresses
from hoop.wire.channels import MAX_MESSAGE_BYTES, Backoff
from hoop.wire.generated import etcd_pb2 as pb
from hoop.wire.service import Stub, unreachable
from hoop.wire.tls import AUTHORITY, CERTIFICATE, KEY
from hoop.wire.tokens import check_private

TRY_S = 1.0
"""How long one endpoint may take before the next is asked."""
_SERVICES = [pb.DESCRIPTOR.services_by_name[name] for name in ("KV", "Lease", "Watch")]
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class Etcd:
    """A connection to etcd. It may be used by several threads."""

    def __init__(self, endpoints: Addresses, tls: Path | None = None) -> None:
        """``tls``: a folder with the authority of etcd's certificate and, where etcd asks for one, our own."""
        self.endpoints = endpoints
        secure = _credentials(tls) if tls else None
        self._channels = [
            grpc.secure_channel(str(one), secure, options=_OPTIONS)
            if secure
            else grpc.insecure_channel(str(one), options=_OPTIONS)
            for one in endpoints.each
        ]
        self._methods = [
            {method.name: getattr(stub, method.name) for stub, service in stubs for method in service.methods}
            for channel in self._channels
            for stubs in [[(Stub(channel, service), service) for service in _SERVICES]]
        ]
        self._current = 0

    def ask(self, method: str, request: Any, within: float) -> Any:
        """The first answer to a call: of the endpoint that answered last, else of the others in turn."""
        for answer in self._answers(method, request, within):
            return answer
        raise DeadlineExceeded(f"etcd at {self.endpoints} ended {method} without an answer")

    def renew(self, lease: int, within: float) -> int:
        """For how many seconds from now on a lease is good; 0: it is over."""
        request = pb.LeaseKeepAliveRequest(ID=lease)
        answer: pb.LeaseKeepAliveResponse = self.ask("LeaseKeepAlive", request, within)
        return answer.TTL

    def until_deleted(self, key: bytes, since: int, within: float) -> None:
        """Returns when a key was deleted after that revision, or the time is over."""
        create = pb.WatchCreateRequest(key=key, start_revision=since)
        until = time.monotonic() + within
        try:
            for answer in self._answers("Watch", pb.WatchRequest(create_request=create), within, within):
                if answer.canceled or any(one.type == pb.Event.DELETE for one in answer.events):
                    return
        except DeadlineExceeded:
            if time.monotonic() < until:
                raise

    def _answers(self, method: str, request: Any, within: float, a_try: float = TRY_S) -> Iterator[Any]:
        until = time.monotonic() + within
        whom = f"etcd at {self.endpoints}"
        reason = "no answer"
        for _ in self._methods:
            index, left = self._current, until - time.monotonic()
            if left <= 0:
                break
            call = self._methods[index][method]
            streaming = method in ("Watch", "LeaseKeepAlive")
            try:
                answers = call(iter([request]) if streaming else request, timeout=min(a_try, left))
                yield from answers if streaming else [answers]
                return
            except grpc.RpcError as error:
                reason = f"{self.endpoints.each[index]}: {error.details() or error.code().name}"
                if not unreachable(error):
                    raise named(error.code().name, f"{whom}: {reason}") from None
            except ValueError as error:  # the channel was closed meanwhile
                reason = str(error)
            self._current = (index + 1) % len(self._methods)
        raise DeadlineExceeded(f"{whom} does not answer ({reason})")

    def close(self) -> None:
        """Ends what is under way, too."""
        for channel in self._channels:
            channel.close()


def _credentials(folder: Path) -> grpc.ChannelCredentials:
    def content(name: str) -> bytes:
        try:
            if name == KEY:
                check_private(folder / name, (folder / name).stat())
            return (folder / name).read_bytes()
        except OSError as error:
            raise NotFound(f"--journal-tls {folder}: {name}: {error.strerror}") from None

    pair = (content(KEY), content(CERTIFICATE)) if (folder / CERTIFICATE).exists() else (None, None)
    return grpc.ssl_channel_credentials(content(AUTHORITY), *pair)


START_S = 5.0
"""How long etcd may take to answer for the first time."""
LOOK_S = 5.0
"""How long one watch of another's key lasts, before it is looked at again."""
AGAIN_S = 0.2
Tell = Callable[[str], None]


class LeaderLease:
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
        knocking = Backoff("etcd", self._etcd.endpoints, START_S)
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


SCHEME = "etcd://"
WRITE_S = 3.0
"""How long a write may take, at all endpoints together; the coordinator does nothing else meanwhile."""
CHUNK_BYTES = 1 << 20
"""Of a snapshot, in one key; etcd takes 1.5 MiB in a request."""
PAGE = 32
"""Keys that are read at once: below the largest message, whatever they hold."""


@dataclass(frozen=True)
class EtcdLocation:
    """Where in etcd a journal is."""

    endpoints: Addresses
    prefix: str
    lease_s: float = 10.0
    tls: Path | None = None

    @classmethod
    def parse(cls, text: str, lease_s: float = 10.0, tls: Path | None = None) -> EtcdLocation:
        """``etcd://HOST:PORT[,HOST:PORT...]/PREFIX``"""
        hosts, _, prefix = text.removeprefix(SCHEME).partition("/")
        if "@" in hosts:  # what stands before it may be a password: it is not repeated
            raise InvalidArgument(
                "--journal: etcd's users are known by certificate, --journal-tls; leave out USER@"
            )
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", prefix, re.ASCII):
            raise InvalidArgument(
                f"--journal: {text[:80]!r} has no prefix for its keys, e.g. {SCHEME}{hosts[:60]}/hoop"
            )
        if not 2 <= lease_s <= 600:
            raise InvalidArgument(f"--journal-lease: {lease_s:g} s is not in 2..600 s")
        return cls(Addresses.parse(hosts, "--journal"), prefix, lease_s, tls)

    def __str__(self) -> str:
        return f"{SCHEME}{self.endpoints}/{self.prefix}"


class EtcdJournal:
    """A journal in etcd; it is open when ``open`` has returned."""

    state: State

    def __init__(self, place: EtcdLocation, who: str, on_lost: Callable[[PeerLost], None]) -> None:
        """``who``: what others are told of the owner. ``on_lost`` is called, from any thread, when it is another's."""
        self._etcd = Etcd(place.endpoints, place.tls)
        self._where, self._root = str(place), place.prefix.encode()
        self._remedy = f"start on another prefix, or delete this one: etcdctl del --prefix {place.prefix}/"
        self._owned = LeaderLease(
            self._etcd, self._where, self._root + b"/owner", who, place.lease_s, on_lost
        )
        self._number = 0

    def open(self, config: DetectorConfig, tell: Tell) -> None:
        """Waits until it is ours, reads it, and writes it anew as a snapshot."""
        self._owned.take(tell)
        entries = self._read()
        self.state = restore(entries, config, time.monotonic(), self._where, self._remedy)
        for lines in _chunks(map(encode, snapshot(self.state))):
            self._write(lines)
        current = pb.PutRequest(key=self._root + b"/current", value=b"%016x" % self._owned.term)
        before = pb.DeleteRangeRequest(
            key=self._root + b"/entries/", range_end=self._folder(self._owned.term)
        )
        done = [pb.RequestOp(request_put=current), pb.RequestOp(request_delete_range=before)]
        if not self._etcd.ask(
            "Txn", pb.TxnRequest(compare=[self._owned.ours], success=done), WRITE_S
        ).succeeded:
            raise self._owned.lose_to(None)

    def append(self, *entries: Entry) -> None:
        """Writes entries, all or none; DEADLINE_EXCEEDED: etcd is away, and none is known to be written."""
        self._write(b"".join(map(encode, entries)))

    def close(self) -> None:
        self._owned.close()
        self._etcd.close()

    # ---- keys

    def _folder(self, term: int) -> bytes:
        return b"%s/entries/%016x/" % (self._root, term)

    def _read(self) -> list[Entry]:
        """What the current term has written: every entry, in order."""
        found = self._etcd.ask("Range", pb.RangeRequest(key=self._root + b"/current"), WRITE_S).kvs
        if not found:
            return []
        if not re.fullmatch(rb"[0-9a-f]{16}", found[0].value):
            raise FailedPrecondition(
                f"journal {self._where}: its key current is no term of Hoop's; {self._remedy}"
            )
        folder = self._folder(int(found[0].value, 16))
        key, end = folder, folder[:-1] + b"0"  # what follows / in the order of bytes
        keys: list[pb.KeyValue] = []
        while True:
            page = self._etcd.ask("Range", pb.RangeRequest(key=key, range_end=end, limit=PAGE), WRITE_S)
            keys += page.kvs
            if not page.more:
                break
            key = keys[-1].key + b"\0"
        entries: list[Entry] = []
        for number, one in enumerate(keys, start=1):
            if one.key != b"%s%016x" % (folder, number):
                raise FailedPrecondition(
                    f"journal {self._where}: entry {number} is not there; {self._remedy}"
                )
            entries += decode(one.value, f"{self._where}, entry {number}", self._remedy, whole=True)
        return entries

    def _write(self, lines: bytes) -> None:
        """The next key, if the journal is ours and nobody has written it.

        A write that got no answer may have been made, or be made later. So the next one finds its number taken, and
        takes the place of what was refused; what comes later than that finds the number taken, too.
        """
        self._owned.check()
        key = b"%s%016x" % (self._folder(self._owned.term), self._number + 1)
        there = 0  # the revision at which the key was written; 0: it was not
        while True:
            txn = pb.TxnRequest(
                compare=[
                    self._owned.ours,
                    pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=there),
                ],
                success=[pb.RequestOp(request_put=pb.PutRequest(key=key, value=lines))],
                failure=[
                    pb.RequestOp(request_range=pb.RangeRequest(key=self._owned.key)),
                    pb.RequestOp(request_range=pb.RangeRequest(key=key)),
                ],
            )
            try:
                answer: pb.TxnResponse = self._etcd.ask("Txn", txn, WRITE_S)
            except DeadlineExceeded as error:
                self._owned.doubt(str(error))
                self._owned.check()
                raise
            except UserError as error:  # too large, or etcd is full
                raise ResourceExhausted(
                    f"journal {self._where}: cannot write {len(lines)} bytes: {error}"
                ) from None
            if answer.succeeded:
                break
            owner, written = (one.response_range.kvs for one in answer.responses)
            if not owner or owner[0].create_revision != self._owned.term:
                raise self._owned.lose_to(owner[0] if owner else None)
            if written and written[0].value == lines:  # an earlier try, whose answer was lost
                break
            there = written[0].mod_revision if written else 0
        self._number += 1


def _chunks(lines: Iterator[bytes]) -> Iterator[bytes]:
    chunk = b""
    for line in lines:
        if chunk and len(chunk) + len(line) > CHUNK_BYTES:
            yield chunk
            chunk = b""
        chunk += line
    if chunk:
        yield chunk
