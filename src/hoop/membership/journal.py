"""The journal: the part of the membership state that a restarted coordinator needs, as one checksummed line an entry.

    crc32 of the JSON as eight hex digits, a space, the JSON, a newline

In a file the first line is ``HEADER``, and the crc32 of each line goes on from that of the line before, so that no line
can be dropped, repeated or moved. (In etcd the keys have numbers. Files of before, without a header, are read too.)

An entry is appended and synced before the coordinator answers. Opening a journal rewrites it as one snapshot, so it
does not grow from restart to restart. A journal is kept in a file (``FileJournal``) or in etcd
(``servers.etcd_journal``). One process at a time has it open: a second one is refused, or waits (etcd).

In a file, a torn last line, which has no newline (the coordinator died while it wrote), is cut off. Any other bad line,
and a file without a whole line, is damage, and opening the journal fails.

After a restart ``replay`` makes the state, with every device suspect until it sends a heartbeat. ``servers/jobs.py``
(``Jobs.resume``) then finds the jobs and their tasks; devices rejoin by themselves (``servers/heartbeat.py``).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from hoop.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from hoop.files import FileLock, atomic_write, remove_partial_files
from hoop.membership import events as m
from hoop.membership.fast_replace import replace
from hoop.membership.heartbeats import DetectorConfig, HeartbeatHistory
from hoop.membership.state import CommunicatorState, Health, JobState, Member, OperationOutcome, State, with_job
from hoop.texts import parse_json, printable
from hoop.topology import Address, DeviceInfo
from hoop.wire.job_settings import check_settings


def joined_record(info: DeviceInfo) -> m.Record:
    """A device joined."""
    return m.Record(joined_entry(info))


def joined_entry(info: DeviceInfo) -> dict[str, object]:
    """The journal entry of a device: what ``dataclasses.asdict`` makes of it, which takes much longer."""
    fields = {key: vars(value).copy() if isinstance(value, Address) else value for key, value in vars(info).items()}
    return {"kind": "device_joined", "info": fields}


def lost_record(member: Member) -> m.Record:
    """A device is dead, or left."""
    fields = {"device": member.info.device_id, "health": str(member.health), "ended": member.ended}
    return m.Record({"kind": "device_gone", **fields})


def communicator_record(one: CommunicatorState) -> m.Record:
    """The current state of a communicator."""
    return m.Record(communicator_entry(one))


def job_record(job: JobState) -> m.Record:
    """The current state of a job."""
    return m.Record(job_entry(job))


def communicator_entry(one: CommunicatorState) -> dict[str, object]:
    """The journal entry of a communicator: all fields but the outcome of its latest operation."""
    return {
        "kind": "communicator",
        "id": one.id,
        "members": list(one.members),
        "generation": one.generation,
        "finalized": one.finalized,
        "broken_by": one.broken_by,
        "reason": one.reason if one.broken_by else "",
        "ran": one.ran,
    }


def job_entry(job: JobState) -> dict[str, object]:
    """The journal entry of a job. The job's events are not in it: devices keep them and send them again."""
    return {"kind": "job", **asdict(job)}


Entry = Mapping[str, Any]
MOVE_AWAY = "move the file away to start without it"


class Journal(Protocol):
    """An open journal. No other process writes to it."""

    state: State
    """State that the journal held when it was opened."""

    def append(self, *entries: Entry) -> None:
        """Writes all of these entries or none. Returns when they are on stable storage, or raises."""

    def close(self) -> None:
        """Closes the journal; another coordinator may then open it."""


HEADER: Entry = {"kind": "journal", "version": 2}
"""The first entry of a file whose lines are a chain."""


def encode(entry: Entry, before: int = 0) -> bytes:
    """The line of an entry. ``before``: the checksum of the line before, in a chain."""
    body = json.dumps(entry, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(body, before), body)


def chained(entries: Iterable[Entry], before: int = 0) -> list[bytes]:
    """The lines of entries that follow a line with the checksum ``before``; 0: the first are these."""
    lines: list[bytes] = []
    for entry in entries:
        lines.append(encode(entry, before))
        before = checksum_of(lines[-1])
    return lines


def checksum_of(line: bytes) -> int:
    return int(line[:8], 16)


def decode(data: bytes, where: object, remedy: str = MOVE_AWAY, whole: bool = False) -> list[Entry]:
    """The entries in these lines. Raises ``FailedPrecondition`` for a damaged line, naming ``where`` and ``remedy``.

    A torn last line, the beginning of a line, is dropped, unless the data is known to be ``whole``.
    """
    entries: list[Entry] = []
    lines = data.split(b"\n")
    tail = lines.pop()  # has no newline
    in_chain = lines[:1] == [encode(HEADER)[:-1]]
    before = 0
    for number, line in enumerate([*lines, tail], start=1):
        is_tail = number > len(lines)
        # A tail that holds, but for a byte in place of its newline, is not torn; nor is the only line of a file.
        if is_tail and not (tail and (whole or not lines or _holds(tail[:-1], before))):
            break
        try:
            if not _holds(line, before):
                moved = ", or lines before it were dropped, repeated or moved" if in_chain else ""
                raise ValueError(f"the checksum does not hold: the line was changed{moved}")
            entries.append(parse_json(line[9:]))
        except ValueError as error:
            raise FailedPrecondition(f"journal {where}, line {number}: {error}; {remedy}") from None
        before = checksum_of(line) if in_chain else 0
    return entries[in_chain:]


