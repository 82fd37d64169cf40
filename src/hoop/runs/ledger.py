"""The ledger of a run: the provenance of each step as the devices reported it, one JSON line each, chained by hashes.

    {"begin":0,"seed":0,"samples":60000,"batch_size":256,"micros":4,"data":"…",
     "strategy":"data","hash":"…"}                            the run begins, or resumes
    {"step":1,"by":[1,1,2,3],"fed":"c41f09…","hash":"…"}      by shard: its device, its samples' fingerprint
    {"lost":2,"hash":"…"}                                     a device was lost
    {"assigned":[1,3,2],"hash":"…"}                           these devices, by rank, train from now on
    {"recovered":17,"missing":[2],"hash":"…"}                 step 17 was finished; shard 2 was computed again

The hash of a line covers the line and the hash before it. A checkpoint stores the hash of its step, so it names one
history. If a run resumes from step 20, ``begin`` says so, and the lines after step 20 stay in the file: they are work
that is in no model. Lines are on the disk before the checkpoint that names them. Lines that a full disk refuses are
kept in memory and tried again, and no checkpoint is written meanwhile. A ledger that somebody deletes while it is being
written is lost; checkpoints are written nevertheless.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hoop.errors import FailedPrecondition, FileGone, HoopError, ResourceExhausted
from hoop.files import Appender, atomic_write

NAME = "ledger.jsonl"
REMEMBERED = 10_000
"""Number of steps whose hashes are kept in memory for checkpoints."""
_HASH = b',"hash":"'
_DIGITS = 32


@dataclass(frozen=True)
class LedgerLine:
    """A line whose hash holds."""

    number: int
    entry: Mapping[str, Any]
    hash: str


def _chained(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:_DIGITS]


def lines(path: Path) -> Iterator[LedgerLine]:
    """Every line in order; FailedPrecondition at the first whose hash does not hold. A torn last line is ignored."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FailedPrecondition(f"{path}: cannot be read: {error.strerror}") from None
    before, last = "", "the beginning"
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        body, _, rest = line.rpartition(_HASH)
        try:
            if rest[_DIGITS:] != b'"}':
                raise ValueError("no hash at its end")
            entry = json.loads(body + b"}")
            said = rest[:_DIGITS].decode("ascii")
        except (ValueError, RecursionError) as error:
            raise FailedPrecondition(f"{path}, line {number}: damaged: {error}") from None
        if said != _chained(before, body):
            raise FailedPrecondition(
                f"{path}, line {number}: the chain is broken: {_what(entry)} does not follow {last} as it was "
                "written; a line was changed, dropped, repeated or moved here"
            )
        before, last = said, _what(entry)
        yield LedgerLine(number, entry, said)


def _what(entry: Mapping[str, Any]) -> str:
    name = next(iter(entry), "nothing")
    return f"{name} {str(entry.get(name))[:20]}"


def hashes(found: Iterable[LedgerLine]) -> dict[str, int]:
    """Maps each hash of the current history to the number of steps done at that line."""
    after: dict[str, int] = {}
    step = 0
    for line in found:
        if isinstance(begin := line.entry.get("begin"), int):
            step = begin
            after = {key: one for key, one in after.items() if one <= step}
        elif isinstance(done := line.entry.get("step"), int):
            step = done
        after[line.hash] = step
    return after


class Ledger:
    """A ledger opened for appending."""

    def __init__(self, path: Path, resumed: Mapping[str, Any] | None = None) -> None:
        """``resumed``: metadata of the checkpoint that the run resumes from."""
        self.path = path
        self._lock = threading.Lock()
        self._hash = ""
        self._unwritten = b""
        self._gone = False
        """Whether the file was deleted while it was being written."""
        self._hashes: dict[int, str] = {}
        if resumed is None:
            path.unlink(missing_ok=True)
        elif path.exists():
            self._resume(resumed)
        self._file = Appender(path)

    def _resume(self, resumed: Mapping[str, Any]) -> None:
        try:
            found = list(lines(self.path))
        except HoopError as error:
            raise FailedPrecondition(f"{error}. Move the ledger away to go on without it") from None
        named = resumed.get("ledger")
        if named is not None and hashes(found).get(named) != resumed.get("steps"):
            raise FailedPrecondition(
                f"{self.path}: step {resumed.get('steps')} does not have the hash {named} that the checkpoint names: "
                "one of them is not of this run; hoop audit says more. Move the ledger away to go on without it"
            )
        self._hash = found[-1].hash if found else ""
        data = self.path.read_bytes()
        if (whole := data.rfind(b"\n") + 1) != len(data):
            with atomic_write(self.path) as file:
                file.write(data[:whole])

    def append(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Appends lines. Lines that the disk has no room for are kept and tried again at the next call.

        Raises ``FileGone`` once if the file was deleted; later lines get their hashes, and are not written.
        """
        with self._lock:
            for entry in entries:
                body = json.dumps(entry, separators=(",", ":")).encode()[:-1]
                self._hash = _chained(self._hash, body)
                self._unwritten += body + _HASH + self._hash.encode() + b'"}\n'
                if "step" in entry or "begin" in entry:
                    self._hashes[entry["step"] if "step" in entry else entry["begin"]] = self._hash
            while len(self._hashes) > REMEMBERED:
                del self._hashes[next(iter(self._hashes))]
            self._write()

    def _write(self) -> None:
        """Raises ResourceExhausted if the disk is full; the unwritten lines are kept."""
        if self._unwritten:
            try:
                if not self._gone:
                    self._file.append(self._unwritten)
            except FileGone:
                self._gone, self._unwritten = True, b""
                raise
            self._unwritten = b""

    def hash_at(self, step: int) -> str | None:
        """The hash after this step; None if the ledger has no such step yet, or no longer in memory."""
        return self._hashes.get(step)

    def sync(self) -> None:
        """Writes and syncs all lines; ResourceExhausted if the disk is full."""
        with self._lock:
            try:
                self._write()
                self._file.sync()
            except FileGone:
                pass  # the next line says so
            except HoopError as error:
                raise ResourceExhausted(f"the ledger comes first, and {error}") from None

    def close(self) -> None:
        self._file.close()
