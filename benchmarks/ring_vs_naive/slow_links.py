"""A TCP proxy that makes links slow: every byte arrives a fixed time after it was sent.

``python slow_links.py LATENCY_S LISTEN:TARGET …`` forwards each local port to another, both ways, adding the
latency to each direction. Bytes in flight overlap, as on a real link; bandwidth is not limited.
"""

from __future__ import annotations

import asyncio
import sys


async def forward_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, latency: float) -> None:
    """Forward one direction of one connection."""
    loop = asyncio.get_running_loop()
    in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due, data = await in_flight.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
        writer.close()

    delivery = asyncio.ensure_future(deliver())
    try:
        while data := await reader.read(1 << 18):
            in_flight.put_nowait((loop.time() + latency, data))
    except OSError:
        pass
    in_flight.put_nowait((loop.time() + latency, b""))
    await asyncio.gather(delivery, return_exceptions=True)


async def forward(listen: int, target: int, latency: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(
            forward_bytes(reader, target_writer, latency), forward_bytes(target_reader, writer, latency)
        )

    await asyncio.start_server(connected, "127.0.0.1", listen)


async def main() -> None:
    latency = float(sys.argv[1])
    for pair in sys.argv[2:]:
        listen, target = map(int, pair.split(":"))
        await forward(listen, target, latency)
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


asyncio.run(main())