def _holds(line: bytes, before: int = 0) -> bool:
    """Whether a line, without its newline, is a checksum and what it was computed from."""
    return line[:9] == b"%08x " % zlib.crc32(line[9:], before)


def restore(
    entries: Iterable[Entry], config: DetectorConfig, now: float, where: object, remedy: str = MOVE_AWAY
) -> State:
    """``replay``, for entries that may have good checksums but were not written by this version of Hoop."""
    try:
        return replay(entries, config, now)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FailedPrecondition(
            f"journal {where}: an entry of another kind of file or version: {type(error).__name__}: {error}; {remedy}"
        ) from None


def replay(entries: Iterable[Entry], config: DetectorConfig, now: float) -> State:
    """The state after these entries. Each device is suspect, and has one lease from ``now`` to send a heartbeat."""
    state = State(config, last_tick=now)
    members, communicators, jobs = dict(state.members), dict(state.communicators), dict(state.jobs)
    last = 0
    for entry in entries:
        match entry["kind"]:
            case "device_joined":
                info = _info(entry["info"])
                members[info.device_id] = Member(
                    info, HeartbeatHistory(now), Health.SUSPECT, "the coordinator was restarted"
                )
            case "device_gone":
                old = members[entry["device"]]
                members[entry["device"]] = replace(
                    old,
                    health=Health(entry["health"]),
                    reason="before a restart",
                    ended=bool(entry.get("ended", False)),
                )
            case "communicator":
                one = CommunicatorState(
                    entry["id"],
                    tuple(entry["members"]),
                    entry["generation"],
                    OperationOutcome.FAILED if entry["broken_by"] else OperationOutcome.IN_PROGRESS,
                    printable(entry["reason"]),
                    entry["broken_by"],
                    entry["finalized"],
                    bool(entry.get("ran", False)),
                )
                communicators[one.id] = one
                last = max(last, one.id)
            case "communicator_destroyed":
                communicators.pop(entry["id"], None)
                last = max(last, entry["id"])
            case "job":
                job = _job(entry)
                jobs = with_job(jobs, job)
                if job.ended:
                    communicators.pop(job.id, None)
    return replace(state, members=members, communicators=communicators, jobs=jobs, next_communicator=last + 1)


def snapshot(state: State) -> list[Entry]:
    """The shortest list of entries that replays to this state."""
    entries: list[Entry] = []
    for member in state.members.values():
        entries.append(joined_entry(member.info))
        if not member.usable:
            entries.append(lost_record(member).entry)
    if state.next_communicator > 1:
        entries.append({"kind": "communicator_destroyed", "id": state.next_communicator - 1})
    entries += [communicator_entry(one) for one in state.communicators.values()]
    entries += [job_entry(one) for one in state.jobs.values()]
    return entries


def _job(entry: Entry) -> JobState:
    """A job from its entry. Older versions wrote settings without limits, and error texts with any characters.

    A job whose settings this version refuses has ended: it failed, unless it had ended before.
    """
    plain = {key: value for key, value in entry.items() if key != "kind"}
    job = JobState(**{**plain, "devices": tuple(entry["devices"]), "text": printable(entry.get("text", ""))})
    try:
        check_settings(job.settings)
    except InvalidArgument as error:
        job = replace(job, settings="{}", run="")
        if not job.ended:
            job = replace(job, ended=True, error=type(error).__name__, text=str(error))
    return job


def _info(plain: Mapping[str, Any]) -> DeviceInfo:
    addresses = {name: Address(**plain[name]) for name in ("address", "data_address")}
    shared = plain.get("shared_address")
    return DeviceInfo(**{**plain, **addresses, "shared_address": Address(**shared) if shared else None})


class FileJournal:
    """A journal in a file. While it is open, no other process can open it: ``FILE.lock`` is locked."""

    def __init__(self, path: Path, config: DetectorConfig, now: float) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            what = "Is a directory" if path.is_dir() else "not a regular file"
            raise FailedPrecondition(f"journal {path}: {what}; choose another path")
        self._lock = FileLock(
            path, "stop that coordinator, or give this one another journal (hoop up: another --state)"
        )
        try:
            data = path.read_bytes() if path.exists() else b""
            self.state = restore(decode(data, path), config, now, path)
            remove_partial_files(path.parent, path.name)
            lines = chained([HEADER, *snapshot(self.state)])
            self._checksum = checksum_of(lines[-1])
            with atomic_write(path, 0o600) as file:
                file.writelines(lines)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        except BaseException:
            self._lock.release()
            raise

    def append(self, *entries: Entry) -> None:
        """Writes entries and syncs them; on failure it truncates the file to its old length and raises."""
        new = chained(entries, self._checksum)
        lines = b"".join(new)
        old_size = os.fstat(self._descriptor).st_size
        try:
            written = os.write(self._descriptor, lines)
            os.fsync(self._descriptor)
        except OSError as error:
            written, why = 0, error.strerror
        else:
            why = "the disk is full"
        if written != len(lines):
            os.ftruncate(self._descriptor, old_size)  # half a line would damage the next one
            raise ResourceExhausted(f"journal {self.path}: cannot write {len(lines)} bytes: {why}; make room")
        self._checksum = checksum_of(new[-1]) if new else self._checksum

    def close(self) -> None:
        """Closes the file and releases its lock. May be called again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._lock.release()
