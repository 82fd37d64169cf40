"""What a forked child of a cluster does: it is the coordinator, or a device, until its parent ends."""

from __future__ import annotations

import asyncio
import json
import os

from hoop.errors import HoopError
from hoop.servers.assembly import CoordinatorServer
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.servers.tasks import Trainer


def coordinate(config: CoordinatorConfig, say: int, held: int) -> None:
    """A coordinator, which says where it is."""

    async def run() -> None:
        ended = _until_closed(held)
        server = CoordinatorServer(config)
        address = await server.start()
        os.write(say, f"{address}\n".encode())
        os.close(say)
        await ended.wait()
        await server.stop()

    asyncio.run(run())


def serve(config: DeviceConfig, trainer: Trainer, complain: int, held: int) -> None:
    """A device; why one cannot start is told as a line of JSON."""

    async def run() -> None:
        ended = _until_closed(held)
        server = DeviceServer(config, trainer)
        await server.start()
        await ended.wait()
        await server.stop()

    try:
        asyncio.run(run())
    except HoopError as error:
        text = f"device {config.device_id} cannot start: {error}"
        os.write(complain, (json.dumps({"error": type(error).__name__, "text": text}) + "\n").encode())


def _until_closed(held: int) -> asyncio.Event:
    """Set when the other end of this pipe closes: the head has ended."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard() -> None:
        loop.remove_reader(held)
        ended.set()

    loop.add_reader(held, heard)
    return ended
