"""Carries out what ``membership.job_membership`` decides about one job: calls to its devices, and events.

A member is lost: the others keep what they have, and get ranks of the next generation at once.

    coordinator ── Abort ──────▶ each survivor     what the generation before was doing
    coordinator ── ReseatTask ─▶ each survivor     its rank at the next generation

A device joins, or says that it will leave: all is got ready first, and the others wait only while they move.

    coordinator ── StartTask ──▶ the newcomer      (1) code, data, memory: alone, until it says that it is ready
    coordinator ── ReseatTask ─▶ every member      (2) planned: the ranks for later; a device that leaves gets none
    coordinator ── MoveTask ───▶ every member      (3) all have theirs: they agree on a step and move after it
    coordinator ◀── moved ────── one of them       (4) the device that leaves may go
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hoop.errors import HoopError, PeerError, named
from hoop.events import Event
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.servers.coordinator import Coordinator
from hoop.servers.job_record import JobRecord
from hoop.servers.operations import assign_ranks
from hoop.topology import DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.service import describe

START_S = 30.0
LOADING_S = 30.0
RESEAT_S = 10.0


class JobSupervisor:
    """One job's membership, and the calls that keep its devices in step with it."""

    def __init__(
        self,
        coordinator: Coordinator,
        record: JobRecord,
        listen: Callable[[JobRecord, int], None],
        participants: Sequence[int] = (),
    ) -> None:
        """``listen`` watches the task of a device that takes part, or gets ready.

        ``participants``: of a job that a restarted coordinator finds, the devices that had a rank before.
        """
        self._coordinator, self.record, self._listen = coordinator, record, listen
        self._events: deque[jm.JobEvent] = deque()
        self._busy = False
        self.over = asyncio.Event()
        self.view = jm.JobView(
            record.id,
            elastic=record.elastic,
            planned=record.moves,
            grace_s=coordinator.config.reunion_s,
            participants=frozenset(participants),
        )
        self._unsubscribe = [
            coordinator.on_change(self._changed),
            coordinator.events.subscribe(self._arrived),
        ]

    # ---- in

    def handle(self, event: jm.JobEvent) -> None:
        """Applies an event, and carries out what follows from it; events of its own making come after it."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                now = time.monotonic()
                self.view, instructions = jm.advance(
                    self.view, self._events.popleft(), self._coordinator.state, now
                )
                for instruction in instructions:
                    self._perform(instruction)
        finally:
            self._busy = False

    def _changed(self) -> None:
        """The cluster's state changed, or time passed."""
        if not self.view.over:
            self.handle(jm.JobTick())

    def _arrived(self, event: Event) -> None:
        """A device that joins the cluster, or may come back, is asked to get ready for a job that can use it."""
        forgiven = event.kind == "device_forgiven" and event.fields["communicator"] == str(self.record.id)
        if (event.kind == "device_joined" or forgiven) and not self.view.over:
            self.handle(jm.DeviceArrived(int(event.fields["device"])))

    def complained(self, generation: int, device_id: int, failed: int) -> None:
        """A member waits because its link to another device failed."""
        one = self._coordinator.state.communicators.get(self.record.id)
        if one is not None and failed:
            place = self.record.id, generation, device_id, failed
            self._coordinator.apply(m.Complained(*place, time.monotonic()))

    def resumed(self, generation: int) -> None:
        """The ranks of a generation are at work together."""
        if self.record.id in self._coordinator.state.communicators:
            self._coordinator.apply(m.LinkWorked(self.record.id, generation))
        self.handle(jm.TaskResumed(generation))

    def has_rank(self, device_id: int) -> bool:
        return device_id in jm.active(self.view, self._coordinator.state)

    def drain(self, device_id: int) -> list[Coroutine[Any, Any, None]]:
        """Asks for others to take over a member's rank; what to wait for until they have, or cannot."""
        member = self._coordinator.state.members.get(device_id)
        if not self.view.elastic or member is None or device_id not in self.record.communicator.members:
            return []
        watch = self.record.watches.get(member.info.incarnation)
        self.handle(jm.LeaveRequested(device_id))
        if watch is None or self.view.abandoned:
            return []
        return [_done(watch, self.over)]

    def close(self) -> None:
        """Hears of nothing any more."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []

    # ---- out

    def _perform(self, instruction: jm.JobInstruction) -> None:
        match instruction:
            case jm.Assign():
                self._coordinator.in_background(self._assign(instruction))
            case jm.Move(members):
                move = pb.MoveTaskRequest(job_id=self.record.id)
                for key in members:
                    self._coordinator.in_background(self._tell(key, "MoveTask", move))
            case jm.Invite(device_id):
                self._coordinator.in_background(self._invite(device_id))
            case jm.Release(device_id, final):
                release = pb.ReseatTaskRequest(job_id=self.record.id, final=final)
                self._coordinator.in_background(self._tell(device_id, "ReseatTask", release))
            case jm.Readmit(device_id):
                self._coordinator.apply(m.Readmitted(self.record.id, device_id))
            case jm.Await(device_ids, seconds):
                self._announce_wait(device_ids, seconds)
            case jm.End(error, text):
                if text:
                    self.record.failures.append(named(error, text))
                self.close()
                self.over.set()

    async def _assign(self, assign: jm.Assign) -> None:
        """A new generation of the job's communicator, and to each member its rank in it."""
        record = self.record
        rebuilt = m.Rebuilt(record.id, assign.joining, assign.leaving, assign.planned)
        try:
            one = (await self._coordinator.change(rebuilt)).communicator(record.id)
        except HoopError as error:  # nobody is alive, or the journal cannot be written
            self._coordinator.events.publish("job_failing", f"job {record.id}: {error}", job=record.id)
            self.handle(jm.AssignFailed())
            return
        record.communicator = one
        told = {"kind": "reseated", "generation": one.generation, "devices": list(one.members)}
        record.tell("reseated", json.dumps(told))
        self.handle(jm.Assigned(one.generation, assign.planned))
        requests = {
            device_id: pb.ReseatTaskRequest(
                job_id=record.id, seat=assign_ranks(self._coordinator, one, rank), planned=assign.planned
            )
            for rank, device_id in enumerate(one.members)
        }
        calls = (
            self._coordinator.call(device_id, "ReseatTask", request, RESEAT_S)
            for device_id, request in requests.items()
        )
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures and not self.view.over:
            text = f"job {record.id}: {failures[0]}"
            self._coordinator.events.publish("job_failing", text, job=record.id)
        self.handle(jm.Delivered(one.generation, not failures))

    async def _tell(self, device_id: int, method: str, request: object) -> None:
        """One call that needs no answer: a device that is gone has left all the same."""
        calls = [self._coordinator.call(device_id, method, request, RESEAT_S)]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _invite(self, device_id: int) -> None:
        """Asks a device to load code and data, alone, and to say when it is ready for a rank."""
        record, info = self.record, self._coordinator.state.member(device_id).info
        self.excuse([device_id])
        alone = pb.Seat(communicator_id=record.id | 1 << 62, generation=1, rank=0, members=[describe(info)])
        request = pb.StartTaskRequest(
            job_id=record.id, seat=alone, settings=record.settings, joining=True, run=record.run
        )
        try:
            await self._coordinator.call(device_id, "StartTask", request, START_S)  # (1)
        except PeerError:  # it cannot be reached now
            self.handle(jm.InviteFailed(device_id, info.incarnation, refused=False))
            return
        except HoopError as error:
            self.refuse(info, f"{info}: {error}")
            return
        if not self.view.over:
            self._listen(record, device_id)

    def refuse(self, info: DeviceInfo, why: str) -> None:
        """A device cannot take part: users of the job are told why, and the others go on."""
        self._coordinator.events.publish("job_not_joined", why, job=self.record.id, device=info.device_id)
        text = json.dumps({"kind": "refused", "device": info.device_id, "text": why})
        self.record.tell("refused", text)
        release = pb.ReseatTaskRequest(job_id=self.record.id, final=True)
        self._coordinator.in_background(self._tell(info.device_id, "ReseatTask", release))
        self.handle(jm.InviteFailed(info.device_id, info.incarnation))

    def excuse(self, device_ids: Sequence[int], seconds: float = LOADING_S) -> None:
        """These devices load PyTorch and a job's data, during which Python may not get round to heartbeats.

        With 0 seconds they have loaded it: each has a lease from now on, for its last heartbeat may be older.
        """
        self._coordinator.apply(m.Excused(tuple(device_ids), time.monotonic() + seconds))

    def _announce_wait(self, device_ids: Sequence[int], seconds: float) -> None:
        devices = ", ".join(f"device {key}" for key in device_ids)
        have = jm.active(self.view, self._coordinator.state)
        why = "needs state that other devices have" if have else "has no device left"
        text = f"job {self.record.id} {why}; waits {seconds:.0f} s more for {devices} to come back"
        self._coordinator.events.publish("job_scattered", text, job=self.record.id)
        told = {"kind": "scattered", "waiting": list(device_ids), "seconds": seconds, "text": text}
        self.record.tell("scattered", json.dumps(told))


async def _done(watch: asyncio.Task[None], over: asyncio.Event) -> None:
    """Returns when a task's watch has ended, or the job."""
    ended = asyncio.ensure_future(over.wait())
    try:
        await asyncio.wait([watch, ended], return_when="FIRST_COMPLETED")
    finally:
        ended.cancel()
