"""The journal in etcd, for coordinators on several machines: one writes, the others wait to take over.

    PREFIX/owner                       the coordinator that writes, while its lease lasts (``LeaderLease``)
    PREFIX/current                     the term whose entries are valid
    PREFIX/entries/TERM/NUMBER         the lines of one step, checksummed as in a file

``EtcdJournal``: a new owner writes a snapshot under its own term. One transaction then makes that term current and
deletes the older entries. An append succeeds only if the owner's term is unchanged and its number is still free. So of
two coordinators one writes, and the other ends.

``LeaderLease``: the owner key is attached to a lease of etcd, which a thread of the owner renews. When a coordinator
dies, its lease expires, etcd deletes the key, and a waiting coordinator writes its own name. The revision of that write
is the owner's term. Every write compares it, so a coordinator that was stopped or cut off cannot write after it has
lost the lease. It also tracks the expiry by its own clock, and ends before the lease does.

``Etcd``: the part of etcd's v3 API that this needs. Every call has a deadline, and goes to the next endpoint if one
does not answer. There is no gRPC keepalive: etcd closes connections that are pinged more often than every five seconds.
"""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import NamedTuple, TypeVar

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
    error_from_name,
)
from hoop.membership.heartbeats import DetectorConfig
from hoop.membership.journal import Entry, decode, encode, restore, snapshot
from hoop.membership.state import State
from hoop.topology import Addresses
from hoop.wire.auth import grpc_target
from hoop.wire.certificates import AUTHORITY, CERTIFICATE, KEY
from hoop.wire.channels import MAX_MESSAGE_BYTES, Backoff
from hoop.wire.generated import etcd_pb2 as pb
from hoop.wire.generated import etcd_pb2_grpc as pb_grpc
from hoop.wire.private_files import check_private
from hoop.wire.service import unreachable

TRY_S = 1.0
"""Timeout of one endpoint in seconds, before the next is tried."""
Request = TypeVar("Request")
Response = TypeVar("Response")
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class EtcdStubs(NamedTuple):
    """The services of one etcd endpoint."""

    kv: pb_grpc.KVStub
    lease: pb_grpc.LeaseStub
    watch: pb_grpc.WatchStub


class Etcd:
    """A connection to etcd; thread-safe."""

    def __init__(self, endpoints: Addresses, tls: Path | None = None) -> None:
        """``tls``: a folder with etcd's certificate authority and, if etcd asks for it, a client certificate."""
        self.endpoints = endpoints
        secure = _credentials(tls) if tls else None
        self._channels = [
            grpc.secure_channel(grpc_target(one), secure, options=_OPTIONS)
            if secure
            else grpc.insecure_channel(grpc_target(one), options=_OPTIONS)
            for one in endpoints.addresses
        ]
        self._stubs = [
            EtcdStubs(pb_grpc.KVStub(channel), pb_grpc.LeaseStub(channel), pb_grpc.WatchStub(channel))
            for channel in self._channels
        ]
        self._current = 0

    def call(
        self,
        method: Callable[[EtcdStubs], grpc.UnaryUnaryMultiCallable[Request, Response]],
        request: Request,
        timeout: float,
    ) -> Response:
        """The answer to a call, as in ``call(lambda etcd: etcd.kv.Range, request, 2.0)``.

        Tries the endpoint that answered last, then the others in turn.
        """
        for answer in self._answers(lambda stubs, seconds: [method(stubs)(request, timeout=seconds)], timeout):
            return answer
        raise DeadlineExceeded(f"etcd at {self.endpoints} ended a call without an answer")

    def renew(self, lease: int, timeout: float) -> int:
        """Renews a lease. Returns its remaining seconds; 0: it has expired."""
        request = pb.LeaseKeepAliveRequest(ID=lease)
        for answer in self._answers(
            lambda stubs, seconds: stubs.lease.LeaseKeepAlive(iter([request]), timeout=seconds), timeout
        ):
            return answer.TTL
        raise DeadlineExceeded(f"etcd at {self.endpoints} ended LeaseKeepAlive without an answer")

    def wait_deleted(self, key: bytes, since: int, timeout: float) -> None:
        """Returns when a key was deleted at revision ``since`` or later, or after ``timeout`` seconds."""
        create = pb.WatchCreateRequest(key=key, start_revision=since)
        until = time.monotonic() + timeout
        try:
            request = pb.WatchRequest(create_request=create)
            for answer in self._answers(
                lambda stubs, seconds: stubs.watch.Watch(iter([request]), timeout=seconds), timeout, timeout
            ):
                if answer.canceled or any(one.type == pb.Event.DELETE for one in answer.events):
                    return
        except DeadlineExceeded:
            if time.monotonic() < until:
                raise

    def _answers(
        self, start: Callable[[EtcdStubs, float], Iterable[Response]], timeout: float, endpoint_timeout: float = TRY_S
    ) -> Iterator[Response]:
        """The answers of the first endpoint that answers; ``start`` makes the call with a timeout in seconds."""
        until = time.monotonic() + timeout
        peer = f"etcd at {self.endpoints}"
        reason = "no answer"
        for _ in self._stubs:
            index, remaining = self._current, until - time.monotonic()
            if remaining <= 0:
                break
            try:
                yield from start(self._stubs[index], min(endpoint_timeout, remaining))
                return
            except grpc.RpcError as error:
                reason = f"{self.endpoints.addresses[index]}: {error.details() or error.code().name}"
                if not unreachable(error):
                    raise error_from_name(error.code().name, f"{peer}: {reason}") from None
            except ValueError as error:  # another thread closed the channel
                reason = str(error)
            self._current = (index + 1) % len(self._stubs)
        raise DeadlineExceeded(f"{peer} does not answer ({reason})")

    def close(self) -> None:
        """Closes the channels; calls under way fail."""
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
"""Seconds for which the first contact with etcd is tried."""
WATCH_S = 5.0
"""Seconds that one watch of another owner's key lasts, before the key is read again."""
RETRY_S = 0.2
OnWaiting = Callable[[str], None]


