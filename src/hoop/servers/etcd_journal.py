"""The journal in etcd, for coordinators on several machines: one writes, the others wait to take over.

    PREFIX/owner                       who writes, while its lease lasts (``ownership``)
    PREFIX/current                     the term whose entries count
    PREFIX/entries/TERM/NUMBER         the lines of one step, checksummed as in a file

A new owner writes a snapshot under its own term, then makes it current and deletes what was before, as one. An
append compares the owner's term and that its number is still free: of two coordinators one writes, the other ends.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hoop.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    PeerLost,
    ResourceExhausted,
    UserError,
)
from hoop.membership.detector import DetectorConfig
from hoop.membership.journal import Entry, decode, encode, restore, snapshot
from hoop.membership.state import State
from hoop.servers.ownership import Ownership, Tell
from hoop.topology import Addresses
from hoop.wire.etcd import Etcd
from hoop.wire.generated import etcd_pb2 as pb

SCHEME = "etcd://"
WRITE_S = 3.0
"""How long a write may take, at all endpoints together; the coordinator does nothing else meanwhile."""
CHUNK_BYTES = 1 << 20
"""Of a snapshot, in one key; etcd takes 1.5 MiB in a request."""
PAGE = 32
"""Keys that are read at once: below the largest message, whatever they hold."""


@dataclass(frozen=True)
class EtcdPlace:
    """Where in etcd a journal is."""

    endpoints: Addresses
    prefix: str
    lease_s: float = 10.0
    tls: Path | None = None

    @classmethod
    def parse(cls, text: str, lease_s: float = 10.0, tls: Path | None = None) -> EtcdPlace:
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

    def __init__(self, place: EtcdPlace, who: str, on_lost: Callable[[PeerLost], None]) -> None:
        """``who``: what others are told of the owner. ``on_lost`` is called, from any thread, when it is another's."""
        self._etcd = Etcd(place.endpoints, place.tls)
        self._where, self._root = str(place), place.prefix.encode()
        self._remedy = f"start on another prefix, or delete this one: etcdctl del --prefix {place.prefix}/"
        self._owned = Ownership(self._etcd, self._where, self._root + b"/owner", who, place.lease_s, on_lost)
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
