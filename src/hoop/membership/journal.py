"""The journal: what a restarted coordinator must know, one checksummed line an entry.

    crc32 of the JSON, eight hex digits, a space, the JSON, a newline

Appended, and safe, before the coordinator answers; rewritten as one snapshot when it is opened, so it does not grow
from restart to restart. It is kept in a file (``file_journal``) or in etcd (``servers.etcd_journal``).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.membership.detector import DetectorConfig, Pulse
from hoop.membership.entries import communicator_entry, job_entry, lost_record
from hoop.membership.state import CommunicatorState, Health, JobState, Member, Outcome, State, with_job
from hoop.texts import parse_json, printable
from hoop.topology import Address, DeviceInfo
from hoop.wire.job_settings import check_settings

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
                    info, Pulse(now), Health.SUSPECT, "the coordinator was restarted"
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
                    Outcome.FAILED if entry["broken_by"] else Outcome.IN_PROGRESS,
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
