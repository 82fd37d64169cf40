"""hoop.v1.Device: the gRPC service for named buffers, streamed copies, launches and tasks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from hoop.errors import FailedPrecondition, HoopError, InvalidArgument, PeerLost
from hoop.events import wall_clock
from hoop.memory import ArenaBuffer, DeviceMemory
from hoop.memory.cuda_arena import CudaArena, GpuMemory
from hoop.servers.device_processes import ServerProbe
from hoop.servers.host_examination import run_doctor
from hoop.servers.job_record import follow_events
from hoop.servers.lab_streams import StreamTable
from hoop.servers.operation_runner import MAX_TIMEOUT_S, OperationRunner, locate
from hoop.servers.tasks import Tasks, is_last
from hoop.texts import printable
from hoop.topology import Address, DeviceInfo
from hoop.transport.port_check import PortCheck
from hoop.wire.channels import STREAM_CHUNK_BYTES
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.service import device_message

MAX_LINK_CHECKS = 4096
MAX_SERVER_CHECKS = 64
MAX_TRACED_STEPS = 32
MAX_TRACE_S = 30.0
MAX_LISTED_BUFFERS = 64
"""Maximum number of buffers on a GPU that a heartbeat lists."""
GPU_ASKED_EVERY_S = 2.0
SERVICE = pb.DESCRIPTOR.services_by_name["Device"]


class DeviceService:
    """Hoop's device service. Each method is the RPC of the same name."""

    def __init__(
        self,
        memory: DeviceMemory,
        runner: OperationRunner,
        streams: StreamTable,
        tasks: Tasks,
        ports: PortCheck,
        servers: ServerProbe,
        jobs: Path | None = None,
    ) -> None:
        """``jobs``: folder with the code of jobs; None: the current folder."""
        self._memory = memory
        self._jobs = jobs or Path.cwd()
        self._examining, self._tracing = asyncio.Lock(), asyncio.Lock()
        self._ports, self._servers = ports, servers
        self._runner = runner
        self._tasks = tasks
        self._streams = streams
        self.info: DeviceInfo | None = None
        self._ask_gpu_at = 0.0
        self._gpu_free = self._gpu_total = 0
        self.last_memory = pb.DeviceMemory()
        """Last result of ``memory``, which every heartbeat calls."""

    def memory(self) -> pb.DeviceMemory:
        memory = self._memory
        arena, arenas = (memory.host, [memory.arena]) if isinstance(memory, GpuMemory) else (memory, [])
        found = pb.DeviceMemory(capacity=arena.capacity, used=arena.used, buffers=len(arena.buffers()))
        if arenas := [*arenas, *self._tasks.gpu_arenas]:
            found.gpu.CopyFrom(self._gpu_memory(arenas))
        self.last_memory = found
        return found

    def _gpu_memory(self, arenas: list[CudaArena]) -> pb.GpuMemory:
        """The device's memory on a GPU. The GPU itself is asked from time to time: every heartbeat calls this."""
        gpu = arenas[0].gpu
        if time.monotonic() >= self._ask_gpu_at:
            self._ask_gpu_at = time.monotonic() + GPU_ASKED_EVERY_S
            with contextlib.suppress(HoopError):  # after a CUDA error every call fails with it
                self._gpu_free, self._gpu_total = gpu.memory()
        buffers = [_buffer_message(one) for arena in arenas for one in arena.buffers()]
        return pb.GpuMemory(
            name=printable(gpu.name, 128),
            total=self._gpu_total,
            free=self._gpu_free,
            capacity=sum(one.capacity for one in arenas),
            used=sum(one.used for one in arenas),
            buffers=sorted(buffers, key=lambda one: -one.bytes)[:MAX_LISTED_BUFFERS],
        )

    async def describe(self, _: pb.DescribeRequest) -> pb.DescribeResponse:
        assert self.info is not None, "set before the service starts"
        return pb.DescribeResponse(
            device=device_message(self.info),
            memory=self.memory(),
            open_streams=self._streams.open,
            tasks=self._tasks.describe(),
            time=wall_clock(),
        )

    async def allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        buffer = self._memory.allocate(request.name, request.bytes, request.alignment or 64, reuse=request.reuse)
        return pb.AllocateResponse(buffer=_buffer_message(buffer))

    async def free(self, request: pb.FreeRequest) -> pb.FreeResponse:
        self._memory.free(request.name)
        return pb.FreeResponse()

    async def list_buffers(self, _: pb.ListBuffersRequest) -> pb.ListBuffersResponse:
        return pb.ListBuffersResponse(buffers=[_buffer_message(buffer) for buffer in self._memory.buffers()])

    async def write(self, requests: AsyncIterator[pb.WriteRequest]) -> pb.WriteResponse:
        location: pb.Location | None = None
        written, ordered = 0, False
        async for request in requests:
            if location is None:
                location, ordered = request.location, request.ordered
            elif request.HasField("location"):
                raise InvalidArgument("location: only the first message of a Write names it")
            at = pb.Location()
            at.CopyFrom(location)
            at.offset += written
            data = request.data  # each look at the field copies it
            address = locate(self._memory, at, len(data))
            access = self._runner.order_access("Write", address, len(data), True, ordered)
            await access.wait_turn(MAX_TIMEOUT_S)
            self._memory.write(address, data)
            written += len(data)
        if location is None:
            raise InvalidArgument("location: the stream ended before its first message")
        return pb.WriteResponse(bytes=written)

    async def read(self, request: pb.ReadRequest) -> AsyncIterator[pb.ReadResponse]:
        address = locate(self._memory, request.location, request.bytes)
        access = self._runner.order_access("Read", address, request.bytes, False, request.ordered)
        await access.wait_turn(MAX_TIMEOUT_S)
        for at in range(0, max(request.bytes, 1), STREAM_CHUNK_BYTES):
            size = min(STREAM_CHUNK_BYTES, request.bytes - at)
            yield pb.ReadResponse(data=self._memory.read(address + at, size))
        if request.location.buffer:
            self._tasks.note_read(request.location.buffer)

    async def assign_rank(self, request: pb.AssignRankRequest) -> pb.AssignRankResponse:
        self._runner.assign(request.assignment)
        return pb.AssignRankResponse()

    async def reserve(self, request: pb.ReserveRequest) -> pb.ReserveResponse:
        self._runner.reserve(request)
        return pb.ReserveResponse()

    async def release(self, request: pb.ReleaseRequest) -> pb.ReleaseResponse:
        self._runner.release_reservation(request.reservation_id)
        return pb.ReleaseResponse()

    async def launch(self, request: pb.LaunchRequest) -> pb.LaunchResponse:
        reports = await self._runner.launch(request)
        return pb.LaunchResponse(
            reports=[
                pb.OperationReport(
                    seconds=report.seconds,
                    messages_sent=report.messages_sent,
                    bytes_sent=report.bytes_sent,
                    algorithm=report.algorithm,
                )
                for report in reports
            ]
        )

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        error = PeerLost(request.reason)
        self._tasks.abort(request.communicator_id, request.generation, error)
        self._runner.abort(request.communicator_id, request.generation, error)
        if request.lost_device:
            self._streams.fail_peer(request.lost_device, request.reason)
        return pb.AbortResponse()

    async def start_task(self, request: pb.StartTaskRequest) -> pb.StartTaskResponse:
        self._tasks.start(request)
        return pb.StartTaskResponse()

    async def reassign_task(self, request: pb.ReassignTaskRequest) -> pb.ReassignTaskResponse:
        self._tasks.reassign(request)
        return pb.ReassignTaskResponse()

    async def commit_reassignment(self, request: pb.CommitReassignmentRequest) -> pb.CommitReassignmentResponse:
        self._tasks.move(request.job_id, request.generation)
        return pb.CommitReassignmentResponse()

    async def watch_task(self, request: pb.WatchTaskRequest) -> AsyncIterator[pb.JobEvent]:
        task = self._tasks.task(request.job_id)
        async for event in follow_events(task.log, request.after, is_last):
            yield pb.JobEvent(
                sequence=event.sequence,
                time=event.time,
                kind=event.kind,
                json=event.text,
                origin=f"{task.token}:{event.sequence}",
            )
            task.mark_sent(event.sequence)  # gRPC asks for the next event after it has written this one

    async def stop_task(self, request: pb.StopTaskRequest) -> pb.StopTaskResponse:
        self._tasks.stop(request.job_id)
        return pb.StopTaskResponse()

    async def trace_task(self, request: pb.TraceTaskRequest) -> pb.TraceTaskResponse:
        if not 1 <= request.steps <= MAX_TRACED_STEPS:
            raise InvalidArgument(f"steps: {request.steps} is not in 1..{MAX_TRACED_STEPS}")
        if not 0 < request.timeout_s <= MAX_TRACE_S:
            raise InvalidArgument(f"timeout_s: {request.timeout_s:g} is not above 0 and at most {MAX_TRACE_S:g}")
        if self._tracing.locked():
            raise FailedPrecondition("a trace of this device is under way; ask again when it has ended")
        async with self._tracing:
            found = await asyncio.to_thread(self._tasks.trace, request.job_id, request.steps, request.timeout_s)
        return pb.TraceTaskResponse(
            rank=found.rank,
            first_step=found.first_step,
            steps=found.steps,
            spans=[
                pb.TraceSpan(instruction=one.instruction, category=one.category, start=one.start, seconds=one.seconds)
                for one in found.spans
            ],
        )

    async def check_links(self, request: pb.CheckLinksRequest) -> pb.CheckLinksResponse:
        ports = _addresses(request.data_addresses, "data_addresses", MAX_LINK_CHECKS)
        servers = _addresses(request.addresses, "addresses", MAX_SERVER_CHECKS)
        tried = (asyncio.wrap_future(self._ports.data_port(address)) for address in ports)
        asked = (self._servers.answers(address) for address in servers)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return pb.CheckLinksResponse(
            failures=[printable(failure, 500) for failure in await asyncio.gather(*tried)],
            answers=[answer is True for answer in answers],
        )

    async def examine(self, request: pb.ExamineRequest) -> pb.ExamineResponse:
        async with self._examining:  # one at a time: each loads PyTorch
            return pb.ExamineResponse(json=await run_doctor(request.job, request.devices, self._jobs))


def _addresses(texts: Sequence[str], field: str, limit: int) -> list[Address]:
    if len(texts) > limit:
        raise InvalidArgument(f"{field}: {len(texts)} are more than {limit}; check fewer at a time")
    return [Address.parse(text, field) for text in texts]


def _buffer_message(buffer: ArenaBuffer) -> pb.Buffer:
    return pb.Buffer(name=buffer.name, address=buffer.address, bytes=buffer.size)
