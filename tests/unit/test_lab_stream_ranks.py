"""Bytes of a lab's stream go to the receive that names the sender's rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hoop.errors import FailedPrecondition
from hoop.memory.arena import Arena
from hoop.servers.lab_streams import StreamTable
from hoop.wire.generated import gpu_sim_pb2 as lab


def chunk(stream: int, rank: int, data: bytes) -> AsyncIterator[lab.DataChunk]:
    async def chunks() -> AsyncIterator[lab.DataChunk]:
        yield lab.DataChunk(streamId={"value": stream}, srcRank={"value": rank}, data=data)

    return chunks()


def test_a_stream_of_another_rank_than_the_receive_names_is_refused(tmp_path: Path) -> None:
    arena = Arena.open_or_create(tmp_path / "arena", 1 << 20)
    no_order: Any = lambda *_: None  # noqa: E731

    async def run() -> None:
        streams, low = StreamTable(arena, no_order), arena.min_address
        await streams.begin_receive(7, low, 4, 0, peer_rank=1)
        with pytest.raises(FailedPrecondition, match="stream 7 is to come from rank 1, and this is rank 2"):
            await streams.accept(chunk(7, 2, b"evil"))
        await streams.begin_receive(8, low + 8, 4, 0, peer_rank=2)
        await streams.accept(chunk(0, 2, b"two."))  # without an id: not to the oldest, which is rank 1's
        await streams.accept(chunk(7, 1, b"one."))

    asyncio.run(run())
    assert arena.read(arena.min_address, 4) == b"one."
    assert arena.read(arena.min_address + 8, 4) == b"two."
    arena.close()
