"""hoop.v1.Coordinator: the gRPC service for membership, jobs, communicators and operations.

``CoordinatorServer`` is the composition root: it builds a coordinator with Hoop's service and the lab's.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from typing import TYPE_CHECKING

from hoop.environment import versions
from hoop.errors import InvalidArgument, MembershipChanged, NotFound
from hoop.events import wall_clock
from hoop.membership import events as m
from hoop.membership.reachability import describe, left_out
from hoop.membership.state import CommunicatorState, Member
from hoop.memory.allocator import MAX_NAME
from hoop.servers import lab_service
from hoop.servers.client_sessions import ClientSessions, check_session
from hoop.servers.coordinator import Coordinator, CoordinatorConfig
from hoop.servers.drains import Drains
from hoop.servers.grpc_server import ClientReports
from hoop.servers.host_examination import examine_hosts
from hoop.servers.job_record import follow_events
from hoop.servers.jobs import Jobs
from hoop.servers.link_checks import JoinCheck, LinkDiagnosis
from hoop.servers.operation_request import OperationRequest
from hoop.servers.operations import OperationGroups, OperationQueue, copy
from hoop.topology import Address
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.job_settings import check_settings
from hoop.wire.service import Receiving, device_info, device_message, event_message, handlers

if TYPE_CHECKING:
    from hoop.servers.metrics_endpoint import MetricsEndpoint

SERVICE = pb.DESCRIPTOR.services_by_name["Coordinator"]
MAX_INTERVAL_S = 60.0
"""Maximum seconds between two groups of a job's events (``WatchJob``)."""
MAX_ACTIVITIES = 8
"""Maximum number of activities in a heartbeat; a device that sends more is cut off."""


