"""The coordinator's side of the lab's protocol (gpu_sim), over Hoop's communicators; ``lab_device`` has the device's.

What its clients disagree about, numbers and the unit of a count, is in ``lab_dialect``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.membership.state import CommunicatorState, OperationOutcome
from hoop.servers.access_order import MemoryRange
from hoop.servers.coordinator import Coordinator
from hoop.servers.grpc_server import ClientReports
from hoop.servers.lab_dialect import (
    AUTO,
    FLOAT64_BYTES,
    NUMBERS,
    CopyLengths,
    Dialect,
    check_known,
    detect,
    device_metadata,
    find_unit,
    unknown_fields,
)
from hoop.servers.operation_request import OperationRequest
from hoop.servers.operations import OperationGroups, OperationQueue, check_fits, check_range, read, write
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb

COORDINATOR_SERVICE = lab.DESCRIPTOR.services_by_name["GPUCoordinator"]
_AllReduce = lab.AllReduceRingRequest | lab.NaiveAllReduceRequest | lab.AllReduceRequest


@dataclass
class ClientView:
    """What the client of a communicator has shown of itself, and the ranks that it knows."""

    dialect: Dialect | None = None
    """Dialect of the client, once a call has shown it; only with ``--lab-dialect auto``."""
    unit: str = ""
    """Unit of the last count that showed it; only with ``--count-unit auto``."""
    devices: tuple[int, ...] = ()
    """Ids of the devices by the client's ranks, in which removed devices keep their numbers; empty before
    CommRemoveDevice."""


class LabCoordinator:
    """The lab's coordinator service. Each public method is the RPC of the same name."""

    def __init__(
        self, coordinator: Coordinator, operations: OperationQueue, groups: OperationGroups, reports: ClientReports
    ) -> None:
        self._coordinator = coordinator
        self._operations = operations
        self._groups = groups
        self._reports = reports
        self._copies = CopyLengths()
        self._views: dict[int, ClientView] = {}
        """View of the client of each communicator."""

    async def comm_init(self, request: lab.CommInitRequest) -> lab.CommInitResponse:
        if not request.numDevices:
            raise InvalidArgument("numDevices: 0 devices make no communicator; at least 1")
        if unknown := unknown_fields(request):
            raise InvalidArgument(
                f"CommInit: the message has unknown fields ({', '.join(map(str, unknown))}), which may name devices; "
                "Hoop's coordinator chooses the devices: send numDevices alone"
            )
        one = await self._operations.create((), request.numDevices, lab=True)
        self._views = {key: view for key, view in self._views.items() if key in self._coordinator.state.communicators}
        infos = [self._coordinator.state.member(device_id).info for device_id in one.members]
        dialect = self._coordinator.config.lab_dialect
        devices = [device_metadata(info, dialect, rank) for rank, info in enumerate(infos)]
        return lab.CommInitResponse(success=True, commId=one.id, devices=devices)

    def _communicator(self, communicator_id: int) -> CommunicatorState:
        """The communicator that a client named, which has used it by that. Raises if there is none."""
        self._operations.mark_used(communicator_id)
        return self._coordinator.state.communicator(communicator_id)

    async def get_comm_status(self, request: lab.GetCommStatusRequest) -> lab.GetCommStatusResponse:
        one = self._communicator(request.commId)
        name = one.outcome.name
        if one.outcome == OperationOutcome.IN_PROGRESS and self._operations.is_idle(one.id):
            name = "READY"
        config, dialect = self._coordinator.config, self._view(one).dialect
        if config.lab_dialect != AUTO:
            dialect = Dialect(config.lab_dialect)
        elif dialect is None and name == OperationOutcome.IN_PROGRESS.name:  # an open group: nothing runs yet
            name = "READY"
        elif dialect is None and name != "READY":  # FAILED has the number of the other dialect's SUCCESS
            raise FailedPrecondition(f"communicator {one.id}: {one.reason or name}; {self._unknown_dialect()}")
        status = NUMBERS[dialect or Dialect.STARTER].statuses[name]
        return lab.GetCommStatusResponse(status=status, reason=one.reason)  # type: ignore[arg-type]

    def _view(self, one: CommunicatorState) -> ClientView:
        return self._views.setdefault(one.id, ClientView())

    def _unknown_dialect(self) -> str:
        command = self._coordinator.config.command
        return (
            f"no call has shown which dialect this client speaks; start {command} with --lab-dialect "
            f"{Dialect.STARTER} or --lab-dialect {Dialect.NIL_FIRST}"
        )

    async def group_start(self, request: lab.GroupStartRequest) -> lab.GroupStartResponse:
        self._communicator(request.commId)
        self._operations.check(request.commId, ())
        self._groups.start(request.commId)
        return lab.GroupStartResponse(success=True)

    async def group_end(self, request: lab.GroupEndRequest) -> lab.GroupEndResponse:
        self._communicator(request.commId)
        requests = self._groups.end(request.commId)
        self._operations.check(request.commId, requests)
        task = await self._operations.enqueue_reserved(request.commId, requests)
        # Its outcome is the communicator's status. Retrieve the exception, as no code awaits the task.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return lab.GroupEndResponse(success=True)

    async def all_reduce_ring(self, request: lab.AllReduceRingRequest) -> lab.AllReduceRingResponse:
        await self._reduce(request, "devices")
        return lab.AllReduceRingResponse(success=True)

    async def naive_all_reduce(self, request: lab.NaiveAllReduceRequest) -> lab.NaiveAllReduceResponse:
        await self._reduce(request, "relay")
        return lab.NaiveAllReduceResponse(success=True)

    async def all_reduce(self, request: lab.AllReduceRequest) -> lab.AllReduceResponse:
        await self._reduce(request, "devices", algorithm="")
        return lab.AllReduceResponse(success=True)

    async def _reduce(self, request: _AllReduce, driver: str, algorithm: str = "ring") -> None:
        one = self._communicator(request.commId)
        check_known(request, request.count, "count")
        addresses = _addresses(request, one, self._view(one).devices or one.members)
        message = self._operation(request, one, addresses, algorithm)
        operation = OperationRequest(message, _operands(addresses), driver)
        self._operations.check(request.commId, (operation,))
        if self._groups.is_open(request.commId):
            self._groups.add(request.commId, operation)
        else:
            await self._operations.run(request.commId, (operation,))

    def _operation(
        self, request: _AllReduce, one: CommunicatorState, addresses: Mapping[int, int], algorithm: str
    ) -> pb.Operation:
        copied = self._copies.of((one.members[rank], address) for rank, address in addresses.items())
        shown = find_unit(request.count, copied) if request.count else ""
        dialect = self._dialect(request, one, shown)
        numbers = NUMBERS[dialect]
        if request.op not in numbers.ops:
            raise InvalidArgument(
                f"op: {request.op} is unknown in the dialect {dialect}; known: {numbers.describe_ops()}"
            )
        unit = self._unit(request.count, one, dialect, shown, copied)
        if unit == "bytes" and request.count % FLOAT64_BYTES:
            raise InvalidArgument(
                f"count: {request.count} bytes are not whole float64 elements; this coordinator counts bytes "
                f"({self._coordinator.config.command} --count-unit elements counts elements, --count-unit auto finds "
                "out)"
            )
        count = request.count // FLOAT64_BYTES if unit == "bytes" else request.count
        op = numbers.ops[request.op]
        return pb.Operation(collective="all_reduce", algorithm=algorithm, dtype="float64", op=op, count=count)

    def _dialect(self, request: _AllReduce, one: CommunicatorState, shown: str) -> Dialect:
        """The dialect of the client; ``shown``: the unit that the copies to the vectors show."""
        configured = self._coordinator.config.lab_dialect
        if configured != AUTO:
            return Dialect(configured)
        view = self._view(one)
        if view.dialect is None:
            only_starter = not isinstance(request, lab.AllReduceRingRequest)  # nil-first does not have these calls
            found = Dialect.STARTER if only_starter else detect(request.op, shown, self._groups.is_open(one.id))
            if found is None:
                raise InvalidArgument(f"op: {request.op} differs by dialect, and {self._unknown_dialect()}")
            view.dialect = found
            self._reports.add(f"the client of communicator {one.id} speaks the lab's dialect {found} (--lab-dialect)")
        return view.dialect

    def _unit(self, count: int, one: CommunicatorState, dialect: Dialect, shown: str, copied: list[int]) -> str:
        """The unit of the client's ``count``: bytes or elements."""
        config = self._coordinator.config
        unit = config.count_unit
        if unit == "dialect":
            unit = NUMBERS[dialect].count_unit
            if config.lab_dialect == AUTO and dialect == Dialect.STARTER:
                unit = shown or unit  # some clients of starter count elements
        if unit == "auto" and count:
            view = self._view(one)
            unit = shown or view.unit
            if not unit:
                lengths = ", ".join(map(str, sorted(set(copied)))) or "no copy is known"
                raise InvalidArgument(
                    f"count: {count} may be bytes or float64 elements, and the copies to these addresses do not show "
                    f"which (their lengths in bytes: {lengths}); copy whole vectors to memAddrs first, or start "
                    f"{config.command} with --count-unit bytes or --count-unit elements"
                )
            view.unit = unit
        elif shown not in ("", unit):
            self._reports.add(
                f"AllReduce on communicator {one.id}: count {count} is taken as {unit}, but {shown} would fit what was "
                f"copied to these addresses; if the result is wrong, start {config.command} with --count-unit auto"
            )
        return unit

    async def comm_remove_device(self, request: lab.CommRemoveDeviceRequest) -> lab.CommRemoveDeviceResponse:
        """Goes on with the survivors, behind accepted work. They keep the ranks that the client knows."""
        one = self._communicator(request.commId)
        view, rank = self._view(one), request.rank.value
        devices = view.devices or one.members
        if not request.HasField("rank") or rank >= len(devices):
            given = rank if request.HasField("rank") else "missing; it"
            raise InvalidArgument(f"rank: {given} is not in 0..{len(devices) - 1}")
        if devices[rank] not in one.members:
            raise FailedPrecondition(f"rank: {rank} (device {devices[rank]}) is no longer in communicator {one.id}")
        if len(one.members) == 1:
            raise FailedPrecondition(
                f"rank: {rank} is the only one left in communicator {one.id}; CommDestroy ends the communicator"
            )
        view.devices = devices
        await self._operations.remove_device(one.id, devices[rank])
        return lab.CommRemoveDeviceResponse(success=True)

    async def memcpy(self, request: lab.MemcpyRequest) -> lab.MemcpyResponse:
        """Waits for earlier operations on the same bytes, up to the coordinator's timeout."""
        match request.WhichOneof("either"):
            case "hostToDevice":
                write_request = request.hostToDevice
                check_known(write_request, len(write_request.hostSrcData), "hostSrcData")
                await self._to_device(
                    write_request.dstDeviceId.value, write_request.dstMemAddr.value, write_request.hostSrcData
                )
                return lab.MemcpyResponse(hostToDevice=lab.MemcpyHostToDeviceResponse(success=True))
            case "deviceToHost":
                read_request = request.deviceToHost
                check_known(read_request, read_request.numBytes, "numBytes")
                data = await self._to_host(
                    read_request.srcDeviceId.value, read_request.srcMemAddr.value, read_request.numBytes
                )
                return lab.MemcpyResponse(deviceToHost=lab.MemcpyDeviceToHostResponse(dstData=data))
            case _:
                raise InvalidArgument("either: neither hostToDevice nor deviceToHost is set")

    async def _to_device(self, device_id: int, address: int, data: bytes) -> None:
        location, timeout = pb.Location(address=address), self._coordinator.config.timeout_s
        check_range(self._coordinator, device_id, location, len(data))
        memory_range = MemoryRange(device_id, address, address + len(data), writes=True)
        async with self._coordinator.access_order.in_turn(f"Memcpy to {memory_range}", [memory_range], timeout):
            await write(self._coordinator, device_id, location, data, timeout)
        self._copies.record(device_id, address, len(data))

    async def _to_host(self, device_id: int, address: int, size: int) -> bytes:
        location, timeout = pb.Location(address=address), self._coordinator.config.timeout_s
        self._coordinator.state.member(device_id)
        check_fits(size, self._coordinator.config.max_message)
        check_range(self._coordinator, device_id, location, size)
        memory_range = MemoryRange(device_id, address, address + size, writes=False)
        async with self._coordinator.access_order.in_turn(f"Memcpy from {memory_range}", [memory_range], timeout):
            return await read(self._coordinator, device_id, location, size, timeout)

    async def comm_finalize(self, request: lab.CommFinalizeRequest) -> lab.CommFinalizeResponse:
        self._groups.discard(request.commId)
        await self._operations.finalize(request.commId)
        return lab.CommFinalizeResponse(success=True)

    async def comm_destroy(self, request: lab.CommDestroyRequest) -> lab.CommDestroyResponse:
        self._groups.discard(request.commId)
        await self._operations.destroy(request.commId)
        return lab.CommDestroyResponse(success=True)


def _addresses(request: _AllReduce, one: CommunicatorState, devices: tuple[int, ...]) -> dict[int, int]:
    """The address of every member's vector; ``devices``: by the client's ranks, also those that were removed."""
    if unknown := sorted(rank for rank in request.memAddrs if rank >= len(devices)):
        raise InvalidArgument(f"memAddrs: ranks {unknown} are not in 0..{len(devices) - 1}")
    ranks = {rank: one.members.index(device) for rank, device in enumerate(devices) if device in one.members}
    if missing := [rank for rank in ranks if rank not in request.memAddrs]:
        what = "it is missing" if not request.memAddrs else f"rank {missing[0]} has no address"
        raise InvalidArgument(
            f"memAddrs: {what}; it must map each of the {len(ranks)} ranks of communicator {one.id} to its vector's "
            "address"
        )
    return {now: request.memAddrs[rank].value for rank, now in ranks.items()}


def _operands(addresses: Mapping[int, int]) -> dict[int, pb.Operand]:
    return {rank: pb.Operand(source=pb.Location(address=address)) for rank, address in addresses.items()}
