"""What the journal keeps: one entry for everything that a restarted coordinator must know.

The journal: what a restarted coordinator must know, one checksummed line an entry.

    crc32 of the JSON, eight hex digits, a space, the JSON, a newline

Appended, and safe, before the coordinator answers; rewritten as one snapshot when it is opened, so it does not grow
from restart to restart. It is kept in a file (``file_journal``) or in etcd (``servers.etcd_journal``).

The journal in a file.

A torn last line (the coordinator died while it wrote) is cut off; a bad line before good ones is damage.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from hoop.errors import FailedPrecondition, InvalidArgument, ResourceExhausted
from hoop.membership import events as m
from hoop.membership.failure_detector import DetectorConfig, HeartbeatHistory
from hoop.membership.state import (
    CommunicatorState,
    Health,
    JobState,
    Member,
    OperationOutcome,
    State,
    with_job,
)
from hoop.texts import parse_json, printable
from hoop.topology import Address, DeviceInfo
from hoop.wire.job_settings import check_settings


def joined_record(info: DeviceInfo) -> m.Record:
    """A device is here."""
    return m.Record({"kind": "device_joined", "info": asdict(info)})


def lost_record(member: Member) -> m.Record:
    """A device is gone."""
    about = {"device": member.info.device_id, "health": str(member.health), "ended": member.ended}
    return m.Record({"kind": "device_gone", **about})


def communicator_record(one: CommunicatorState) -> m.Record:
    """A communicator as it is now."""
    return m.Record(communicator_entry(one))


def job_record(job: JobState) -> m.Record:
    """A job as it is now."""
    return m.Record(job_entry(job))


def communicator_entry(one: CommunicatorState) -> dict[str, object]:
    """A communicator as the journal keeps it: all but the outcome of its latest work."""
    return {
        "kind": "communicator",
        "id": one.id,
        "members": list(one.members),
        "generation": one.generation,
        "finalized": one.finalized,
        "broken_by": one.broken_by,
        "reason": one.reason if one.broken_by else "",
    }


def job_entry(job: JobState) -> dict[str, object]:
    """A job as the journal keeps it; what it told is the devices' to remember."""
    return {"kind": "job", **asdict(job)}


Entry = Mapping[str, Any]
MOVE_AWAY = "move the file away to start without it"


class Journal(Protocol):
    """An open journal, which nobody else writes to."""

    state: State
    """What it said when it was opened."""

    def append(self, *entries: Entry) -> None:
        """Writes these, all or none, and returns when they are safe; or raises."""

    def close(self) -> None:
        """Lets go of it."""


def encode(entry: Entry) -> bytes:
    body = json.dumps(entry, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode(data: bytes, where: object, remedy: str = MOVE_AWAY, whole: bool = False) -> list[Entry]:
    """The entries in these lines; damage is named. A torn last line is left out, unless it is known to be ``whole``."""
    entries: list[Entry] = []
    lines = data.split(b"\n")
    tail = lines.pop()  # has no newline: torn, or empty
    for number, line in enumerate([*lines, tail] if whole and tail else lines, start=1):
        try:
            check, body = line[:8], line[9:]
            if int(check, 16) != zlib.crc32(body):
                raise ValueError("the checksum does not hold")
            entries.append(parse_json(body))
        except ValueError as error:
            if number == len(lines) and not tail and not whole:
                break
            raise FailedPrecondition(f"journal {where}, line {number}: {error}; {remedy}") from None
    return entries


def restore(
    entries: Iterable[Entry], config: DetectorConfig, now: float, where: object, remedy: str = MOVE_AWAY
) -> State:
    """``replay``, of what may be whole and yet nothing that Hoop wrote."""
    try:
        return replay(entries, config, now)
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise FailedPrecondition(
            f"journal {where}: an entry of another kind of file or version: {type(error).__name__}: {error}; {remedy}"
        ) from None


def replay(entries: Iterable[Entry], config: DetectorConfig, now: float) -> State:
    """The state that these entries add up to. Devices get one lease to show that they are alive."""
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
    """The fewest entries that replay to this state."""
    entries: list[Entry] = []
    for member in state.members.values():
        entries.append({"kind": "device_joined", "info": asdict(member.info)})
        if not member.usable:
            entries.append(lost_record(member).entry)
    if state.next_communicator > 1:
        entries.append({"kind": "communicator_destroyed", "id": state.next_communicator - 1})
    entries += [communicator_entry(one) for one in state.communicators.values()]
    entries += [job_entry(one) for one in state.jobs.values()]
    return entries


def _job(entry: Entry) -> JobState:
    """A job out of a journal. Older versions wrote settings of any size and kind, and errors that hold anything.

    A job with settings that no coordinator takes any more has ended; it failed, if it had not ended before.
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
    places = {name: Address(**plain[name]) for name in ("address", "data_address")}
    shared = plain.get("shared_address")
    return DeviceInfo(**{**plain, **places, "shared_address": Address(**shared) if shared else None})


class FileJournal:
    """An open journal file."""

    def __init__(self, path: Path, config: DetectorConfig, now: float) -> None:
        self.path = path
        data = path.read_bytes() if path.exists() else b""
        self.state = restore(decode(data, path), config, now, path)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        with open(fresh, "wb", opener=_private) as file:
            file.writelines(encode(entry) for entry in snapshot(self.state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        _sync_folder(path.parent)
        self._file = open(path, "ab", buffering=0, opener=_private)  # noqa: SIM115 - closed by close()

    def append(self, *entries: Entry) -> None:
        """Writes entries and syncs them, or leaves the journal as it was and raises."""
        lines = b"".join(map(encode, entries))
        good = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(lines)
            os.fsync(self._file.fileno())
        except OSError as error:
            written, why = 0, error.strerror
        else:
            why = "the disk is full"
        if written != len(lines):
            os.ftruncate(self._file.fileno(), good)  # half a line would spoil the next one
            raise ResourceExhausted(f"journal {self.path}: cannot write {len(lines)} bytes: {why}; make room")

    def close(self) -> None:
        self._file.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