class CoordinatorService:
    """Hoop's coordinator service. Each method is the RPC of the same name."""

    def __init__(self, coordinator: Coordinator, operations: OperationQueue, groups: OperationGroups) -> None:
        self._coordinator = coordinator
        self._operations = operations
        self._groups = groups
        self.join_check = JoinCheck(coordinator)
        self.jobs = Jobs(coordinator, operations, self.join_check)
        self._sessions = ClientSessions(coordinator)
        self._link_diagnosis = LinkDiagnosis(coordinator)
        self._drains = Drains(coordinator, self.jobs)

    # ---- devices

    async def join(self, request: pb.JoinRequest) -> pb.JoinResponse:
        info = device_info(request.device)
        if info.device_id >= 1 << 63 and info.device_id not in self._coordinator.state.members:
            raise InvalidArgument(f"device_id: {info.device_id} leaves no room for others; choose one below 2^63")
        state = await self._coordinator.apply_with_retry(m.Joined(info, time.monotonic()))
        device_id = info.device_id or next(
            key for key, member in state.members.items() if member.info.incarnation == info.incarnation
        )
        detector = self._coordinator.config.detector
        return pb.JoinResponse(device_id=device_id, heartbeat_s=detector.heartbeat_s, lease_s=detector.lease_s)

    async def send_heartbeats(self, heartbeats: AsyncIterator[pb.Heartbeat]) -> AsyncIterator[pb.HeartbeatAnswer]:
        last: pb.Heartbeat | None = None
        try:
            async for heartbeat in heartbeats:
                last = heartbeat
                try:
                    self._coordinator.apply(m.Heartbeat(heartbeat.device_id, heartbeat.incarnation, time.monotonic()))
                except MembershipChanged:
                    yield pb.HeartbeatAnswer(known=False)
                    return
                if self._drains.is_dismissed(heartbeat.incarnation):
                    code = self._drains.exit_code(heartbeat.incarnation)
                    yield pb.HeartbeatAnswer(known=True, leave=True, exit_code=code)
                self._coordinator.memory[heartbeat.device_id] = heartbeat.memory
                self._coordinator.activities[heartbeat.device_id] = heartbeat.activities[:MAX_ACTIVITIES]
                self._link_diagnosis.on_heartbeat(heartbeat)
        finally:
            if last is not None:
                self._coordinator.apply(m.LinkClosed(last.device_id, last.incarnation))

    async def leave(self, request: pb.LeaveRequest) -> pb.LeaveResponse:
        if request.planned:
            return pb.LeaveResponse(waits_for=await self._drains.hand_over(request.device_id, request.incarnation))
        await self._coordinator.apply_with_retry(m.Left(request.device_id, request.incarnation))
        return pb.LeaveResponse()

    async def drain_device(self, request: pb.DrainDeviceRequest) -> AsyncIterator[pb.DrainProgress]:
        drain = self._drains.drain(request.device_id, request.timeout_s, request.exit_code)
        async with aclosing(drain) as progress:
            async for one in progress:
                yield one

    # ---- status

    async def get_status(self, _: pb.GetStatusRequest) -> pb.GetStatusResponse:
        state = self._coordinator.state
        out = left_out(state, state.usable())
        return pb.GetStatusResponse(
            address=str(self._coordinator.address),
            pid=os.getpid(),
            devices=[self._member(state.members[device_id], out) for device_id in sorted(state.members)],
            communicators=[self._communicator(one) for one in state.communicators.values()],
            jobs=self.jobs.descriptions(),
            time=wall_clock(),
            hoop_version=versions().get("hoop", ""),
            lease_s=self._coordinator.config.detector.lease_s,
        )

    async def examine_hosts(self, request: pb.ExamineHostsRequest) -> pb.ExamineHostsResponse:
        return pb.ExamineHostsResponse(hosts=await examine_hosts(self._coordinator, request.job))

    def _member(self, member: Member, left_out: Collection[int]) -> pb.Member:
        device_id = member.info.device_id
        return pb.Member(
            device=device_message(member.info),
            state="draining" if member.draining and member.usable else str(member.health),
            reason=member.reason,
            memory=self._coordinator.memory.get(device_id) or pb.DeviceMemory(capacity=member.info.capacity),
            silent_s=max(0.0, time.monotonic() - member.heartbeats.last_heartbeat),
            unreachable=describe(self._coordinator.state, device_id),
            left_out=device_id in left_out,
            activities=self._coordinator.activities.get(device_id, ()) if member.usable else (),
        )

    def _communicator(self, one: CommunicatorState) -> pb.Communicator:
        members = [device_message(self._coordinator.state.members[device_id].info) for device_id in one.members]
        return pb.Communicator(
            id=one.id, generation=one.generation, members=members, status=str(one.outcome), reason=one.reason
        )

    async def watch_events(self, request: pb.WatchEventsRequest) -> AsyncIterator[pb.Event]:
        events = self._coordinator.events
        if not request.follow:
            for event in events.after(request.after):
                yield event_message(event)
            return
        async for event in follow_events(events, request.after):
            yield event_message(event)

    # ---- jobs

    async def start_job(self, request: pb.StartJobRequest) -> pb.StartJobResponse:
        check_settings(request.settings)
        if len(request.resume) > MAX_NAME:
            raise InvalidArgument(f"resume: {len(request.resume)} characters name no buffer; at most {MAX_NAME}")
        job_id = await self.jobs.start(request.settings, tuple(request.device_ids), request.resume)
        return pb.StartJobResponse(job_id=job_id, device_ids=self._coordinator.state.jobs[job_id].devices)

    async def get_job(self, request: pb.GetJobRequest) -> pb.GetJobResponse:
        found = next((one for one in self.jobs.descriptions() if one.id == request.job_id), None)
        if found is None:
            known = sorted(self._coordinator.state.jobs) or "none"
            raise NotFound(f"job_id: {request.job_id} is unknown here; known: {known}")
        found.settings = self._coordinator.state.jobs[found.id].settings
        return pb.GetJobResponse(job=found)

    async def watch_job(self, request: pb.WatchJobRequest) -> AsyncIterator[pb.JobEvent]:
        if not 0 <= request.interval_s <= MAX_INTERVAL_S:
            raise InvalidArgument(f"interval_s: {request.interval_s:g} s is not in 0..{MAX_INTERVAL_S:g}")
        async for event in self.jobs.events(request.job_id, request.after, request.interval_s):
            yield pb.JobEvent(
                sequence=event.sequence,
                time=event.time,
                rank=int(event.fields["rank"]),
                device_id=int(event.fields["device"]),
                kind=event.kind,
                json=event.text,
                origin=event.fields["origin"],
            )

    async def stop_job(self, request: pb.StopJobRequest) -> pb.StopJobResponse:
        await self.jobs.stop(request.job_id)
        return pb.StopJobResponse()

    # ---- communicators

    async def keep_session(self, request: pb.KeepSessionRequest) -> AsyncIterator[pb.KeepSessionAnswer]:
        async for answer in self._sessions.keep(request.session):
            yield answer

    async def create_communicator(self, request: pb.CreateCommunicatorRequest) -> pb.CommunicatorResponse:
        if request.session:
            check_session(request.session)
        one = await self._operations.create(tuple(request.device_ids), request.devices)
        if request.session:
            self._sessions.add_communicator(request.session, one.id)
        return pb.CommunicatorResponse(communicator=self._communicator(one))

    async def get_communicator(self, request: pb.GetCommunicatorRequest) -> pb.CommunicatorResponse:
        one = self._coordinator.state.communicator(request.id)
        return pb.CommunicatorResponse(communicator=self._communicator(one))

    async def rebuild_communicator(self, request: pb.RebuildCommunicatorRequest) -> pb.CommunicatorResponse:
        one = await self._operations.rebuild(request.id)
        return pb.CommunicatorResponse(communicator=self._communicator(one))

    async def destroy_communicator(self, request: pb.DestroyCommunicatorRequest) -> pb.DestroyCommunicatorResponse:
        self._groups.discard(request.id)
        await self._operations.destroy(request.id)
        return pb.DestroyCommunicatorResponse()

    async def run(self, request: pb.RunRequest) -> pb.RunResponse:
        requests = [
            OperationRequest(one.operation, dict(one.operands), one.driver or "devices") for one in request.operations
        ]
        return pb.RunResponse(reports=await self._operations.run(request.communicator_id, requests, request.timeout_s))

    async def copy(self, request: pb.CopyRequest) -> pb.CopyResponse:
        await copy(self._coordinator, request)
        return pb.CopyResponse()


