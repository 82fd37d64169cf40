"""``JobSupervisor``: the shell round ``membership.job_membership``, for one job.

It turns the coordinator's events about the job into events of the pure state machine, and carries out the instructions:
calls to devices, and events for users.

A member is lost: the other members keep their state, and get ranks of the next generation at once.

    coordinator ── Abort ──────────────▶ each survivor    ends the operations of the previous generation
    coordinator ── ReassignTask ───────▶ each survivor    its rank in the next generation

A device joins, or asks to leave: preparation comes first, and the ranks wait only while they move.

    coordinator ── StartTask ──────────▶ the new device   (1) loads code, data and memory alone, and emits ``ready``
    coordinator ── ReassignTask ───────▶ every member     (2) planned: ranks for later; a device that leaves gets none
    coordinator ── CommitReassignment ─▶ every member     (3) they agree on a step, and take the ranks after it
    coordinator ◀── ``resized`` ──────── one of them      (4) the device that leaves may end
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence

from hoop import job_events as ev
from hoop.errors import HoopError, PeerCause, PeerError, PeerLost, error_from_name
from hoop.events import Event
from hoop.membership import events as m
from hoop.membership import job_membership as jm
from hoop.membership.reachability import cut_off, describe
from hoop.membership.state import CommunicatorState, Health
from hoop.servers.coordinator import Coordinator, DeviceMethod, Request, Response
from hoop.servers.job_record import JobRecord
from hoop.servers.operations import rank_assignment_message
from hoop.topology import DeviceInfo
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.service import device_message

START_S = 30.0
LOADING_S = 30.0
"""Seconds that a device that loads a job may be silent: no other thread runs while it loads a library of PyTorch."""
ASSIGN_S = 10.0


class JobSupervisor:
    """Keeps the devices of one job in step with its membership."""

    def __init__(
        self,
        coordinator: Coordinator,
        record: JobRecord,
        watch_task: Callable[[JobRecord, int], None],
        participants: Sequence[int] = (),
    ) -> None:
        """``watch_task`` starts to receive the events of a device's task.

        ``participants``: devices that had a rank before, for a job that a restarted coordinator finds.
        """
        self._coordinator, self.record, self._watch_task = coordinator, record, watch_task
        self._events: deque[jm.JobMembershipEvent] = deque()
        self._busy = False
        self._loading: set[int] = set()
        """Ids of the devices that may be silent because they load the job."""
        self._began = time.monotonic()
        self._next_notice = self._began + jm.NOTICE_S
        self.over = asyncio.Event()
        self.view = jm.JobView(
            record.id,
            elastic=record.elastic,
            planned=record.moves,
            hang_s=record.hang_s,
            restart_grace_s=coordinator.config.restart_grace_s,
            size=len(participants or record.communicator.members),
            min_ranks=max(record.min_devices, record.user_min_devices),
            user_min_devices=record.user_min_devices,
            max_devices=record.max_devices,
            participants=frozenset(participants),
            holders=frozenset(() if record.communicator.ran else participants),
        )
        self._unsubscribe = [
            coordinator.on_change(self._on_cluster_change),
            coordinator.events.subscribe(self._on_cluster_event),
        ]

    # ---- events

    def handle(self, event: jm.JobMembershipEvent) -> None:
        """Applies an event and carries out its instructions. Events that these cause are queued behind it."""
        self._events.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                now = time.monotonic()
                self.view, instructions = jm.advance(self.view, self._events.popleft(), self._coordinator.state, now)
                for instruction in instructions:
                    self._perform(instruction)
        finally:
            self._busy = False

    def _on_cluster_change(self) -> None:
        """The cluster's state changed, or time passed."""
        self._suspend_heartbeats_again()
        if not self.view.over:
            self.handle(jm.JobTick())
            self._announce_first_load(time.monotonic())

    def _on_cluster_event(self, event: Event) -> None:
        """A device joined the cluster, its eviction ended, or others can connect to it: the job may invite it."""
        if self.view.over:
            return
        readmitted = event.kind == "eviction_ended" and event.fields["communicator"] == str(self.record.id)
        if event.kind == "device_joined" or readmitted:
            self.handle(jm.DeviceArrived(int(event.fields["device"])))
        elif event.kind == "device_reachable":
            for device_id in _devices_of(event):
                self.handle(jm.DeviceArrived(device_id))
        elif event.kind == "device_unreachable":
            state, members = self._coordinator.state, jm.active(self.view, self._coordinator.state)
            for device_id in _devices_of(event):
                new = device_id not in self.view.participants
                if self.view.elastic and new and cut_off(state, device_id, members):
                    reason = f"{state.members[device_id].info} takes no part: {describe(state, device_id)}"
                    self.announce_refusal(device_id, reason)

    def report_link_fault(self, generation: int, device_id: int, peer_id: int) -> None:
        """A member waits because its link to ``peer_id`` failed; 0: no link failed."""
        one = self._coordinator.state.communicators.get(self.record.id)
        if one is not None and peer_id:
            self._coordinator.apply(
                m.LinkFailureReported(
                    communicator_id=self.record.id,
                    generation=generation,
                    device_id=device_id,
                    peer_id=peer_id,
                    now=time.monotonic(),
                )
            )

    def on_resumed(self, generation: int) -> None:
        """The ranks of a generation run steps together."""
        if self.record.id in self._coordinator.state.communicators:
            try:
                self._coordinator.apply(m.LinkWorked(self.record.id, generation))
            except HoopError as error:  # the journal cannot be written: only a restarted coordinator would need it
                self._coordinator.events.publish("coordinator_failing", str(error))
        self.handle(jm.TaskResumed(generation))

    def has_rank(self, device_id: int) -> bool:
        return device_id in jm.active(self.view, self._coordinator.state)

    def request_leave(self, device_id: int, until: float) -> None:
        """Asks the job to go on without a device. ``until``: how long it waits for another one to take its place.

        A job that could not do without the state of the device has forgotten the request, and gives the device a rank
        again: then the request is repeated.
        """
        earlier = until < self.view.leaving.get(device_id, math.inf)
        if self.view.elastic and earlier and self.has_rank(device_id):
            self.handle(jm.LeaveRequested(device_id, until))

    def handover(self, device_id: int) -> jm.Handover:
        """How far the job goes on without a device for which ``request_leave`` was called."""
        return jm.handover(self.view, self._coordinator.state, device_id, time.monotonic())

    def close(self) -> None:
        """Stops receiving events of the cluster."""
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = []

    # ---- instructions

    def _perform(self, instruction: jm.JobInstruction) -> None:
        match instruction:
            case jm.Assign():
                self._coordinator.in_background(self._assign(instruction))
            case jm.Move(members):
                move = pb.CommitReassignmentRequest(job_id=self.record.id, generation=self.record.generation)
                for key in members:
                    self._coordinator.in_background(self._notify(key, lambda device: device.CommitReassignment, move))
            case jm.Invite(device_id):
                self._coordinator.in_background(self._invite(device_id))
            case jm.Release(device_id, final):
                self._release(device_id, final)
            case jm.Refuse(device_id, text):
                info = self._coordinator.state.member(device_id).info
                self.refuse(info, f"{info} on {info.host} cannot take part: {text}")
            case jm.Expel(device_id, text):
                self._expel(device_id, text)
            case jm.Readmit(device_id):
                self._coordinator.apply(m.Readmitted(self.record.id, device_id))
            case jm.Await(device_ids, seconds):
                self._announce_wait(device_ids, seconds)
            case jm.AwaitMore(ranks, seconds):
                self._announce_shortage(ranks, seconds)
            case jm.AwaitLoading(device_ids, seconds):
                self._announce_loading(device_ids, seconds)
            case jm.End(error, text):
                if text:
                    self.record.failures.append(error_from_name(error, text))
                self.close()
                self.over.set()

    def _expel(self, device_id: int, text: str) -> None:
        """A device hangs: the others go on without it. A device that is released while it hangs ends its process."""
        record = self.record
        record.losses.append(PeerLost(text, cause=PeerCause.DEVICE_LOST))
        record.emit(ev.DeviceLost(device_id, text), record.rank(device_id), device_id)
        self._coordinator.events.publish("job_device_hung", text, job=record.id, device=device_id)
        self._release(device_id, final=True)

    def _release(self, device_id: int, final: bool) -> None:
        """Tells a device that it has no rank in the newest generation."""
        release = self.record.release(final)
        self._coordinator.in_background(self._notify(device_id, lambda device: device.ReassignTask, release))

    async def _assign(self, assign: jm.Assign) -> None:
        """Begins a new generation of the job's communicator, and sends each member its rank."""
        record = self.record
        rebuilt = m.Rebuilt(record.id, assign.joining, assign.leaving, assign.planned)
        before = self._coordinator.state.communicators.get(record.id, record.communicator)
        try:
            one = (await self._coordinator.apply_with_retry(rebuilt)).communicator(record.id)
        except HoopError as error:  # no device is alive, or the journal cannot be written
            self._coordinator.events.publish("job_failing", f"job {record.id}: {error}", job=record.id)
            self.handle(jm.AssignFailed())
            return
        record.communicator = one
        record.emit(ev.Reassigned(one.generation, list(one.members), self._left_out(before, one)))
        self.announce_size()
        self.handle(jm.Assigned(one.generation, assign.planned))
        requests = {
            device_id: pb.ReassignTaskRequest(
                job_id=record.id,
                assignment=rank_assignment_message(self._coordinator, one, rank),
                planned=assign.planned,
            )
            for rank, device_id in enumerate(one.members)
        }
        calls = (
            self._coordinator.call(device_id, lambda device: device.ReassignTask, request, ASSIGN_S)
            for device_id, request in requests.items()
        )
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures and not self.view.over:
            text = f"job {record.id}: {failures[0]}"
            self._coordinator.events.publish("job_failing", text, job=record.id)
        self.handle(jm.Delivered(one.generation, not failures))

    def _left_out(self, before: CommunicatorState, now: CommunicatorState) -> dict[str, str]:
        """The devices that have no rank any more because they were lost or evicted, each with the reason."""
        found: dict[str, str] = {}
        for device_id in (key for key in before.members if key not in now.members):
            member = self._coordinator.state.members.get(device_id)
            if member is None or member.health in (Health.DEAD, Health.SUSPECT):
                reason = f" ({member.reason})" if member is not None and member.reason else ""
                found[str(device_id)] = f"{member.info if member else f'device {device_id}'} is lost{reason}"
            elif device_id == before.broken_by:
                found[str(device_id)] = before.reason
        return found

    async def _notify(self, device_id: int, method: DeviceMethod[Request, Response], request: Request) -> None:
        """One call whose failure does not matter: an unreachable device has left the job anyway."""
        calls = [self._coordinator.call(device_id, method, request, ASSIGN_S)]
        await asyncio.gather(*calls, return_exceptions=True)

    async def _invite(self, device_id: int) -> None:
        """Asks a device to load code and data alone. It emits ``ready`` when it can take a rank."""
        record, info = self.record, self._coordinator.state.member(device_id).info
        self.suspend_heartbeats([device_id])
        alone = pb.RankAssignment(
            communicator_id=record.id | 1 << 62, generation=1, rank=0, members=[device_message(info)]
        )
        request = pb.StartTaskRequest(
            job_id=record.id,
            assignment=alone,
            settings=record.join_settings,
            joining=True,
            run=record.run,
            future_ranks=len({*record.communicator.members, device_id}),
            generation=record.generation,
        )
        try:
            await self._coordinator.call(device_id, lambda device: device.StartTask, request, START_S)  # (1)
        except PeerError:  # unreachable for now
            self.handle(jm.InviteFailed(device_id, info.incarnation, refused=False))
            return
        except HoopError as error:
            self.refuse(info, f"{info}: {error}")
            return
        if not self.view.over:
            self._watch_task(record, device_id)

    def refuse(self, info: DeviceInfo, reason: str) -> None:
        """A device cannot take part: emits the reason, and releases the device. The job goes on without it."""
        self.announce_refusal(info.device_id, reason)
        self._release(info.device_id, final=True)
        self.handle(jm.InviteFailed(info.device_id, info.incarnation))

    def announce_refusal(self, device_id: int, reason: str) -> None:
        """Emits why a device takes no part."""
        self._coordinator.events.publish("job_not_joined", reason, job=self.record.id, device=device_id)
        self.record.emit(ev.Refused(device_id, reason))

    def suspend_heartbeats(self, device_ids: Sequence[int], seconds: float = LOADING_S) -> None:
        """Lets devices send no heartbeat while they load PyTorch and data, which may block Python for long.

        Each heartbeat begins that time again: on a loaded machine loading may take minutes. ``seconds`` 0:
        they have loaded. Each has a full lease from now on, as its last heartbeat may be old.
        """
        self._loading = self._loading | set(device_ids) if seconds else self._loading - set(device_ids)
        self._coordinator.apply(m.HeartbeatSuspended(tuple(device_ids), time.monotonic() + seconds))

    def _suspend_heartbeats_again(self) -> None:
        """Suspends the heartbeats of the devices that still load the job, from their last heartbeat on."""
        if not self.view.listing_tasks:
            self._loading &= set(self.view.tasks)
        for device_id in self._loading & self._coordinator.state.members.keys():
            heartbeats = self._coordinator.state.members[device_id].heartbeats
            until = heartbeats.last_heartbeat + LOADING_S
            if until > heartbeats.suspended_until:
                self._coordinator.apply(m.HeartbeatSuspended((device_id,), until))

    def _announce_first_load(self, now: float) -> None:
        """Announces, now and then, that the first ranks load the job: the first step needs all of them."""
        if now >= self._next_notice and (found := sorted(filter(self.has_rank, self._loading))):
            self._next_notice = now + jm.NOTICE_S
            self._announce_loading(found, now - self._began)

    def _announce_loading(self, device_ids: Sequence[int], seconds: float) -> None:
        text = f"job {self.record.id} waits: {loading_text(device_ids, seconds)}"
        self._coordinator.events.publish("job_waiting_for_device", text, job=self.record.id)
        self.record.emit(ev.WaitingForDevice(list(device_ids), seconds, text))

    def announce_size(self) -> None:
        """Publishes how many devices the job has, and how many more it can use, if it says so."""
        record = self.record
        if record.max_devices:
            count = len(record.communicator.members)
            more = max(0, record.max_devices - count)
            text = f"job {record.id} has {count} device{'s' * (count != 1)} and can use {more} more"
            self._coordinator.events.publish("job_devices", text, job=record.id, devices=count, more=more)

    def _announce_shortage(self, ranks: int, seconds: float) -> None:
        needed = self.record.user_min_devices
        text = (
            f"job {self.record.id} has {ranks} device{'s' * (ranks != 1)} and needs {needed} (--min); waits "
            f"{seconds:.0f} s for others; start one with: hoop device --join {self._coordinator.address}"
        )
        self._coordinator.events.publish("job_waiting_for_restart", text, job=self.record.id)
        self.record.emit(ev.WaitingForRestart([], seconds, text))

    def _announce_wait(self, device_ids: Sequence[int], seconds: float) -> None:
        devices = ", ".join(f"device {key}" for key in device_ids)
        active = jm.active(self.view, self._coordinator.state)
        why = "needs state that other devices have" if active else "has no device left"
        text = f"job {self.record.id} {why}; waits {seconds:.0f} s more for {devices} to come back"
        self._coordinator.events.publish("job_waiting_for_restart", text, job=self.record.id)
        self.record.emit(ev.WaitingForRestart(list(device_ids), seconds, text))


def _devices_of(event: Event) -> list[int]:
    """The devices that an event about connections is about: the one to connect to, and those that connect to it."""
    return [int(event.fields["device"]), *(int(one) for one in event.fields["sources"].split() if int(one))]


def loading_text(device_ids: Sequence[int], seconds: float) -> str:
    """``device 5 is loading the job (12 s)``."""
    devices = ", ".join(map(str, device_ids))
    one = len(device_ids) == 1
    return f"device{'' if one else 's'} {devices} {'is' if one else 'are'} loading the job ({seconds:.0f} s)"
