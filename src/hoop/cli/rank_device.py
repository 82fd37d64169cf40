"""``hoop train`` in a rank other than 0 of a run that a scheduler started: a device that joins rank 0's coordinator.

It joins as ``hoop device`` does. It ends when rank 0 dismisses it, with rank 0's exit code; when it has left after a
signal; or when rank 0's coordinator is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hoop.cli.device import join_device, stop_device
from hoop.cli.running import Stopping
from hoop.errors import PeerLost
from hoop.topology import Address

if TYPE_CHECKING:
    from hoop.servers.device import DeviceConfig, DeviceServer
    from hoop.servers.tasks import TrainFunction

STOP_GRACE_S = 5.0
"""Seconds that a rank that got a signal waits for rank 0 to stop the job: a scheduler signals all ranks at once."""
STOP_S = 600.0
"""Seconds that a rank waits for the end of a job that is being stopped."""
POLL_S = 0.1
PROBE_S = 2.0
CONNECT_S = 5.0
LOST_S = 30.0
"""Seconds without a connection after which the coordinator of rank 0 counts as gone: nothing restarts it."""


def run_rank(coordinator: Address, config: DeviceConfig, trainer: TrainFunction) -> int:
    """Runs the device of this rank until the run is over; returns the exit code."""
    return asyncio.run(_run(coordinator, config, trainer))


async def _run(coordinator: Address, config: DeviceConfig, trainer: TrainFunction) -> int:
    stopping = Stopping()
    task = _StopNotice(trainer)
    server = await join_device(config, task.train, stopping)
    if server is None:
        return 128 + stopping.number
    losing = asyncio.ensure_future(_wait_lost(server, coordinator))
    try:
        gone = asyncio.Event()
        losing.add_done_callback(lambda _: gone.set())
        await stopping.wait(server.dismissed, gone)
        if stopping.number:
            await _wait_stopped(server, task, gone)
        if losing.done():
            raise losing.exception() or AssertionError("it waits until the coordinator is lost")
        return server.exit_code if server.dismissed.is_set() else 128 + stopping.number
    finally:
        losing.cancel()
        await asyncio.gather(losing, return_exceptions=True)
        await stop_device(server, stopping)


class _StopNotice:
    """A train function that notes whether its job was asked to stop."""

    def __init__(self, trainer: TrainFunction) -> None:
        self._trainer = trainer
        self._stopping: Callable[[], bool] = lambda: False

    def train(self, context: Any, settings: str, emit: Any, stopping: Callable[[], bool], resume: bytes | None) -> None:
        self._stopping = stopping
        self._trainer(context, settings, emit, stopping, resume)

    @property
    def requested(self) -> bool:
        return self._stopping()


async def _wait_stopped(server: DeviceServer, task: _StopNotice, gone: asyncio.Event) -> None:
    """Waits until rank 0 has stopped the job and dismisses this rank. Returns early if it does not stop the job."""
    began = time.monotonic()
    while not server.dismissed.is_set() and not gone.is_set():
        if time.monotonic() - began > (STOP_S if task.requested else STOP_GRACE_S):
            return
        await asyncio.sleep(POLL_S)


async def _wait_lost(server: DeviceServer, coordinator: Address) -> None:
    """Raises PeerLost when the coordinator could not be reached for ``LOST_S`` seconds."""
    seen, since = 0, 0.0
    while True:
        await asyncio.sleep(PROBE_S)
        if not since and server.failed_heartbeats == seen:
            continue
        seen = server.failed_heartbeats
        if await _can_connect(coordinator):
            since = 0.0
        elif not since:
            since = time.monotonic()
        elif time.monotonic() - since > LOST_S:
            raise PeerLost(
                f"rank 0 is gone: nothing answers at {coordinator} for {LOST_S:g} s; start the run again, with "
                "--auto-resume if it has --out"
            )


async def _can_connect(address: Address) -> bool:
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(address.host, address.port)
        writer.close()
        return True
    return False
