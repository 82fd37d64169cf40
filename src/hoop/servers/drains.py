"""Devices that leave on request: a device asks for it (SIGTERM), or a client does (``hoop drain``).

    device ── Leave(planned) ──▶ coordinator      hand_over: again and again, until no job needs the device
    client ── DrainDevice ─────▶ coordinator      drain: a stream of what it waits for
    device ◀── leave ─────────── coordinator      … in the answer to a heartbeat, when no job needs the device

From then on the device gets no new work. ``membership.job_membership`` decides when each of its jobs goes on without
it. A drain lives as long as the call of its client: if that ends before the device is asked to leave, the device
keeps its work. A restarted coordinator knows of no drain; the client calls again (``Cluster.drain``).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from hoop.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, PeerLost
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership.job_membership import HandoverStage
from hoop.membership.state import Member
from hoop.servers.coordinator import Coordinator
from hoop.servers.job_supervisor import JobSupervisor, loading_text
from hoop.servers.jobs import Jobs
from hoop.wire.generated import hoop_pb2 as pb

HAND_OVER_S = 10.0
"""Seconds that a device that leaves by itself waits for the other ranks to continue without it: about one step."""
LOADING_S = 5.0
"""Seconds between two texts to a leaving device which say that a job waits for a device that is loading it."""
PROGRESS_S = 1.0
MAX_TIMEOUT_S = 7 * 86400.0
MAX_EXIT_CODE = 255
HANDED_OVER, LEAVING, LEFT = "handed_over", "leaving", "left"
"""Stages of a drain after those of ``HandoverStage``."""


@dataclass(frozen=True)
class Pending:
    """A job that still needs a device which is to leave."""

    supervisor: JobSupervisor
    handover: jm.Handover

    @property
    def job_id(self) -> int:
        return self.supervisor.record.id

    @property
    def can_move(self) -> bool:
        """Whether the job can go on without the device, now or later."""
        return self.supervisor.view.elastic and not self.supervisor.view.all_leaving


class Drains:
    """All devices of this coordinator that are to leave."""

    def __init__(self, coordinator: Coordinator, jobs: Jobs) -> None:
        self._coordinator, self._jobs = coordinator, jobs
        self._draining: set[int] = set()
        """Ids of the devices that a client drains."""
        self._dismissed: dict[str, int] = {}
        """Exit codes of devices that have handed over everything and are to leave, by incarnation."""

    def is_dismissed(self, incarnation: str) -> bool:
        return incarnation in self._dismissed

    def exit_code(self, incarnation: str) -> int:
        """The exit code for the process of a device that is dismissed."""
        return self._dismissed[incarnation]

    # ---- a device that leaves by itself

    async def hand_over(self, device_id: int, incarnation: str) -> str:
        """Returns when no job needs this device, or no other device can take over, or after ``HAND_OVER_S`` seconds.

        Returns a text if the device should ask again: a job waits for another device, which is loading it.
        """
        member = self._coordinator.state.member(device_id)
        if member.info.incarnation != incarnation or not member.usable:
            return ""
        self._coordinator.apply(m.Drained(device_id))
        began = time.monotonic()
        while True:
            needed = self._request(device_id, began)
            pending = [one for one in needed if one.handover.stage != HandoverStage.WAITING and one.can_move]
            loading = [one for one in pending if one.handover.stage == HandoverStage.LOADING]
            waited = time.monotonic() - began
            if not pending or (waited > HAND_OVER_S and not loading):
                return ""
            if loading and waited > LOADING_S:
                job, found = loading[0].job_id, loading[0].handover
                return f"job {job}: {loading_text(found.device_ids, found.seconds)}; waits for that before it leaves"
            await self._changed(LOADING_S)

    # ---- a device that a client drains

    async def drain(
        self, device_id: int, timeout_s: float, exit_code: int = 0
    ) -> AsyncGenerator[pb.DrainProgress, None]:
        """Moves the work of a device to others and makes it leave. ``timeout_s``: how long it waits for replacements.

        ``exit_code``: of the device's process, if it is one of the ranks that a scheduler started.
        Raises, and leaves everything as it was, if a job cannot go on without the device.
        """
        if not 0 <= timeout_s <= MAX_TIMEOUT_S:  # also refuses NaN
            raise InvalidArgument(f"timeout_s: {timeout_s:g} is not in 0..{MAX_TIMEOUT_S:g} seconds")
        if exit_code > MAX_EXIT_CODE:
            raise InvalidArgument(f"exit_code: {exit_code} is not in 0..{MAX_EXIT_CODE}")
        member = self._coordinator.state.member(device_id)
        if not member.usable:
            raise FailedPrecondition(
                f"{member.info} is {member.health} ({member.reason}): it has no work to hand over; hoop status lists "
                "the devices that are alive"
            )
        if device_id in self._draining or member.draining:
            raise FailedPrecondition(
                f"{member.info} is being drained already, or leaves; hoop status shows when it left"
            )
        self._check_can_move(device_id)
        incarnation = member.info.incarnation
        self._draining.add(device_id)
        moved: dict[int, JobSupervisor] = {}
        try:
            self._coordinator.apply(m.Drained(device_id))
            async for progress in self._move_jobs(member, timeout_s, moved):
                yield progress
            self._dismissed[incarnation] = exit_code
            async for progress in self._await_leave(member):
                yield progress
        finally:
            self._draining.discard(device_id)
            if incarnation not in self._dismissed:
                self._cancel(device_id, incarnation, moved)
            elif not self._has(member):
                self._dismissed.pop(incarnation, None)

    def _check_can_move(self, device_id: int) -> None:
        for supervisor in self._jobs.supervisors:
            if not supervisor.view.elastic and device_id in supervisor.record.communicator.members:
                job = supervisor.record.id
                raise FailedPrecondition(
                    f"device {device_id} has a part of job {job} of which there is no replica (--no-replicate), so no "
                    f"other device can take over: wait for the end of the job, or stop it with hoop attach {job} --stop"
                )

    async def _move_jobs(
        self, member: Member, timeout_s: float, moved: dict[int, JobSupervisor]
    ) -> AsyncIterator[pb.DrainProgress]:
        """Yields what it waits for, until no job needs the device. ``moved`` gets each job that goes on without it."""
        device_id, began = member.info.device_id, time.monotonic()
        deadline = began + timeout_s
        asked: dict[int, JobSupervisor] = {}
        last: dict[int, tuple[str, float]] = {}
        while True:
            if not self._has(member):
                found = self._coordinator.state.members.get(device_id)
                reason = found.reason if found is not None else "it is unknown"
                raise PeerLost(
                    f"{member.info} was lost while it was drained ({reason}); its jobs go on as after a loss"
                )
            now = time.monotonic()  # before the request: the job knows then whether the deadline is over
            pending = self._request(device_id, deadline)
            asked |= {one.job_id: one.supervisor for one in pending}
            for job_id in sorted(asked.keys() - {one.job_id for one in pending} - moved.keys()):
                moved[job_id] = asked[job_id]
                text = f"job {job_id} goes on without device {device_id}"
                yield pb.DrainProgress(stage=HANDED_OVER, job_id=job_id, seconds=time.monotonic() - began, text=text)
            if not pending and not self._jobs.starting:
                return
            for one in pending:
                if one.handover.stage == HandoverStage.WAITING and now > deadline:
                    raise DeadlineExceeded(self._no_replacement(device_id, one, timeout_s))
                stage, said = last.get(one.job_id, ("", -math.inf))
                if stage != one.handover.stage or now - said >= PROGRESS_S:
                    last[one.job_id] = one.handover.stage, now
                    yield self._progress(device_id, one, now - began, deadline - now)
            await self._changed(min(PROGRESS_S, max(0.0, deadline - now)) or PROGRESS_S)

    def _progress(self, device_id: int, one: Pending, waited: float, left: float) -> pb.DrainProgress:
        found = one.handover
        match found.stage:
            case HandoverStage.LOADING:
                text, waited = loading_text(found.device_ids, found.seconds), found.seconds
            case HandoverStage.WAITING:
                others = [key for key in one.supervisor.record.communicator.members if key != device_id]
                enough = others and len(others) >= one.supervisor.view.min_ranks
                then = "then the others go on without it" if enough else "then the drain fails"
                text = (
                    f"no device is there to take the place of device {device_id} ({waited:.0f} s; waits "
                    f"{max(0.0, left):.0f} s more, {then}); start one with: hoop device --join "
                    f"{self._coordinator.address}"
                )
            case _:
                text = f"its ranks move to the other devices ({waited:.0f} s)"
        return pb.DrainProgress(
            stage=str(found.stage),
            job_id=one.job_id,
            device_ids=found.device_ids,
            seconds=waited,
            text=f"job {one.job_id}: {text}",
        )

    def _no_replacement(self, device_id: int, one: Pending, timeout_s: float) -> str:
        others = [key for key in one.supervisor.record.communicator.members if key != device_id]
        min_ranks = one.supervisor.view.min_ranks
        short = "has no other device" if not others else f"needs at least {min_ranks} devices"
        return (
            f"device {device_id} was not drained, it keeps its work: job {one.job_id} {short}, and within "
            f"{timeout_s:g} s none came that can take its place; start one with: hoop device --join "
            f"{self._coordinator.address}, then drain again"
        )

    async def _await_leave(self, member: Member) -> AsyncIterator[pb.DrainProgress]:
        """Yields until the device has left the cluster."""
        device_id, began = member.info.device_id, time.monotonic()
        while self._has(member):
            seconds = time.monotonic() - began
            text = f"device {device_id} has handed over everything, and leaves ({seconds:.0f} s)"
            yield pb.DrainProgress(stage=LEAVING, seconds=seconds, text=text)
            await self._changed(PROGRESS_S)
        yield pb.DrainProgress(stage=LEFT, seconds=time.monotonic() - began, text=f"device {device_id} has left")

    def _cancel(self, device_id: int, incarnation: str, moved: dict[int, JobSupervisor]) -> None:
        """Gives the device its work back: it stays in its jobs, and is invited to those that it has left."""
        member = self._coordinator.state.members.get(device_id)
        if member is None or member.info.incarnation != incarnation or not member.usable:
            return
        self._coordinator.apply(m.Drained(device_id, draining=False))
        for supervisor in self._jobs.supervisors:
            if device_id in supervisor.view.leaving or supervisor.record.id in moved:
                supervisor.handle(jm.LeaveCancelled(device_id))

    # ---- both

    def _request(self, device_id: int, until: float) -> list[Pending]:
        """Asks every job to go on without the device; returns those that still need it."""
        pending = []
        for supervisor in self._jobs.supervisors:
            supervisor.request_leave(device_id, until)
            found = supervisor.handover(device_id)
            if found.stage != HandoverStage.DONE:
                pending.append(Pending(supervisor, found))
        return pending

    def _has(self, member: Member) -> bool:
        """Whether this device, in the same process, is still a member of the cluster."""
        found = self._coordinator.state.members.get(member.info.device_id)
        return found is not None and found.usable and found.info.incarnation == member.info.incarnation

    async def _changed(self, seconds: float) -> None:
        """Waits until the state of the cluster or of a job changes, or time passed: each tick is such a change."""
        changed = asyncio.Event()
        unsubscribe = self._coordinator.on_change(changed.set)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), seconds)
        finally:
            unsubscribe()
