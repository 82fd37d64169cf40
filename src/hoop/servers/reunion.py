"""All devices of a job are lost at once: it waits a while for those that can come back with what they held.

    devices      killed, restarted on their arena files, join with new incarnations, get ready for the job again
    coordinator  seats them when all are ready, or those that are when the time is over

Which step they go on from they find out among themselves. If nobody comes, the job has failed by the devices' loss.
"""

from __future__ import annotations

import asyncio
import json
import time

from hoop.errors import HoopError
from hoop.membership.state import Health
from hoop.servers.coordinator import Coordinator
from hoop.servers.job_record import JobRecord, first
from hoop.servers.seating import AGAIN_S, Seating


async def reunite(coordinator: Coordinator, seating: Seating, job: JobRecord) -> bool:
    """Whether the job goes on, with those who came back; returns at once where nobody could."""
    seconds, state = coordinator.config.reunion_s, coordinator.state
    # Those it began with too: the first that died of a machine may have been given up before the last one did.
    took_part = {key: state.members[key] for key in (*state.jobs[job.id].devices, *job.communicator.members)}
    awaited = {key for key, one in took_part.items() if one.info.keeps_memory and one.health != Health.LEFT}
    if not awaited or not seconds or not job.elastic or job.ended or job.failures:
        return False
    until = time.monotonic() + seconds
    for key in (key for key, one in took_part.items() if one.usable):
        coordinator.in_background(seating.invite(job, key))  # it was back before its loss was known
    told: set[int] | None = None
    while (left := until - time.monotonic()) > 0 and not job.abandoned.is_set():
        missing = awaited - job.ready
        if job.ready and not missing and await _seated(coordinator, seating, job):
            return True
        if missing != told:
            _tell(coordinator, job, sorted(missing), left)
            told = missing
        job.changed.clear()
        await first(job.changed.wait(), job.abandoned.wait(), asyncio.sleep(left if missing else AGAIN_S))
    return bool(job.ready) and not job.abandoned.is_set() and await _seated(coordinator, seating, job)


async def _seated(coordinator: Coordinator, seating: Seating, job: JobRecord) -> bool:
    try:
        await seating.rebuild(job)
    except HoopError as error:  # one more was lost meanwhile
        coordinator.events.publish("job_failing", f"job {job.id}: {error}", job=job.id)
        return False
    return True


def _tell(coordinator: Coordinator, job: JobRecord, missing: list[int], left: float) -> None:
    devices = ", ".join(f"device {key}" for key in missing)
    text = f"all devices of job {job.id} were lost; waits {left:.0f} s more for {devices} to come back"
    coordinator.events.publish("job_scattered", text, job=job.id)
    told = {"kind": "scattered", "waiting": missing, "seconds": left, "text": text}
    job.tell("scattered", json.dumps(told))
