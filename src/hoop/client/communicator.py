"""Plain arrays in collectives: copied to the devices, worked on there, copied back.

A communicator, as a client drives it: every collective, on device buffers or on plain arrays.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import numpy as np

from hoop.client.buffer import Buffer, element_type, flatten, restore
from hoop.client.device import Device, location
from hoop.client.handle import Handle, call
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument
from hoop.memory.dtypes import DType, dtype
from hoop.topology import DeviceInfo
from hoop.wire.channels import STAGING
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.service import Stub, device_info


class Allocates(Protocol):
    """What staging needs of a communicator."""

    @property
    def size(self) -> int: ...

    @property
    def session(self) -> str: ...

    def buffer(self, name: str, count: int, kind: DType) -> Buffer: ...


class Staging:
    """One array or tensor a rank, on the devices for the length of one operation."""

    def __init__(self, owner: Allocates, values: Sequence[Any], blocks_in: int, blocks_out: int) -> None:
        """``blocks_out`` of the result for every ``blocks_in`` of a value: n for a gather, 1 for its input."""
        self._values = list(values)
        if len(self._values) != owner.size:
            raise InvalidArgument(f"values: {len(self._values)} were given for {owner.size} ranks")
        self._kind = element_type(self._values[0])
        vectors = [flatten(value, self._kind) for value in self._values]
        count = vectors[0].size
        if any(vector.size != count for vector in vectors):
            raise InvalidArgument(f"values: their sizes differ: {[vector.size for vector in vectors]}")
        if count % blocks_in:
            raise InvalidArgument(f"values: {count} elements do not make {blocks_in} equal blocks")
        name = f"{STAGING}{owner.session}.{secrets.token_hex(8)}"
        self._made: list[Buffer] = []
        try:
            for end, length in (("in", count), ("out", count // blocks_in * blocks_out)):
                self._made.append(owner.buffer(f"{name}.{end}", length, self._kind))
            self.source, self.out = self._made
            self.source.fill(vectors)
            if self.out.count == count:
                self.out.fill(vectors)  # what a rank does not receive it keeps
            else:
                self.out.fill([np.zeros(self.out.count, self._kind.numpy)] * owner.size)  # or is zero
        except BaseException:
            self.free()
            raise

    def collect(self, _: object) -> list[Any]:
        """The results, one a rank, as what was given; the memory is free again."""
        try:
            ranks = range(len(self._values))
            return [restore(self.out.read(rank), self._values[rank], self._kind) for rank in ranks]
        finally:
            self.free()

    def free(self) -> None:
        """Gives the memory back, where there still is a device to give it back to."""
        made, self._made = self._made, []
        for buffer in made:
            for device, place in zip(buffer.devices, buffer.places, strict=True):
                with contextlib.suppress(HoopError):
                    device.free(str(place))


Vectors = Buffer | Sequence[Any]
"""A buffer on the devices, or one array or tensor a rank."""


class Communicator:
    """An ordered set of devices.

    Every collective takes a ``ArenaBuffer``, works on the devices' memory and returns a report, or takes a list
    with one NumPy array or torch tensor a rank and returns such a list. Options of all of them:
    ``algorithm``, ``chunk_bytes``, ``driver``, ``timeout``, and ``wait=False`` for a ``WorkHandle`` at once; of
    ``all_reduce`` on a buffer also ``compression``.
    Inside ``with comm.group():`` operations on buffers are queued and run in order as one launch.
    """

    def __init__(
        self,
        stub: Stub,
        message: pb.Communicator,
        device: Callable[[DeviceInfo], Device],
        timeout: float,
        session: str,
    ) -> None:
        """``session``: whose it is, and whose staged memory."""
        self.session = session
        self._stub = stub
        self._device = device
        self._timeout = timeout
        self._queue: list[pb.RunOperation] | None = None
        self._take(message)

    def _take(self, message: pb.Communicator) -> None:
        self.id = message.id
        self.generation = message.generation
        self.devices = tuple(self._device(device_info(member)) for member in message.members)

    @property
    def size(self) -> int:
        return len(self.devices)

    # ---- memory

    def buffer(self, name: str, count: int, kind: str | DType = "float32", reuse: bool = False) -> Buffer:
        """``count`` elements under this name on every device; all of them, or none."""
        kind = kind if isinstance(kind, DType) else dtype(kind)
        made: list[Device] = []
        try:
            for device in self.devices:
                device.allocate(name, count * kind.itemsize, reuse)
                made.append(device)
        except Exception:
            for device in () if reuse else made:
                with suppress(HoopError):  # one that is lost meanwhile must not keep the others from it
                    device.free(name)
            raise
        return Buffer(self.devices, (name,) * self.size, 0, count, kind)

    def at(self, addresses: Sequence[int], count: int, kind: str | DType = "float32") -> Buffer:
        """``count`` elements at these absolute addresses, one a rank."""
        if len(addresses) != self.size:
            raise InvalidArgument(f"addresses: {len(addresses)} were given for {self.size} ranks")
        kind = kind if isinstance(kind, DType) else dtype(kind)
        return Buffer(self.devices, tuple(addresses), 0, count, kind)

    # ---- collectives

    def all_reduce(self, x: Vectors, out: Buffer | None = None, op: str = "sum", **options: Any) -> Any:
        """Every rank gets the reduction of all."""
        return self._run("all_reduce", x, out, op=op, **options)

    def broadcast(self, x: Vectors, out: Buffer | None = None, root: int = 0, **options: Any) -> Any:
        """Every rank gets the root's vector."""
        return self._run("broadcast", x, out, root=root, **options)

    def reduce(
        self, x: Vectors, out: Buffer | None = None, root: int = 0, op: str = "sum", **options: Any
    ) -> Any:
        """The root gets the reduction of all."""
        return self._run("reduce", x, out, root=root, op=op, **options)

    def all_gather(self, x: Vectors, out: Buffer | None = None, **options: Any) -> Any:
        """Every rank gets everybody's vector, in rank order."""
        return self._run("all_gather", x, out, blocks_out=self.size, **options)

    def reduce_scatter(self, x: Vectors, out: Buffer | None = None, op: str = "sum", **options: Any) -> Any:
        """Rank r gets block r of the reduction of all."""
        return self._run("reduce_scatter", x, out, blocks_in=self.size, op=op, **options)

    def gather(self, x: Vectors, out: Buffer | None = None, root: int = 0, **options: Any) -> Any:
        """The root gets everybody's vector, in rank order."""
        return self._run("gather", x, out, blocks_out=self.size, root=root, **options)

    def scatter(self, x: Vectors, out: Buffer | None = None, root: int = 0, **options: Any) -> Any:
        """Rank r gets block r of the root's vector."""
        return self._run("scatter", x, out, blocks_in=self.size, root=root, **options)

    def all_to_all(self, x: Vectors, out: Buffer | None = None, **options: Any) -> Any:
        """Rank r gets block r of everybody's vector, in rank order."""
        return self._run("all_to_all", x, out, blocks_in=self.size, blocks_out=self.size, **options)

    def send(
        self, x: Vectors, source: int, destination: int, out: Buffer | None = None, **options: Any
    ) -> Any:
        """One rank's vector goes to another."""
        return self._run("send", x, out, root=source, peer=destination, **options)

    def barrier(self, wait: bool = True, timeout: float = 0.0) -> Any:
        """Returns when every device has come to it."""
        return self._submit(pb.RunOperation(operation=pb.Operation(collective="barrier")), wait, timeout)

    @contextmanager
    def group(self, timeout: float = 0.0) -> Iterator[None]:
        """Operations on buffers inside the block run in order, as one launch, when it ends."""
        if self._queue is not None:
            raise FailedPrecondition("a group is open already; groups do not nest")
        works: list[pb.RunOperation] = []
        self._queue = works
        try:
            yield
        finally:
            self._queue = None
        if works:
            self._start(works, timeout).wait()

    def _run(
        self,
        collective: str,
        x: Vectors,
        out: Buffer | None,
        blocks_in: int = 1,
        blocks_out: int = 1,
        wait: bool = True,
        timeout: float = 0.0,
        driver: str = "",
        **fields: Any,
    ) -> Any:
        staging = None
        if not isinstance(x, Buffer):
            if out is not None or self._queue is not None:
                raise InvalidArgument(
                    "values: arrays are returned, so they need no out and cannot be in a group"
                )
            if fields.get("compression"):
                raise InvalidArgument(
                    f"compression: {fields['compression']} keeps with a vector's memory what was not sent, and arrays "
                    "have none on the devices; put them into a buffer"
                )
            staging = Staging(self, x, blocks_in, blocks_out)
            x, out = staging.source, staging.out
        count = self._check(x, out, blocks_in, blocks_out)
        try:
            operation = pb.Operation(collective=collective, dtype=x.dtype.name, count=count, **fields)
        except (TypeError, ValueError) as error:  # what the message has no place for
            if staging is not None:
                staging.free()
            raise InvalidArgument(f"options: {error}; {fields}") from None
        operands = {}
        for rank in range(self.size):
            into = location(out.places[rank], out.offset) if out is not None else None
            operands[rank] = pb.Operand(source=location(x.places[rank], x.offset), destination=into)
        work = pb.RunOperation(operation=operation, operands=operands, driver=driver)
        if staging is None:
            return self._submit(work, wait, timeout)
        handle = self._start([work], timeout, staging.collect, staging.free)
        return handle.wait() if wait else handle

    def _check(self, x: Buffer, out: Buffer | None, blocks_in: int, blocks_out: int) -> int:
        """Elements a block, if these buffers are of this communicator and large enough."""
        for name, buffer in (("values", x), ("out", out)):
            if buffer is not None and len(buffer.places) != self.size:
                raise InvalidArgument(
                    f"{name}: the buffer is on {len(buffer.places)} devices, communicator {self.id} has "
                    f"{self.size}; after a rebuild make it again, with reuse=True to keep what it holds"
                )
        if x.count % blocks_in:
            raise InvalidArgument(f"values: {x.count} elements do not make {blocks_in} equal blocks")
        count = x.count // blocks_in
        if out is not None and out.dtype != x.dtype:
            raise InvalidArgument(f"out: it holds {out.dtype.name}, the vectors are of {x.dtype.name}")
        if out is not None and out.count < count * blocks_out:
            raise InvalidArgument(f"out: it has {out.count} elements, the result {count * blocks_out}")
        return count

    def _submit(self, work: pb.RunOperation, wait: bool, timeout: float) -> Any:
        if self._queue is not None:
            self._queue.append(work)
            return None
        handle = self._start([work], timeout)
        return handle.wait() if wait else handle

    def _start(
        self,
        works: list[pb.RunOperation],
        timeout: float,
        finish: Callable[[Any], Any] = lambda answer: answer.reports[-1],
        failed: Callable[[], None] | None = None,
    ) -> Handle[Any]:
        request = pb.RunRequest(communicator_id=self.id, operations=works, timeout_s=timeout)
        # The coordinator keeps the deadline; the call's own is only there so that nothing can hang.
        future = self._stub.Run.future(request, timeout=(timeout or self._timeout) + 10.0)
        return Handle(future, f"communicator {self.id}", finish, failed)

    # ---- life

    def status(self) -> pb.Communicator:
        """How its latest work stands: ``status`` and ``reason``."""
        answer: pb.CommunicatorResponse = self._call("GetCommunicator", pb.GetCommunicatorRequest(id=self.id))
        return answer.communicator

    def rebuild(self) -> Communicator:
        """The same communicator without the devices that are gone, at its next generation."""
        answer = self._call("RebuildCommunicator", pb.RebuildCommunicatorRequest(id=self.id))
        self._take(answer.communicator)
        return self

    def destroy(self) -> None:
        """Waits for what is queued, then forgets the communicator; named buffers stay."""
        self._call("DestroyCommunicator", pb.DestroyCommunicatorRequest(id=self.id))

    def _call(self, method: str, request: Any) -> Any:
        return call(getattr(self._stub, method), request, self._timeout, f"communicator {self.id}")
