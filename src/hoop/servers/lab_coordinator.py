"""gpu_sim.GPUCoordinator: the lab's coordinator, over Hoop's communicators."""

from __future__ import annotations

from hoop.errors import InvalidArgument
from hoop.membership.state import Outcome
from hoop.servers.conductor import Conductor
from hoop.servers.coordinator import Coordinator
from hoop.servers.copying import check_fits, check_range, read, write
from hoop.servers.groups import Groups
from hoop.servers.memory_order import Span
from hoop.servers.work import Work
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb

SERVICE = lab.DESCRIPTOR.services_by_name["GPUCoordinator"]
_FLOAT64_BYTES = 8
_STATUS = {
    Outcome.IN_PROGRESS: lab.IN_PROGRESS,
    Outcome.SUCCESS: lab.SUCCESS,
    Outcome.FAILED: lab.FAILED,
}
_OPS = {lab.SUM: "sum", lab.PROD: "prod", lab.MIN: "min", lab.MAX: "max", lab.AVG: "avg"}

_AllReduce = lab.AllReduceRingRequest | lab.NaiveAllReduceRequest


class LabCoordinator:
    """Answers the lab's calls to a coordinator."""

    def __init__(self, coordinator: Coordinator, conductor: Conductor, groups: Groups) -> None:
        self._coordinator = coordinator
        self._conductor = conductor
        self._groups = groups

    async def comm_init(self, request: lab.CommInitRequest) -> lab.CommInitResponse:
        if not request.numDevices:
            raise InvalidArgument("numDevices: 0 devices make no communicator; at least 1")
        one = await self._conductor.create((), request.numDevices)
        devices = []
        for device_id in one.members:
            info = self._coordinator.state.member(device_id).info
            devices.append(
                lab.DeviceMetadata(
                    deviceId=lab.DeviceId(value=info.device_id),
                    minMemAddr=lab.MemAddr(value=info.min_address),
                    maxMemAddr=lab.MemAddr(value=info.max_address),
                )
            )
        return lab.CommInitResponse(success=True, commId=one.id, devices=devices)

    async def get_comm_status(self, request: lab.GetCommStatusRequest) -> lab.GetCommStatusResponse:
        one = self._coordinator.state.communicator(request.commId)
        return lab.GetCommStatusResponse(status=_STATUS[one.outcome], reason=one.reason)

    async def group_start(self, request: lab.GroupStartRequest) -> lab.GroupStartResponse:
        self._conductor.check(request.commId, ())
        self._groups.start(request.commId)
        return lab.GroupStartResponse(success=True)

    async def group_end(self, request: lab.GroupEndRequest) -> lab.GroupEndResponse:
        self._coordinator.state.communicator(request.commId)
        works = self._groups.end(request.commId)
        self._conductor.check(request.commId, works)
        task = await self._conductor.begin_announced(request.commId, works)
        # Its outcome is the communicator's status; nobody awaits it.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return lab.GroupEndResponse(success=True)

    async def all_reduce_ring(self, request: lab.AllReduceRingRequest) -> lab.AllReduceRingResponse:
        await self._reduce(request, "devices")
        return lab.AllReduceRingResponse(success=True)

    async def naive_all_reduce(self, request: lab.NaiveAllReduceRequest) -> lab.NaiveAllReduceResponse:
        await self._reduce(request, "relay")
        return lab.NaiveAllReduceResponse(success=True)

    async def _reduce(self, request: _AllReduce, driver: str) -> None:
        work = Work(self._operation(request), _operands(request), driver)
        self._conductor.check(request.commId, (work,))
        if self._groups.is_open(request.commId):
            self._groups.queue(request.commId, work)
        else:
            await self._conductor.run(request.commId, (work,))

    def _operation(self, request: _AllReduce) -> pb.Operation:
        self._coordinator.state.communicator(request.commId)
        if request.op not in _OPS:
            raise InvalidArgument(f"op: {request.op} is unknown; known: SUM=0 PROD=1 MIN=2 MAX=3 AVG=4")
        count = request.count
        if self._coordinator.config.count_unit == "bytes":
            if count % _FLOAT64_BYTES:
                raise InvalidArgument(
                    f"count: {count} bytes are not whole float64 elements; this coordinator counts bytes "
                    "(hoop coordinator --count-unit elements counts elements)"
                )
            count //= _FLOAT64_BYTES
        return pb.Operation(
            collective="all_reduce", algorithm="ring", dtype="float64", op=_OPS[request.op], count=count
        )

    async def memcpy(self, request: lab.MemcpyRequest) -> lab.MemcpyResponse:
        """Waits for the work on the same bytes that was accepted before it, up to the time-out."""
        match request.WhichOneof("either"):
            case "hostToDevice":
                to = request.hostToDevice
                await self._to_device(to.dstDeviceId.value, to.dstMemAddr.value, to.hostSrcData)
                return lab.MemcpyResponse(hostToDevice=lab.MemcpyHostToDeviceResponse(success=True))
            case "deviceToHost":
                by = request.deviceToHost
                data = await self._to_host(by.srcDeviceId.value, by.srcMemAddr.value, by.numBytes)
                return lab.MemcpyResponse(deviceToHost=lab.MemcpyDeviceToHostResponse(dstData=data))
            case _:
                raise InvalidArgument("either: neither hostToDevice nor deviceToHost is set")

    async def _to_device(self, device_id: int, address: int, data: bytes) -> None:
        place, timeout = pb.Location(address=address), self._coordinator.config.timeout_s
        check_range(self._coordinator, device_id, place, len(data))
        span = Span(device_id, address, address + len(data), writes=True)
        async with self._coordinator.order.turn(f"Memcpy to {span}", [span], timeout):
            await write(self._coordinator, device_id, place, data, timeout)

    async def _to_host(self, device_id: int, address: int, size: int) -> bytes:
        place, timeout = pb.Location(address=address), self._coordinator.config.timeout_s
        self._coordinator.state.member(device_id)
        check_fits(size, self._coordinator.config.max_message)
        check_range(self._coordinator, device_id, place, size)
        span = Span(device_id, address, address + size, writes=False)
        async with self._coordinator.order.turn(f"Memcpy from {span}", [span], timeout):
            return await read(self._coordinator, device_id, place, size, timeout)

    async def comm_finalize(self, request: lab.CommFinalizeRequest) -> lab.CommFinalizeResponse:
        self._groups.forget(request.commId)
        await self._conductor.finalize(request.commId)
        return lab.CommFinalizeResponse(success=True)

    async def comm_destroy(self, request: lab.CommDestroyRequest) -> lab.CommDestroyResponse:
        self._groups.forget(request.commId)
        await self._conductor.destroy(request.commId)
        return lab.CommDestroyResponse(success=True)


def _operands(request: _AllReduce) -> dict[int, pb.Operand]:
    return {
        rank: pb.Operand(source=pb.Location(address=address.value))
        for rank, address in request.memAddrs.items()
    }
