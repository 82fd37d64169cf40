"""A cluster on this machine: the coordinator in this process, every device in one of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hoop.errors import DeadlineExceeded, FailedPrecondition, PeerLost
from hoop.memory.storage import default_directory
from hoop.resources import STARTED, Request, admit
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.grpc_server import write_address_file
from hoop.topology import Address

STOP_S = 5.0
"""How long a device may take to leave before it is killed."""


@dataclass(frozen=True)
class LocalConfig:
    """A coordinator and so many devices."""

    devices: int = 4
    memory: int = 256 * 1024 * 1024
    state: Path | None = None
    """A folder for the arenas and the journal, to go on from after a restart; None: nothing is kept."""
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    patience_s: float = 60.0
    device_options: tuple[str, ...] = ()
    """More of ``hoop device``'s options: where its token or certificates are, if not in the environment."""


class LocalCluster:
    """A running local cluster. ``stop`` leaves nothing behind."""

    def __init__(self, config: LocalConfig) -> None:
        self.config = config
        self._server = CoordinatorServer(config.coordinator)
        self._devices: dict[int, asyncio.subprocess.Process] = {}

    @property
    def address(self) -> Address:
        return self._server.coordinator.address

    async def start(self, address_file: Path | None = None) -> Address:
        """Serves, starts the devices and waits until all have joined."""
        config = self.config
        kept = [] if config.state is None else list(config.state.glob("device-*.arena"))
        options = ("--devices", "--memory")
        admit(Request(config.devices, config.memory, STARTED, config.state, len(kept), options))
        try:
            await self._server.start()
            for device_id in range(1, self.config.devices + 1):
                self._devices[device_id] = await self._start_device(device_id)
            await self._all_joined()
            if address_file is not None:
                write_address_file(address_file, self.address)
        except BaseException:
            await self.stop()
            raise
        return self.address

    async def _start_device(self, device_id: int) -> asyncio.subprocess.Process:
        command = [
            sys.executable,
            "-m",
            "hoop",
            "device",
            "--join",
            str(self.address),
            "--id",
            str(device_id),
        ]
        command += ["--memory", str(self.config.memory), "--host", self.config.coordinator.host]
        # It leaves when this pipe closes: however this process ends, no device is left behind.
        command += ["--leave-with-stdin", "--quiet", *self.config.device_options]
        if self.config.coordinator.insecure:
            command.append("--insecure")
        if self.config.state is not None:
            command += ["--arena", str(self.config.state / f"device-{device_id}.arena")]
        # A session of its own: Ctrl-C reaches this process, which ends the devices in order.
        return await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )

    async def _all_joined(self) -> None:
        coordinator = self._server.coordinator
        changed = asyncio.Event()
        unsubscribe = coordinator.events.subscribe(lambda _: changed.set())
        deaths = {asyncio.ensure_future(process.wait()): key for key, process in self._devices.items()}
        try:
            async with asyncio.timeout(self.config.patience_s):
                while missing := self._missing():
                    changed.clear()
                    news = asyncio.ensure_future(changed.wait())
                    await asyncio.wait({news, *deaths}, return_when="FIRST_COMPLETED")
                    news.cancel()
                    for death, device_id in deaths.items():
                        if death.done():
                            code = death.result()  # 2: it has said what is wrong with what it was asked
                            raise (FailedPrecondition if code == 2 else PeerLost)(
                                f"device {device_id} ended with code {code} as it started"
                            )
        except TimeoutError:
            raise DeadlineExceeded(
                f"devices {missing} did not join within {self.config.patience_s:g} s"
            ) from None
        finally:
            unsubscribe()
            for death in deaths:
                death.cancel()

    def _missing(self) -> list[int]:
        members = self._server.coordinator.state.members
        alive = {key for key, member in members.items() if member.health == "alive"}
        return sorted(set(self._devices) - alive)

    def watch(self, tell: Callable[[str], None]) -> Callable[[], None]:
        """Tells of every event from now on; returns the way out."""
        return self._server.coordinator.events.subscribe(lambda event: tell(event.text))

    async def stop(self) -> None:
        """Devices leave, then the coordinator; whoever does not leave in time is killed."""
        for process in self._devices.values():
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        waits = [asyncio.ensure_future(process.wait()) for process in self._devices.values()]
        if waits:
            await asyncio.wait(waits, timeout=STOP_S)
        for process, wait in zip(self._devices.values(), waits, strict=True):
            if not wait.done():
                process.kill()
                await wait
            for folder in {default_directory(0), default_directory(sys.maxsize)}:
                for left in folder.glob(f"hoop-{process.pid}-*.arena"):  # one that was killed could not
                    left.unlink(missing_ok=True)
        self._devices.clear()
        await self._server.stop()
