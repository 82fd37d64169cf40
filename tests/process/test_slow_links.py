"""Data links with a latency of 200 ± 50 ms each way, as between continents, are not taken for broken ones."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from free_ports import free_port

import hoop

if TYPE_CHECKING:
    from background import Running

LATENCY_S = (0.15, 0.25)
STEPS = 8
TRAINING_S = 480.0
"""Deadline of the training, on a machine that stands still most of the time."""
DRIVER = Path(__file__).with_name("train_driver.py")


class SlowProxy:
    """Forwards connections to a port of this host; each piece of bytes arrives a random time later, in order."""

    def __init__(self, target: int) -> None:
        self.target, self.connections = target, 0
        self._random = random.Random(target)

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one direction of one connection; pieces that are in flight overlap."""
        loop = asyncio.get_running_loop()
        in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await in_flight.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        delivery = asyncio.ensure_future(deliver())
        try:
            data = b"-"
            while data:
                data = await reader.read(1 << 18)
                in_flight.put_nowait((loop.time() + self._random.uniform(*LATENCY_S), data))
            await delivery
        except (OSError, asyncio.CancelledError):  # the other end has left, or the test has ended
            delivery.cancel()
        finally:
            writer.transport.abort()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(self.forward(reader, target_writer), self.forward(target_reader, writer))


@pytest.fixture
def slow_proxy() -> Iterator[Callable[[int], tuple[SlowProxy, int]]]:
    """Starts a proxy to a port; returns it with its own port."""
    loop = asyncio.new_event_loop()
    servers: list[asyncio.Server] = []
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def start_proxy(target: int) -> tuple[SlowProxy, int]:
        proxy = SlowProxy(target)
        starting = asyncio.run_coroutine_threadsafe(asyncio.start_server(proxy.accept, "127.0.0.1", 0), loop)
        servers.append(starting.result(60.0))
        return proxy, servers[-1].sockets[0].getsockname()[1]

    async def cancel_all() -> None:
        for server in servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield start_proxy
    finally:
        asyncio.run_coroutine_threadsafe(cancel_all(), loop).result(60.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.slow  # 38 s, nearly all of them waiting for the links
def test_links_of_200_ms_and_their_jitter_are_not_failed(
    start: Callable[..., Running],
    connect: Callable[..., hoop.Cluster],
    slow_proxy: Callable[[int], tuple[SlowProxy, int]],
) -> None:
    """The lease is short: after a third of it without a byte a device reports its link, and the bytes are compared."""
    coordinator, proxies = start("coordinator", "--lease", "1.5s"), []
    for _ in range(2):
        port = free_port()
        proxy, own_port = slow_proxy(port)
        proxies.append(proxy)
        advertised = ("--data-port", port, "--advertise-data", f"127.0.0.1:{own_port}")
        start("device", "--join", coordinator.address, "--memory", "64MiB", "--jobs", DRIVER.parent, *advertised)
    limit = ("--set", f"max_steps={STEPS}")
    training = start("train", f"{DRIVER}:job", "--coordinator", coordinator.address, "-n", 2, *limit, "--json")
    assert training.wait(TRAINING_S) == 0, training.errors
    with connect(coordinator.address) as cluster:
        kinds = {event.kind for event in cluster.events()}
    assert sum(proxy.connections for proxy in proxies) >= 1
    assert kinds & {"links_failed", "device_dead"} == set()
