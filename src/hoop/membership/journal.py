"""The journal: what a restarted coordinator must know, one checksummed line an entry.

    crc32 of the JSON, eight hex digits, a space, the JSON, a newline

Appended and synced before the coordinator answers. A torn last line (the coordinator died while it wrote) is
cut off; a bad line before good ones is damage, and is named. Rewritten as one snapshot when it is opened,
so it does not grow from restart to restart.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hoop.errors import FailedPrecondition, ResourceExhausted
from hoop.membership.detector import DetectorConfig, Pulse
from hoop.membership.entries import communicator_entry, job_entry
from hoop.membership.state import CommunicatorState, Health, JobState, Member, Outcome, State, with_job
from hoop.topology import Address, DeviceInfo

Entry = Mapping[str, Any]


def encode(entry: Entry) -> bytes:
    body = json.dumps(entry, separators=(",", ":"), sort_keys=True).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def decode(data: bytes, path: Path) -> list[Entry]:
    """The entries of a journal; a torn tail is left out."""
    entries: list[Entry] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # the last has no newline: torn, or empty
        try:
            check, body = line[:8], line[9:]
            if int(check, 16) != zlib.crc32(body):
                raise ValueError("the checksum does not hold")
            entries.append(json.loads(body))
        except ValueError as error:
            if number == len(lines) - 1 and not lines[-1]:
                break
            raise FailedPrecondition(
                f"journal {path}, line {number}: {error}; move the file away to start without it"
            ) from None
    return entries


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
                    old, health=Health(entry["health"]), reason="before a restart"
                )
            case "communicator":
                one = CommunicatorState(
                    entry["id"],
                    tuple(entry["members"]),
                    entry["generation"],
                    Outcome.FAILED if entry["broken_by"] else Outcome.IN_PROGRESS,
                    entry["reason"],
                    entry["broken_by"],
                    entry["finalized"],
                )
                communicators[one.id] = one
                last = max(last, one.id)
            case "communicator_destroyed":
                communicators.pop(entry["id"], None)
                last = max(last, entry["id"])
            case "job":
                plain = {key: value for key, value in entry.items() if key != "kind"}
                jobs = with_job(jobs, JobState(**{**plain, "devices": tuple(entry["devices"])}))
                if entry["ended"]:
                    communicators.pop(entry["id"], None)
    return replace(state, members=members, communicators=communicators, jobs=jobs, next_communicator=last + 1)


def snapshot(state: State) -> list[Entry]:
    """The fewest entries that replay to this state."""
    entries: list[Entry] = []
    for member in state.members.values():
        entries.append({"kind": "device_joined", "info": asdict(member.info)})
        if not member.usable:
            entries.append(
                {"kind": "device_gone", "device": member.info.device_id, "health": str(member.health)}
            )
    if state.next_communicator > 1:
        entries.append({"kind": "communicator_destroyed", "id": state.next_communicator - 1})
    entries += [communicator_entry(one) for one in state.communicators.values()]
    entries += [job_entry(one) for one in state.jobs.values()]
    return entries


def _info(plain: Mapping[str, Any]) -> DeviceInfo:
    places = {name: Address(**plain[name]) for name in ("address", "data_address")}
    shared = plain.get("shared_address")
    return DeviceInfo(**{**plain, **places, "shared_address": Address(**shared) if shared else None})


class Journal:
    """An open journal file."""

    def __init__(self, path: Path, config: DetectorConfig, now: float) -> None:
        self.path = path
        data = path.read_bytes() if path.exists() else b""
        self.state = replay(decode(data, path), config, now)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        with open(fresh, "wb", opener=_private) as file:
            file.writelines(encode(entry) for entry in snapshot(self.state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
        _sync_folder(path.parent)
        self._file = open(path, "ab", buffering=0, opener=_private)  # noqa: SIM115 - closed by close()

    def append(self, entry: Entry) -> None:
        """Writes an entry and syncs it, or leaves the journal as it was and raises."""
        line = encode(entry)
        good = os.fstat(self._file.fileno()).st_size
        try:
            written = self._file.write(line)
            os.fsync(self._file.fileno())
        except OSError as error:
            written, why = 0, error.strerror
        else:
            why = "the disk is full"
        if written != len(line):
            os.ftruncate(self._file.fileno(), good)  # half a line would spoil the next one
            raise ResourceExhausted(f"journal {self.path}: cannot write {len(line)} bytes: {why}; make room")

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
