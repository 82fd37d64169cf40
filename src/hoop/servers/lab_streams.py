"""The transfers of a device in the lab's protocol; ``LabDevice`` serves the calls, ``StreamTable`` holds the transfers.

BeginSend and BeginReceive announce a transfer, StreamSend carries it, GetStreamStatus returns its status.

    client ── BeginSend ─────▶ source        (1) returns an id, and starts a task that connects to the destination
    client ── BeginReceive ──▶ destination   (2) the address for the bytes
    source ── StreamSend ────▶ destination   (3) the bytes

(2) and (3) may come in either order: each waits for the other, up to a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import numpy as np

from hoop.collectives.reduction import Reduction
from hoop.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    HoopError,
    InvalidArgument,
    LinkCorrupted,
    NotFound,
    PeerLost,
    ResourceExhausted,
)
from hoop.memory import DeviceMemory, dtype
from hoop.servers.access_order import Access
from hoop.servers.lab_dialect import unknown_fields
from hoop.servers.operation_runner import MAX_TIMEOUT_S
from hoop.texts import printable
from hoop.wire.generated import gpu_sim_pb2 as lab

MAX_OPEN = 4096
MAX_REMEMBERED = 16384
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Maximum received bytes that wait for their BeginReceive; a single message may exceed it. Hoop's devices send none."""
DISCARD_SECONDS = 5.0
"""Maximum seconds for which a transfer that is refused is read."""
MAX_DISCARDED_BYTES = 64 << 20
"""Maximum bytes that are read of a transfer that is refused."""
MATCH_SECONDS = 30.0
"""Seconds that a sender waits for its BeginReceive, and a receive for its sender."""