class CoordinatorServer:
    """A coordinator that serves both the lab's protocol and Hoop's."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.coordinator = Coordinator(config)
        groups = OperationGroups()
        operations = OperationQueue(self.coordinator, groups)
        service = CoordinatorService(self.coordinator, operations, groups)
        self._jobs, self._join_check = service.jobs, service.join_check
        events = self.coordinator.events
        self._reports = reports = ClientReports(lambda text: events.publish("lab_call_reported", text))
        lab = lab_service.LabCoordinator(self.coordinator, operations, groups, reports)
        receiving = Receiving()
        self._services = (
            handlers(lab_service.COORDINATOR_SERVICE, lab, receiving, reports.refused),
            handlers(SERVICE, service, receiving),
        )
        self.metrics: MetricsEndpoint | None = None
        """Endpoint at which Prometheus scrapes this coordinator; None if ``config.metrics`` is."""
        if config.metrics is not None:
            from hoop.servers.coordinator_metrics import CoordinatorCollector
            from hoop.servers.metrics_endpoint import MetricsEndpoint

            collector = CoordinatorCollector(self.coordinator, self._jobs, operations)
            token = None if config.metrics.is_loopback else config.credentials.token
            self.metrics = MetricsEndpoint(config.metrics, collector, token)

    async def start(self) -> Address:
        if self.metrics is not None:
            self.metrics.start()
            self.coordinator.events.publish("metrics_served", f"metrics at {self.metrics.url}")
        await self.coordinator.open()
        self._jobs.resume()
        address = await self.coordinator.start(self._services, self._reports.refused)
        self._join_check.start()
        return address

    async def stop(self) -> None:
        if self.metrics is not None:
            await asyncio.to_thread(self.metrics.stop)
        await self.coordinator.stop()
        await self._join_check.close()  # last: no task of the coordinator uses it any more