class LeaderLease:
    """The right to write the journal, while a lease in etcd lasts."""

    def __init__(
        self, etcd: Etcd, where: str, key: bytes, owner: str, lease_s: float, on_lost: Callable[[PeerLost], None]
    ) -> None:
        """``owner``: describes this coordinator. ``on_lost`` is called, from a thread, when the lease is lost."""
        self.key, self.term = key, 0
        self._etcd, self._where, self._owner_text, self._on_lost = etcd, where, owner, on_lost
        self._ttl, self._lease_id, self._expires_at = math.ceil(lease_s), 0, 0.0
        self._unreachable = ""
        """Reason why etcd did not answer the last call; empty: it did."""
        self._lost: PeerLost | None = None
        self._closing, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="hoop journal lease", daemon=True)

    # ---- acquire

    def acquire(self, on_waiting: OnWaiting) -> None:
        """Returns when this coordinator owns the journal. Meanwhile it reports the owner, and waits for its lease."""
        backoff = Backoff("etcd", self._etcd.endpoints, START_S)
        delays: Iterator[float] = backoff.delays()
        report = _without_repeats(on_waiting)
        while not self._closing.is_set():
            try:
                owner = self._read_owner()
                if owner is None:
                    self._try_acquire()
                elif self._lease_id and owner.lease == self._lease_id:
                    self.term = owner.create_revision
                    self._thread.start()
                    return
                else:
                    report(f"journal {self._where}: waiting, it belongs to {_name(owner)}")
                    self._etcd.wait_deleted(self.key, owner.mod_revision + 1, WATCH_S)
                    delays = repeat(RETRY_S)  # etcd has answered once: from now on retry without a deadline
            except DeadlineExceeded as error:
                backoff.record_failure(str(error))
                report(f"journal {self._where}: etcd does not answer, trying again")
                self._closing.wait(next(delays))
        raise PeerLost(f"journal {self._where}: closed while it was waited for")

    def _read_owner(self) -> pb.KeyValue | None:
        found = self._etcd.call(lambda etcd: etcd.kv.Range, pb.RangeRequest(key=self.key), START_S)
        return found.kvs[0] if found.kvs else None

    def _try_acquire(self) -> None:
        """Writes the owner key if there is none. The next read shows whether another coordinator was faster."""
        sent = time.monotonic()
        granted = self._etcd.call(lambda etcd: etcd.lease.LeaseGrant, pb.LeaseGrantRequest(TTL=self._ttl), START_S)
        self._lease_id, self._ttl, self._expires_at = granted.ID, granted.TTL, sent + granted.TTL
        free = pb.Compare(target=pb.Compare.CREATE, key=self.key, create_revision=0)
        put = pb.PutRequest(key=self.key, value=self._owner_text.encode(), lease=self._lease_id)
        txn = pb.TxnRequest(compare=[free], success=[pb.RequestOp(request_put=put)])
        self._etcd.call(lambda etcd: etcd.kv.Txn, txn, START_S)

    # ---- hold and renew

    @property
    def owner_condition(self) -> pb.Compare:
        """The condition of every write: the owner key still has this term."""
        return pb.Compare(target=pb.Compare.CREATE, key=self.key, create_revision=self.term)

    def check(self) -> None:
        """Raises if a write cannot succeed: the lease is lost, or etcd does not answer."""
        if self._lost is not None:
            raise self._lost
        if self._unreachable:
            raise DeadlineExceeded(f"journal {self._where} is away, and nothing can be changed: {self._unreachable}")

    def mark_unreachable(self, reason: str) -> None:
        """etcd did not answer. Refuses writes until a renewal succeeds, which is tried at once."""
        self._unreachable = reason
        self._wake.set()

    def mark_lost(self, why: str) -> PeerLost:
        """The lease is lost. Calls ``on_lost`` the first time, and returns the error."""
        if self._lost is None:
            text = "this coordinator owns it no longer, and stops; devices and jobs go on"
            self._lost = PeerLost(f"journal {self._where}: {why}: {text}")
            self._on_lost(self._lost)
        return self._lost

    def mark_taken_by(self, owner: pb.KeyValue | None) -> PeerLost:
        another = owner is not None and owner.create_revision != self.term
        return self.mark_lost(f"it was taken over by {_name(owner)}" if owner and another else "its lease ended")

    def _renew(self) -> None:
        while True:
            remaining = self._expires_at - time.monotonic()
            self._wake.wait(min(RETRY_S if self._unreachable else self._ttl / 3, max(0.0, remaining)))
            self._wake.clear()
            if self._closing.is_set() or self._lost:
                return
            sent = time.monotonic()
            if sent >= self._expires_at and self._unreachable:
                self.mark_lost(f"its lease of {self._ttl} s was not renewed in time ({self._unreachable})")
                return
            try:
                # Expired by our own clock: this process was suspended. Do not renew; read the current owner.
                ttl = self._etcd.renew(self._lease_id, self._expires_at - sent) if sent < self._expires_at else 0
                if ttl <= 0:
                    self.mark_taken_by(self._read_owner())
                    return
                self._expires_at, self._unreachable = sent + ttl, ""
            except HoopError as error:
                self.mark_unreachable(str(error))
                self._wake.clear()

    def close(self) -> None:
        """Revokes the lease, so that a waiting coordinator can take over at once."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
            with contextlib.suppress(HoopError):  # the lease expires by itself
                self._etcd.call(lambda etcd: etcd.lease.LeaseRevoke, pb.LeaseRevokeRequest(ID=self._lease_id), TRY_S)


def _without_repeats(on_waiting: OnWaiting) -> OnWaiting:
    """Drops a text that equals the one before it."""
    last = ""

    def report(text: str) -> None:
        nonlocal last
        if text != last:
            on_waiting(text)
        last = text

    return report


def _name(owner: pb.KeyValue) -> str:
    text = owner.value.decode(errors="replace")[:200]
    return "".join(one if one.isprintable() else "?" for one in text)


SCHEME = "etcd://"
WRITE_S = 3.0
"""Timeout of a write in seconds, over all endpoints. It blocks the coordinator."""
CHUNK_BYTES = 1 << 20
"""Bytes of a snapshot in one key; etcd accepts 1.5 MiB in a request."""
PAGE = 32
"""Number of keys that one request reads; an answer with this many full keys fits one message."""


@dataclass(frozen=True)
class EtcdLocation:
    """The location of a journal in etcd."""

    endpoints: Addresses
    prefix: str
    lease_s: float = 10.0
    tls: Path | None = None

    @classmethod
    def parse(cls, text: str, lease_s: float = 10.0, tls: Path | None = None) -> EtcdLocation:
        """``etcd://HOST:PORT[,HOST:PORT...]/PREFIX``"""
        hosts, _, prefix = text.removeprefix(SCHEME).partition("/")
        if "@" in hosts:  # the part before it may be a password: do not repeat it
            raise InvalidArgument("--journal: etcd's users are known by certificate, --journal-tls; leave out USER@")
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
    """A journal in etcd. ``open`` must return before the first append."""

    state: State

    def __init__(self, location: EtcdLocation, owner: str, on_lost: Callable[[PeerLost], None]) -> None:
        """``owner``: describes this coordinator. ``on_lost`` is called, from any thread, when the lease is lost."""
        self._etcd = Etcd(location.endpoints, location.tls)
        self._where, self._root = str(location), location.prefix.encode()
        self._remedy = f"start on another prefix, or delete this one: etcdctl del --prefix {location.prefix}/"
        self._lease = LeaderLease(self._etcd, self._where, self._root + b"/owner", owner, location.lease_s, on_lost)
        self._number = 0

    def open(self, config: DetectorConfig, on_waiting: OnWaiting) -> None:
        """Waits until this coordinator owns the journal, reads it, and rewrites it as a snapshot."""
        self._lease.acquire(on_waiting)
        entries = self._read()
        self.state = restore(entries, config, time.monotonic(), self._where, self._remedy)
        for lines in _chunks(map(encode, snapshot(self.state))):
            self._write(lines)
        current = pb.PutRequest(key=self._root + b"/current", value=b"%016x" % self._lease.term)
        older = pb.DeleteRangeRequest(key=self._root + b"/entries/", range_end=self._folder(self._lease.term))
        commit = [pb.RequestOp(request_put=current), pb.RequestOp(request_delete_range=older)]
        if not self._etcd.call(
            lambda etcd: etcd.kv.Txn, pb.TxnRequest(compare=[self._lease.owner_condition], success=commit), WRITE_S
        ).succeeded:
            raise self._lease.mark_taken_by(None)

    def append(self, *entries: Entry) -> None:
        """Writes entries, all or none. DEADLINE_EXCEEDED: etcd did not answer; they may or may not be written."""
        self._write(b"".join(map(encode, entries)))

    def close(self) -> None:
        self._lease.close()
        self._etcd.close()

    # ---- keys

    def _folder(self, term: int) -> bytes:
        return b"%s/entries/%016x/" % (self._root, term)

    def _read(self) -> list[Entry]:
        """All entries of the current term, in order."""
        found = self._etcd.call(lambda etcd: etcd.kv.Range, pb.RangeRequest(key=self._root + b"/current"), WRITE_S).kvs
        if not found:
            return []
        if not re.fullmatch(rb"[0-9a-f]{16}", found[0].value):
            raise FailedPrecondition(f"journal {self._where}: its key current is no term of Hoop's; {self._remedy}")
        folder = self._folder(int(found[0].value, 16))
        key, end = folder, folder[:-1] + b"0"  # 0 is the byte after /
        keys: list[pb.KeyValue] = []
        while True:
            page = self._etcd.call(
                lambda etcd: etcd.kv.Range, pb.RangeRequest(key=key, range_end=end, limit=PAGE), WRITE_S
            )
            keys += page.kvs
            if not page.more:
                break
            key = keys[-1].key + b"\0"
        entries: list[Entry] = []
        for number, one in enumerate(keys, start=1):
            if one.key != b"%s%016x" % (folder, number):
                raise FailedPrecondition(f"journal {self._where}: entry {number} is not there; {self._remedy}")
            entries += decode(one.value, f"{self._where}, entry {number}", self._remedy, whole=True)
        return entries

    def _write(self, lines: bytes) -> None:
        """Writes the next key, if this coordinator owns the journal and the key is free.

        A write without an answer may have succeeded, or may succeed later. The next write then finds its number taken,
        and overwrites the refused entry. A write that etcd sees later than that finds the number taken, and fails.
        """
        self._lease.check()
        key = b"%s%016x" % (self._folder(self._lease.term), self._number + 1)
        revision = 0  # at which the key was written; 0: it does not exist
        while True:
            txn = pb.TxnRequest(
                compare=[
                    self._lease.owner_condition,
                    pb.Compare(target=pb.Compare.MOD, key=key, mod_revision=revision),
                ],
                success=[pb.RequestOp(request_put=pb.PutRequest(key=key, value=lines))],
                failure=[
                    pb.RequestOp(request_range=pb.RangeRequest(key=self._lease.key)),
                    pb.RequestOp(request_range=pb.RangeRequest(key=key)),
                ],
            )
            try:
                answer: pb.TxnResponse = self._etcd.call(lambda etcd: etcd.kv.Txn, txn, WRITE_S)
            except DeadlineExceeded as error:
                self._lease.mark_unreachable(str(error))
                self._lease.check()
                raise
            except UserError as error:  # too large, or etcd is full
                raise ResourceExhausted(f"journal {self._where}: cannot write {len(lines)} bytes: {error}") from None
            if answer.succeeded:
                break
            owner, written = (one.response_range.kvs for one in answer.responses)
            if not owner or owner[0].create_revision != self._lease.term:
                raise self._lease.mark_taken_by(owner[0] if owner else None)
            if written and written[0].value == lines:  # an earlier attempt whose answer was lost
                break
            revision = written[0].mod_revision if written else 0
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
