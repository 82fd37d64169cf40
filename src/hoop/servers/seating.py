"""Who takes part in a job, while it runs.

A member is lost: those who are left keep what they have, and get the next generation's seats at once.

    coordinator ── Abort ──────▶ each survivor     what the generation before was doing
    coordinator ── ReseatTask ─▶ each survivor

Somebody joins, or says that it will leave: all is got ready first, and nobody waits longer than it takes to move.

    coordinator ── StartTask ──▶ the newcomer      (1) code, data, memory: alone, until it says that it is ready
    coordinator ── ReseatTask ─▶ everybody         (2) planned: the seats for later; whoever leaves gets none
    coordinator ── MoveTask ───▶ every member      (3) all have theirs: they agree on a step and move after it
    coordinator ◀── moved ────── one of them       (4) whoever leaves may go
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from hoop.errors import HoopError
from hoop.events import Event
from hoop.membership import messages as m
from hoop.servers.conductor import Conductor
from hoop.servers.coordinator import Coordinator
from hoop.servers.job_record import JobRecord, first
from hoop.servers.launching import seat
from hoop.topology import DeviceInfo
from hoop.wire.convert import describe
from hoop.wire.generated import hoop_pb2 as pb

START_S = 30.0
LOADING_S = 30.0
RESEAT_S = 10.0
AGAIN_S = 0.2
"""Before seats that could not be given are given anew."""
DRAIN_S = 10.0
"""How long a device that leaves is asked to wait for the others to take over: a step, mostly."""


class Seating:
    """Gives the devices of jobs their seats."""

    def __init__(
        self, coordinator: Coordinator, conductor: Conductor, watch: Callable[[JobRecord, int], None]
    ) -> None:
        """``watch`` listens to a device that takes part, or gets ready."""
        self._coordinator, self._conductor, self._watch = coordinator, conductor, watch

    async def supervise(self, job: JobRecord) -> None:
        """Gives out new seats whenever that is needed, until the job is over, or all are lost."""
        while self._goes_on(job):
            one = job.communicator
            broken = self._stop(job)
            if not self._broken(job):
                await first(broken.wait(), job.over.wait(), job.changed.wait(), job.uneven.wait())
            if not self._goes_on(job):
                break
            job.changed.clear()
            try:
                if self._broken(job) or broken.is_set() or not job.moves:
                    await self.rebuild(job)
                else:
                    await self._plan(job)
            except HoopError as error:
                if not any(self._coordinator.state.members[key].usable for key in one.members):
                    return
                self._coordinator.events.publish("job_failing", f"job {job.id}: {error}", job=job.id)
                job.uneven.set()
                await first(self._stop(job).wait(), asyncio.sleep(AGAIN_S))
            finally:
                if job.communicator is not one:
                    self._coordinator.stops.pop((one.id, one.generation), None)

    def _goes_on(self, job: JobRecord) -> bool:
        members, state = job.communicator.members, self._coordinator.state
        return not job.over.is_set() and any(job.seated(state, key) for key in members)

    def _stop(self, job: JobRecord) -> asyncio.Event:
        one = job.communicator
        return self._coordinator.stops.setdefault((one.id, one.generation), asyncio.Event())

    def _broken(self, job: JobRecord) -> bool:
        return job.uneven.is_set() or bool(self._coordinator.state.communicator(job.id).broken_by)

    async def rebuild(self, job: JobRecord) -> None:
        """At once, without whoever is lost, leaving, or has nothing to go on with."""
        job.uneven.clear()
        state, old = self._coordinator.state, job.communicator
        newcomers = sorted(job.ready)
        evicted = [key for key in old.members if key in state.trouble(job.id).out]
        there = [key for key in old.members if key in newcomers or job.seated(state, key)]
        gone = [key for key in old.members if key in job.leaving or key not in there]
        job.communicator = await self._conductor.rebuild(job.id, newcomers, gone)
        job.ready -= set(newcomers)  # not before: one that could not be seated has to be the next time
        await self._seats(job, job.communicator.members, planned=False)
        self._coordinator.in_background(self._release(job, 2 * evicted))
        await self._release(job, [key for key in gone if key in job.leaving])

    async def _plan(self, job: JobRecord) -> None:
        """When all are ready for it, and without disturbing anybody before."""
        old = job.communicator
        joining = tuple(sorted(job.ready - set(old.members)))
        leaving = tuple(sorted(job.leaving & set(old.members)))
        if not joining and (not leaving or len(leaving) == len(old.members)):
            return
        job.ready.clear()
        state = self._coordinator.apply(m.Rebuilt(job.id, joining, leaving, planned=True))
        job.communicator = state.communicator(job.id)
        job.moved.clear()
        broken = self._stop(job)
        await self._seats(job, job.communicator.members, planned=True)  # (2)
        await self._release(job, leaving)
        move = pb.MoveTaskRequest(job_id=job.id)
        await self._all("MoveTask", dict.fromkeys(old.members, move))  # (3)
        await first(job.moved.wait(), broken.wait(), job.over.wait(), job.uneven.wait())
        await self._release(job, leaving)  # (4)

    async def _seats(self, job: JobRecord, members: Sequence[int], planned: bool) -> None:
        one = job.communicator
        told = {"kind": "reseated", "generation": one.generation, "devices": list(members)}
        job.tell("reseated", json.dumps(told))
        requests = {
            device_id: pb.ReseatTaskRequest(
                job_id=job.id, seat=seat(self._coordinator, one, rank), planned=planned
            )
            for rank, device_id in enumerate(members)
        }
        job.joining -= {self._coordinator.state.members[key].info.incarnation for key in members}
        await self._all("ReseatTask", requests)

    async def _release(self, job: JobRecord, leaving: Sequence[int]) -> None:
        """No seat for those; the second time they hear it they go, for nobody needs them any more."""
        none = pb.ReseatTaskRequest(job_id=job.id)
        calls = (self._coordinator.call(key, "ReseatTask", none, RESEAT_S) for key in leaving)
        await asyncio.gather(*calls, return_exceptions=True)  # one that is gone has left all the same

    async def _all(self, method: str, requests: Mapping[int, object]) -> None:
        """Calls each device; raises if one cannot be reached, or will not."""
        calls = (self._coordinator.call(key, method, one, RESEAT_S) for key, one in requests.items())
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def complained(self, job: JobRecord, generation: int, device_id: int, failed: int) -> None:
        """A member waits for another seat, because its link to another device failed (0: it does not know which)."""
        if failed:
            place = job.id, generation, device_id, failed
            self._coordinator.apply(m.Complained(*place, time.monotonic()))
        self._coordinator.in_background(self._unseated(job, generation))

    def settled(self, job: JobRecord) -> None:
        """The members are at work in the seats that they were given last."""
        self._coordinator.apply(m.Worked(job.id, job.communicator.generation))
        job.moved.set()

    async def _unseated(self, job: JobRecord, generation: int) -> None:
        """If nothing was decided by then, all get new seats all the same."""
        await first(job.over.wait(), asyncio.sleep(self._coordinator.config.detector.lease_s))
        if generation == job.communicator.generation:
            job.uneven.set()

    # ---- coming and going

    def excuse(self, device_ids: Sequence[int], seconds: float = LOADING_S) -> None:
        """They load PyTorch and a job's data, in which Python may hold its breath; until they say that they have.

        Then each has a lease from now on: its last heartbeat may be of before.
        """
        self._coordinator.apply(m.Excused(tuple(device_ids), time.monotonic() + seconds))

    def welcome(self, job: JobRecord, event: Event) -> None:
        """A device that joins the cluster is asked to get ready for a job that can use it."""
        forgiven = event.kind == "device_forgiven" and event.fields["communicator"] == str(job.id)
        if (event.kind == "device_joined" or forgiven) and job.elastic and not job.over.is_set():
            self._coordinator.in_background(self.invite(job, int(event.fields["device"])))

    async def invite(self, job: JobRecord, device_id: int) -> None:
        """Asks a device to get ready, unless it has been asked, or was only doubted and has its seat."""
        state = self._coordinator.state
        if device_id in state.trouble(job.id).out:
            return  # it was evicted, and has to wait
        info = state.member(device_id).info
        seated = device_id in state.communicator(job.id).members and job.seated(state, device_id)
        if seated or info.incarnation in job.joining:
            return
        job.joining.add(info.incarnation)
        self.excuse([device_id])
        alone = pb.Seat(communicator_id=job.id | 1 << 62, generation=1, rank=0, members=[describe(info)])
        request = pb.StartTaskRequest(
            job_id=job.id, seat=alone, settings=job.settings, joining=True, run=job.run
        )
        try:
            await self._coordinator.call(device_id, "StartTask", request, START_S)  # (1)
        except HoopError as error:
            job.joining.discard(info.incarnation)
            self.without(job, info, f"{info}: {error}")
            return
        if not job.over.is_set():
            self._watch(job, device_id)

    def without(self, job: JobRecord, info: DeviceInfo, why: str) -> None:
        """A device cannot take part: whoever follows the job hears why, and the others go on."""
        self._coordinator.events.publish("job_not_joined", why, job=job.id, device=info.device_id)
        job.tell("refused", json.dumps({"kind": "refused", "device": info.device_id, "text": why}))
        self._coordinator.in_background(self._send_away(job, info.device_id))

    async def _send_away(self, job: JobRecord, device_id: int) -> None:
        for _ in range(2):  # the second time it knows that nobody needs it any more
            await self._release(job, [device_id])

    async def drain(self, jobs: Sequence[JobRecord], device_id: int) -> None:
        """Returns when none of these needs the device any more; or when nobody can take over, or it takes too long."""
        waits = []
        for job in jobs:
            if not job.elastic or device_id not in job.communicator.members:
                continue
            job.leaving.add(device_id)
            if job.leaving >= set(job.communicator.members):
                job.abandoned.set()
            watch = job.watches.get(self._coordinator.state.member(device_id).info.incarnation)
            if watch is not None:
                job.changed.set()
                waits.append(first(_done(watch), job.over.wait(), job.abandoned.wait()))
        if waits:
            await first(_all(waits), asyncio.sleep(DRAIN_S))


async def _done(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])


async def _all(waits: Sequence[Coroutine[Any, Any, None]]) -> None:
    await asyncio.gather(*waits)
