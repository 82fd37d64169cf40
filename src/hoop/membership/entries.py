"""What the journal keeps: one entry for everything that a restarted coordinator must know."""

from __future__ import annotations

from dataclasses import asdict

from hoop.membership import messages as m
from hoop.membership.state import CommunicatorState, JobState, Member
from hoop.topology import DeviceInfo


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
