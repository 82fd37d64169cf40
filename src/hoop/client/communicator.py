"""A communicator of the client: every collective, on device buffers or on arrays of the host.

``Staging`` copies the host's arrays to the devices for one operation, and the results back.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from hoop.client.device import Buffer, Device, element_type, flatten, location, restore
from hoop.client.handle import Attempts, Ended, Handle, call
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument
from hoop.memory.dtypes import DType, dtype
from hoop.topology import DeviceInfo
from hoop.wire.channels import STAGING_PREFIX
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc
from hoop.wire.repeated_calls import make_repeatable
from hoop.wire.service import device_info


class Blocks(NamedTuple):
    """How many blocks of equal size the vectors of a collective have: 1 and the number of ranks in an all_gather."""

    source: int = 1
    result: int = 1

    def block_size(self, elements: int) -> int:
        """Elements of a block of a source with this many; raises InvalidArgument if it does not divide."""
        if elements % self.source:
            raise InvalidArgument(f"values: {elements} elements do not make {self.source} equal blocks")
        return elements // self.source


ONE_BLOCK = Blocks()


class Staging:
    """Device buffers that hold one array or tensor a rank for one operation."""

    def __init__(self, communicator: Communicator, values: Sequence[Any], blocks: Blocks) -> None:
        self._values = list(values)
        if len(self._values) != communicator.size:
            raise InvalidArgument(f"values: {len(self._values)} were given for {communicator.size} ranks")
        self._kind = element_type(self._values[0])
        vectors = [flatten(value, self._kind) for value in self._values]
        count = vectors[0].size
        if any(vector.size != count for vector in vectors):
            raise InvalidArgument(f"values: their sizes differ: {[vector.size for vector in vectors]}")
        block = blocks.block_size(count)
        name = f"{STAGING_PREFIX}{communicator.session}.{secrets.token_hex(8)}"
        self._allocated: list[Buffer] = []
        try:
            for end, length in (("in", count), ("out", block * blocks.result)):
                self._allocated.append(communicator.buffer(f"{name}.{end}", length, self._kind))
            self.source, self.out = self._allocated
            self.source.fill(vectors)
            # A rank that receives no result gets its input back, or zeros if the result has another size.
            if self.out.count == count:
                self.out.fill(vectors)
            else:
                self.out.fill([np.zeros(self.out.count, self._kind.numpy)] * communicator.size)
        except BaseException:
            self.free()
            raise

    def collect(self, _: object) -> list[Any]:
        """Read one result a rank, in the type of the inputs, and free the buffers."""
        try:
            ranks = range(len(self._values))
            return [restore(self.out.read(rank), self._values[rank], self._kind) for rank in ranks]
        finally:
            self.free(failed=False)

    def free(self, failed: bool = True) -> None:
        """Free the buffers. After a call that ``failed``, skip lost devices."""
        allocated, self._allocated = self._allocated, []
        for buffer in allocated:
            for device, place in zip(buffer.devices, buffer.places, strict=True):
                if failed and device.is_lost():
                    continue
                with contextlib.suppress(HoopError):
                    device.free(str(place))


Vectors = Buffer | Sequence[Any]
"""A device buffer, or one array or tensor a rank."""


class Communicator:
    """An ordered set of devices.

    Every collective takes a ``Buffer`` and returns a report, or takes a list with one NumPy array or torch tensor a
    rank and returns such a list. Options of all collectives: ``algorithm``, ``chunk_bytes``, ``driver``, ``timeout``,
    and ``wait=False``, which returns a ``Handle`` at once. ``all_reduce`` on a buffer also takes ``compression``.
    Inside ``with comm.group():`` operations on buffers are queued and run in order as one launch.
    """

    def __init__(
        self,
        stub: pb_grpc.CoordinatorStub,
        message: pb.Communicator,
        device: Callable[[DeviceInfo], Device],
        timeout: float,
        session: str,
        ended: Ended,
    ) -> None:
        """``device`` makes the client object of a member. ``session``: id of the client's session. ``ended``: says
        whether the coordinator has ended."""
        self._ended = ended
        self.session = session
        self._stub = stub
        self._device = device
        self._timeout = timeout
        self._queue: list[pb.RunOperation] | None = None
        self._update(message)

    def _update(self, message: pb.Communicator) -> None:
        self.id = message.id
        self.generation = message.generation
        self.devices = tuple(self._device(device_info(member)) for member in message.members)

    @property
    def size(self) -> int:
        return len(self.devices)

    # ---- memory

    def buffer(self, name: str, count: int, kind: str | DType = "float32", reuse: bool = False) -> Buffer:
        """Allocate ``count`` elements of type ``kind`` under ``name`` on every device, or on none of them.

        With ``reuse`` a device that has a buffer of this name and size keeps it.
        """
        kind = kind if isinstance(kind, DType) else dtype(kind)
        allocated: list[Device] = []
        try:
            for device in self.devices:
                device.allocate(name, count * kind.itemsize, reuse)
                allocated.append(device)
        except Exception:
            for device in () if reuse else allocated:
                with suppress(HoopError):  # a device that is lost must not prevent the cleanup of the others
                    device.free(name)
            raise
        return Buffer(self.devices, (name,) * self.size, 0, count, kind)

    def at(self, addresses: Sequence[int], count: int, kind: str | DType = "float32") -> Buffer:
        """A buffer of ``count`` elements at absolute addresses, one address a rank."""
        if len(addresses) != self.size:
            raise InvalidArgument(f"addresses: {len(addresses)} were given for {self.size} ranks")
        kind = kind if isinstance(kind, DType) else dtype(kind)
        return Buffer(self.devices, tuple(addresses), 0, count, kind)

    # ---- collectives

    def all_reduce(self, x: Vectors, out: Buffer | None = None, op: str = "sum", **options: Any) -> Any:
        """Every rank gets the reduction of all vectors."""
        return self._run("all_reduce", x, out, op=op, **options)

    def broadcast(self, x: Vectors, out: Buffer | None = None, root: int = 0, **options: Any) -> Any:
        """Every rank gets the root's vector."""
        return self._run("broadcast", x, out, root=root, **options)

    def reduce(self, x: Vectors, out: Buffer | None = None, root: int = 0, op: str = "sum", **options: Any) -> Any:
        """The root gets the reduction of all vectors."""
        return self._run("reduce", x, out, root=root, op=op, **options)

    def all_gather(self, x: Vectors, out: Buffer | None = None, **options: Any) -> Any:
        """Every rank gets all vectors, in rank order."""
        return self._run("all_gather", x, out, Blocks(result=self.size), **options)

    def reduce_scatter(self, x: Vectors, out: Buffer | None = None, op: str = "sum", **options: Any) -> Any:
        """Rank r gets block r of the reduction of all vectors."""
        return self._run("reduce_scatter", x, out, Blocks(source=self.size), op=op, **options)

    def gather(self, x: Vectors, out: Buffer | None = None, root: int = 0, **options: Any) -> Any:
        """The root gets all vectors, in rank order."""
        return self._run("gather", x, out, Blocks(result=self.size), root=root, **options)

    def scatter(self, x: Vectors, out: Buffer | None = None, root: int = 0, **options: Any) -> Any:
        """Rank r gets block r of the root's vector."""
        return self._run("scatter", x, out, Blocks(source=self.size), root=root, **options)

    def all_to_all(self, x: Vectors, out: Buffer | None = None, **options: Any) -> Any:
        """Rank r gets block r of every vector, in rank order."""
        return self._run("all_to_all", x, out, Blocks(self.size, self.size), **options)

    def send(self, x: Vectors, source: int, destination: int, out: Buffer | None = None, **options: Any) -> Any:
        """Rank ``destination`` gets the vector of rank ``source``."""
        return self._run("send", x, out, root=source, peer=destination, **options)

    def barrier(self, wait: bool = True, timeout: float = 0.0) -> Any:
        """Return when every device has reached the barrier."""
        return self._submit(pb.RunOperation(operation=pb.Operation(collective="barrier")), wait, timeout)

    @contextmanager
    def group(self, timeout: float = 0.0) -> Iterator[None]:
        """Queue the operations on buffers inside the block; run them in order, as one launch, at its end."""
        if self._queue is not None:
            raise FailedPrecondition("a group is open already; groups do not nest")
        queue: list[pb.RunOperation] = []
        self._queue = queue
        try:
            yield
        finally:
            self._queue = None
        if queue:
            self._start(queue, timeout).wait()

    def _run(
        self,
        collective: str,
        x: Vectors,
        out: Buffer | None,
        blocks: Blocks = ONE_BLOCK,
        wait: bool = True,
        timeout: float = 0.0,
        driver: str = "",
        **fields: Any,
    ) -> Any:
        staging = None
        if not isinstance(x, Buffer):
            if out is not None or self._queue is not None:
                raise InvalidArgument("values: arrays are returned, so they need no out and cannot be in a group")
            if fields.get("compression"):
                raise InvalidArgument(
                    f"compression: {fields['compression']} keeps with a vector's memory what was not sent, and arrays "
                    "have none on the devices; put them into a buffer"
                )
            staging = Staging(self, x, blocks)
            x, out = staging.source, staging.out
        count = self._check(x, out, blocks)
        try:
            operation = pb.Operation(collective=collective, dtype=x.dtype.name, count=count, **fields)
        except (TypeError, ValueError) as error:  # an option that the message has no field for
            if staging is not None:
                staging.free()
            raise InvalidArgument(f"options: {error}; {fields}") from None
        operands = {}
        for rank in range(self.size):
            destination = location(out.places[rank], out.offset) if out is not None else None
            operands[rank] = pb.Operand(source=location(x.places[rank], x.offset), destination=destination)
        request = pb.RunOperation(operation=operation, operands=operands, driver=driver)
        if staging is None:
            return self._submit(request, wait, timeout)
        handle = self._start([request], timeout, staging.collect, staging.free)
        return handle.wait() if wait else handle

    def _check(self, x: Buffer, out: Buffer | None, blocks: Blocks) -> int:
        """Elements a block; raises InvalidArgument if a buffer is of another size, type or communicator."""
        for name, buffer in (("values", x), ("out", out)):
            if buffer is not None and len(buffer.places) != self.size:
                raise InvalidArgument(
                    f"{name}: the buffer is on {len(buffer.places)} devices, communicator {self.id} has "
                    f"{self.size}; after a rebuild make it again, with reuse=True to keep what it holds"
                )
        count = blocks.block_size(x.count)
        if out is not None and out.dtype != x.dtype:
            raise InvalidArgument(f"out: it holds {out.dtype.name}, the vectors are of {x.dtype.name}")
        if out is not None and out.count < count * blocks.result:
            raise InvalidArgument(f"out: it has {out.count} elements, the result {count * blocks.result}")
        return count

    def _submit(self, request: pb.RunOperation, wait: bool, timeout: float) -> Any:
        if self._queue is not None:
            self._queue.append(request)
            return None
        handle = self._start([request], timeout)
        return handle.wait() if wait else handle

    def _start(
        self,
        operations: list[pb.RunOperation],
        timeout: float,
        finish: Callable[[Any], Any] = lambda answer: answer.reports[-1],
        on_failure: Callable[[], None] | None = None,
    ) -> Handle[Any]:
        request = pb.RunRequest(communicator_id=self.id, operations=operations, timeout_s=timeout)
        # The coordinator enforces the deadline. The call's own, later one only prevents a hang.
        attempts = Attempts((timeout or self._timeout) + 10.0, make_repeatable(request), self._ended)

        def start(left_s: float) -> Any:
            return self._stub.Run.future(request, timeout=left_s)

        return Handle(start, attempts, f"communicator {self.id}", finish, on_failure)

    # ---- state, rebuild, destruction

    def status(self) -> pb.Communicator:
        """The communicator's current state: ``status`` and ``reason`` of its latest operation."""
        answer: pb.CommunicatorResponse = self._call("GetCommunicator", pb.GetCommunicatorRequest(id=self.id))
        return answer.communicator

    def rebuild(self) -> Communicator:
        """Rebuild without the lost devices, at the next generation; returns self."""
        answer = self._call("RebuildCommunicator", pb.RebuildCommunicatorRequest(id=self.id))
        self._update(answer.communicator)
        return self

    def destroy(self) -> None:
        """Wait for the queued operations, then delete the communicator. Named buffers stay."""
        self._call("DestroyCommunicator", pb.DestroyCommunicatorRequest(id=self.id))

    def _call(self, method: str, request: Any) -> Any:
        return call(getattr(self._stub, method), request, self._timeout, f"communicator {self.id}", self._ended)
