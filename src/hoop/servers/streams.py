"""The lab's streams: Begin* queue a transfer, StreamSend carries it, GetStreamStatus tells.

    client ── BeginSend ─────▶ source        (1) an id, and a task that dials the destination
    client ── BeginReceive ──▶ destination   (2) where the bytes are to go
    source ── StreamSend ────▶ destination   (3) the bytes

(2) and (3) may come in either order: each waits for the other, up to a deadline.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

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
from hoop.memory import Arena
from hoop.servers.memory_order import Access
from hoop.servers.runner import MAX_TIMEOUT_S
from hoop.texts import printable
from hoop.wire.generated import gpu_sim_pb2 as lab

MAX_OPEN = 4096
MAX_REMEMBERED = 16384
MAX_WAITING_BYTES = 64 * 1024 * 1024
"""How much data may be here before its BeginReceive, unless it is one message. A device sends none before."""
MATCH_SECONDS = 30.0
"""How long one half of a transfer waits for the other."""


@dataclass
class Stream:
    """One side of one transfer."""

    id: int
    size: int
    peer_device: int = 0
    status: int = lab.IN_PROGRESS
    reason: str = ""
    address: int = 0
    claimed: bool = False
    """A receive whose sender has come."""
    behind: Access | None = None
    """Work on these bytes that was accepted before: the transfer touches them when it has ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def turn(self) -> None:
        """Returns when no work that was accepted before the transfer uses its bytes; raises if that takes too long."""
        if self.behind is not None:
            await self.behind.turn(MAX_TIMEOUT_S)

    def end(self, reason: str = "") -> None:
        if not self.ended.is_set():
            self.status, self.reason = (lab.FAILED if reason else lab.SUCCESS), printable(reason)
            self.ended.set()


Behind = Callable[[str, int, int, bool], Access]
"""A transfer (its name, address, size, whether it writes), put behind the work that was accepted before it."""


class StreamTable:
    """Every transfer that this device takes part in."""

    def __init__(self, arena: Arena, behind: Behind, most: int = MAX_OPEN) -> None:
        self._arena = arena
        self._behind = behind
        self._most = most
        self._sends: OrderedDict[int, Stream] = OrderedDict()
        self._receives: OrderedDict[int, Stream] = OrderedDict()
        self._arrived = asyncio.Condition()
        self._arriving = 0
        """Senders that have not met their BeginReceive yet."""
        self._waiting_bytes = 0

    @property
    def open(self) -> int:
        both = (*self._sends.values(), *self._receives.values())
        return self._arriving + sum(stream.status == lab.IN_PROGRESS for stream in both)

    def begin_send(self, address: int, size: int, peer_device: int) -> tuple[Stream, memoryview]:
        """(1)"""
        view = self._arena.view(address, size)
        turn = self._behind("BeginSend", address, size, False)
        stream = Stream(secrets.randbits(62) + 1, size, peer_device, behind=turn)
        self._remember(self._sends, stream)
        return stream, view

    async def begin_receive(self, stream_id: int, address: int, size: int, peer_device: int) -> None:
        """(2)"""
        if not stream_id:
            raise InvalidArgument("streamId: 0 is no stream; use the id that BeginSend returned")
        if stream_id in self._receives:
            raise FailedPrecondition(f"streamId: stream {stream_id} has been begun here already")
        self._arena.check(address, size)
        turn = self._behind("BeginReceive", address, size, True)
        stream = Stream(stream_id, size, peer_device, address=address, behind=turn)
        self._remember(self._receives, stream)
        async with self._arrived:
            self._arrived.notify_all()

    async def expire(self, stream: Stream) -> None:
        """Fails a receive for which nobody came."""
        try:
            await asyncio.wait_for(stream.ended.wait(), MATCH_SECONDS)
        except TimeoutError:
            if not stream.claimed:
                stream.end(f"nobody sent stream {stream.id} within {MATCH_SECONDS:g} s")

    def receive(self, stream_id: int) -> Stream:
        return self._receives[stream_id]

    def status(self, stream_id: int) -> Stream:
        stream = self._receives.get(stream_id) or self._sends.get(stream_id)
        if stream is None:
            raise NotFound(f"streamId: stream {stream_id} is unknown to this device")
        return stream

    async def accept(self, chunks: AsyncIterator[lab.DataChunk]) -> None:
        """(3), until the last byte: what StreamSend does."""
        self._check_room()
        self._arriving += 1
        try:
            first, stream = await self._meet(chunks)
        finally:
            self._arriving -= 1
        try:
            await self._fill(stream, first, chunks)
            stream.end()
        except HoopError as error:
            stream.end(str(error))
            raise
        except (Exception, asyncio.CancelledError) as error:
            stream.end(f"the sender vanished: {error or type(error).__name__}")
            raise

    async def _meet(self, chunks: AsyncIterator[lab.DataChunk]) -> tuple[lab.DataChunk, Stream]:
        """A sender's first chunk, and the receive that it is for."""
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
            return first, await self._match(first.streamId.value)
        finally:
            self._waiting_bytes -= size

    async def _match(self, stream_id: int) -> Stream:
        """The receive that these bytes are for, waiting for its BeginReceive."""

        def found() -> Stream | None:
            if stream_id:
                return self._receives.get(stream_id)
            waiting = (one for one in self._receives.values() if not one.claimed and not one.ended.is_set())
            return next(waiting, None)

        try:
            async with self._arrived:
                stream = await asyncio.wait_for(self._arrived.wait_for(found), MATCH_SECONDS)
        except TimeoutError:
            raise FailedPrecondition(
                f"StreamSend: no BeginReceive for stream {stream_id or 'any'} within {MATCH_SECONDS:g} s"
            ) from None
        assert stream is not None, "the condition is that there is one"
        if stream.claimed:
            raise FailedPrecondition(f"StreamSend: stream {stream.id} has a sender already")
        stream.claimed = True
        return stream

    async def _fill(self, stream: Stream, first: lab.DataChunk, chunks: AsyncIterator[lab.DataChunk]) -> None:
        await stream.turn()
        got = 0
        chunk: lab.DataChunk | None = first
        while chunk is not None:
            if stream.ended.is_set():
                raise PeerLost(f"stream {stream.id}: {stream.reason}")
            if got + len(chunk.data) > stream.size:
                raise LinkCorrupted(
                    f"stream {stream.id}: the sender sent more than the {stream.size} bytes agreed"
                )
            self._arena.write(stream.address + got, chunk.data)
            got += len(chunk.data)
            chunk = await anext(aiter(chunks), None)
        if got < stream.size:
            raise LinkCorrupted(f"stream {stream.id}: it ended after {got} of {stream.size} bytes")

    def lose(self, device_id: int, reason: str) -> None:
        """A device is gone: what was to come from it, or go to it, fails now."""
        for stream in (*self._sends.values(), *self._receives.values()):
            if stream.peer_device == device_id:
                stream.end(reason)

    def _check_room(self) -> None:
        if self.open >= self._most:
            raise ResourceExhausted(
                f"{self._most} streams are open here; wait for some to end, or raise the device's --max-streams"
            )

    def _remember(self, table: OrderedDict[int, Stream], stream: Stream) -> None:
        self._check_room()
        table[stream.id] = stream
        if len(table) > MAX_REMEMBERED:
            ended = next(key for key, one in table.items() if one.ended.is_set())
            del table[ended]