@dataclass
class Stream:
    """One end of one transfer."""

    id: int
    size: int
    peer_device: int = 0
    status: int = lab.IN_PROGRESS
    reason: str = ""
    address: int = 0
    """Address in the device's memory from which the bytes come, or to which they go."""
    peer_rank: int | None = None
    """Rank from which the bytes of a receive must come, if both ends have a rank of another program's coordinator."""
    has_sender: bool = False
    """True for a receive whose sender has connected."""
    op: str = ""
    """Operation of a receive that combines the bytes, as float64, with those in memory; empty: it overwrites them."""
    access: Access | None = None
    """Place of the transfer in the access order: it waits for earlier operations on the same bytes."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_turn(self) -> None:
        """Returns when all earlier operations on the same bytes have ended. Raises after ``MAX_TIMEOUT_S``."""
        if self.access is not None:
            await self.access.wait_turn(MAX_TIMEOUT_S)

    def takes_from(self, rank: int | None) -> bool:
        """Whether a sender that says this rank (None: it says none) may be the one of this receive."""
        return None in (rank, self.peer_rank) or rank == self.peer_rank

    def end(self, reason: str = "") -> None:
        """Ends the transfer; ``reason``: why it failed, empty if it succeeded. Only the first call counts."""
        if not self.ended.is_set():
            self.status, self.reason = (lab.FAILED if reason else lab.SUCCESS), printable(reason)
            self.ended.set()


_FLOAT64 = dtype("float64")


OrderAccess = Callable[[str, int, int, bool], Access]
"""Type of ``OperationRunner.order_access``: takes description, address, size in bytes, and whether it writes."""


class StreamTable:
    """The transfers of this device, and the limits on them."""

    def __init__(self, memory: DeviceMemory, order_access: OrderAccess, max_open: int = MAX_OPEN) -> None:
        self._memory = memory
        self._order_access = order_access
        self._max_open = max_open
        self._sends: OrderedDict[int, Stream] = OrderedDict()
        self._receives: OrderedDict[int, Stream] = OrderedDict()
        self._receive_begun = asyncio.Condition()
        self._unmatched_senders = 0
        """Number of senders that wait for their BeginReceive."""
        self._waiting_bytes = 0

    @property
    def open(self) -> int:
        both = (*self._sends.values(), *self._receives.values())
        return self._unmatched_senders + sum(stream.status == lab.IN_PROGRESS for stream in both)

    def begin_send(self, address: int, size: int, peer_device: int) -> Stream:
        """(1): adds a send."""
        self._memory.check(address, size)
        access = self._order_access("BeginSend", address, size, False)
        stream = Stream(secrets.randbits(62) + 1, size, peer_device, address=address, access=access)
        self._add(self._sends, stream)
        return stream

    def read(self, stream: Stream, offset: int, size: int) -> bytes:
        """At most ``size`` bytes of a send, from ``offset`` on."""
        return self._memory.read(stream.address + offset, min(size, stream.size - offset))

    async def begin_receive(
        self,
        stream_id: int,
        address: int,
        size: int,
        peer_device: int,
        op: str = "",
        peer_rank: int | None = None,
    ) -> None:
        """(2): adds a receive, and wakes a sender that waits for it."""
        if not stream_id:
            raise InvalidArgument("streamId: 0 is no stream; use the id that BeginSend returned")
        if stream_id in self._receives:
            raise FailedPrecondition(f"streamId: stream {stream_id} has been begun here already")
        if op and size % _FLOAT64.itemsize:
            raise InvalidArgument(f"numBytes: {size} bytes are not whole float64 elements, which {op} needs")
        self._memory.check(address, size, _FLOAT64.itemsize if op else 1)
        access = self._order_access("BeginReceive", address, size, True)
        stream = Stream(stream_id, size, peer_device, address=address, op=op, access=access, peer_rank=peer_rank)
        self._add(self._receives, stream)
        async with self._receive_begun:
            self._receive_begun.notify_all()

    async def expire(self, stream: Stream) -> None:
        """Fails a receive if no sender connects in time."""
        try:
            await asyncio.wait_for(stream.ended.wait(), MATCH_SECONDS)
        except TimeoutError:
            if not stream.has_sender:
                stream.end(f"no sender of stream {stream.id} came within {MATCH_SECONDS:g} s")

    def receive(self, stream_id: int) -> Stream:
        return self._receives[stream_id]

    def status(self, stream_id: int) -> Stream:
        stream = self._receives.get(stream_id) or self._sends.get(stream_id)
        if stream is None:
            raise NotFound(f"streamId: stream {stream_id} is unknown to this device")
        return stream

    async def accept(self, chunks: AsyncIterator[lab.DataChunk]) -> None:
        """(3): receives the bytes of one StreamSend, to the last."""
        self._check_limit()
        self._unmatched_senders += 1
        try:
            first, stream = await self._match_sender(chunks)
        finally:
            self._unmatched_senders -= 1
        try:
            await self._write_chunks(stream, first, chunks)
            stream.end()
        except HoopError as error:
            stream.end(str(error))
            await _discard(chunks)
            raise
        except (Exception, asyncio.CancelledError) as error:
            stream.end(f"the sender vanished: {error or type(error).__name__}")
            raise

    async def _match_sender(self, chunks: AsyncIterator[lab.DataChunk]) -> tuple[lab.DataChunk, Stream]:
        """The first chunk of a sender, and the receive that it belongs to."""
        try:
            first = await asyncio.wait_for(anext(aiter(chunks), None), MATCH_SECONDS)
        except TimeoutError:
            raise DeadlineExceeded(f"StreamSend: no chunk came within {MATCH_SECONDS:g} s") from None
        if first is None:
            raise InvalidArgument("StreamSend: the stream ended before its first chunk")
        size = len(first.data)
        if self._waiting_bytes and self._waiting_bytes + size > MAX_WAITING_BYTES:
            raise ResourceExhausted(
                f"StreamSend: {self._waiting_bytes} bytes wait for their BeginReceive here, {size} more are too many"
            )
        self._waiting_bytes += size
        try:
            stream_id = first.streamId.value or first.hoopStreamId.value
            rank = first.srcRank.value if first.HasField("srcRank") else None
            stream = await self._wait_receive(stream_id, rank, named_otherwise=bool(unknown_fields(first)))
        finally:
            self._waiting_bytes -= size
        if not stream.takes_from(rank):
            raise FailedPrecondition(
                f"StreamSend: stream {stream.id} is to come from rank {stream.peer_rank}, and this is rank {rank}"
            )
        stream.has_sender = True
        return first, stream

    async def _wait_receive(self, stream_id: int, rank: int | None, named_otherwise: bool) -> Stream:
        """The receive with this id (0: the oldest free one that takes from this rank); waits for its BeginReceive.

        ``named_otherwise``: the chunk has unknown fields. If it has no id, one of them may be it, and the oldest of
        several receives may be the wrong one.
        """

        def found() -> Stream | None:
            if stream_id:
                return self._receives.get(stream_id)
            free = (
                receive for receive in self._receives.values() if not receive.has_sender and not receive.ended.is_set()
            )
            waiting = [receive for receive in free if receive.takes_from(rank)]
            if named_otherwise and len(waiting) > 1:
                raise InvalidArgument(
                    f"streamId: missing, and {len(waiting)} receives wait here; DataChunk has it at number 2, and this "
                    "chunk has only unknown fields"
                )
            return next(iter(waiting), None)

        try:
            async with self._receive_begun:
                stream = await asyncio.wait_for(self._receive_begun.wait_for(found), MATCH_SECONDS)
        except TimeoutError:
            raise FailedPrecondition(
                f"StreamSend: no BeginReceive for stream {stream_id or 'any'} within {MATCH_SECONDS:g} s"
            ) from None
        assert stream is not None, "the condition is that there is one"
        if stream.has_sender:
            raise FailedPrecondition(f"StreamSend: stream {stream.id} has a sender already")
        return stream

    async def _write_chunks(self, stream: Stream, first: lab.DataChunk, chunks: AsyncIterator[lab.DataChunk]) -> None:
        await stream.wait_turn()
        received = 0
        rest = b""
        """The first bytes of a float64 that a chunk ended in, for a receive that combines."""
        chunk: lab.DataChunk | None = first
        while chunk is not None:
            if stream.ended.is_set():
                raise PeerLost(f"stream {stream.id}: {stream.reason}")
            if received + len(chunk.data) > stream.size:
                raise LinkCorrupted(f"stream {stream.id}: the sender sent more than the {stream.size} bytes agreed")
            if stream.op:
                rest = self._combine(stream, received - len(rest), rest + chunk.data)
            else:
                self._memory.write(stream.address + received, chunk.data)
            received += len(chunk.data)
            chunk = await anext(aiter(chunks), None)
        if received < stream.size:
            raise LinkCorrupted(f"stream {stream.id}: it ended after {received} of {stream.size} bytes")

    def _combine(self, stream: Stream, offset: int, data: bytes) -> bytes:
        """Combines the whole elements of ``data`` with those in memory. Returns the bytes after them."""
        count = len(data) // _FLOAT64.itemsize
        size = count * _FLOAT64.itemsize
        with self._memory.host_view(stream.address + offset, size) as view:
            Reduction(stream.op, _FLOAT64).combine(
                view.view(_FLOAT64.numpy), np.frombuffer(data, _FLOAT64.numpy, count)
            )
        return data[size:]

    def end_all(self, reason: str) -> None:
        """Fails all open transfers."""
        for stream in (*self._sends.values(), *self._receives.values()):
            stream.end(reason)

    def fail_peer(self, device_id: int, reason: str) -> None:
        """A device is lost: fails all transfers from it and to it."""
        for stream in (*self._sends.values(), *self._receives.values()):
            if stream.peer_device == device_id:
                stream.end(reason)

    def _check_limit(self) -> None:
        if self.open >= self._max_open:
            raise ResourceExhausted(
                f"{self._max_open} streams are open here; wait for some to end, or raise the device's --max-streams"
            )

    def _add(self, table: OrderedDict[int, Stream], stream: Stream) -> None:
        self._check_limit()
        table[stream.id] = stream
        if len(table) > MAX_REMEMBERED:
            ended = next(key for key, one in table.items() if one.ended.is_set())
            del table[ended]


async def _discard(chunks: AsyncIterator[lab.DataChunk]) -> None:
    """Reads what a sender still sends, before its call is refused.

    gRPC may lose the refusal if the sender is writing: the sender would then see INTERNAL instead of the reason.
    """
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            async for chunk in chunks:
                size += len(chunk.data)
                if size > MAX_DISCARDED_BYTES:
                    return
