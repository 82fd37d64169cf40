"""A cluster on this machine: the coordinator in this process, every device in a separate one. Used by ``hoop up``.

``hoop train`` forks its processes from one that has loaded the job: ``forked.py``, called by ``runs/training.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hoop.errors import DeadlineExceeded, FailedPrecondition, PeerLost
from hoop.events import Event
from hoop.launch.mps import count_gpus, shared_gpus
from hoop.launch.processes import LEAVE_WITH_STDIN, hoop_command, remove_arenas
from hoop.resources import STARTED, Request, admit
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.grpc_server import write_address_file
from hoop.servers.metrics_options import device_metrics_address
from hoop.topology import Address

STOP_S = 5.0
"""Seconds that the devices have to leave before they are killed."""


@dataclass(frozen=True)
class LocalConfig:
    """A coordinator and its devices."""

    devices: int = 4
    memory: int = 256 * 1024 * 1024
    """Size of each device's arena in bytes."""
    state: Path | None = None
    """Folder of the arenas and the journal, from which the cluster resumes after a restart; None: nothing is kept."""
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    join_timeout_s: float = 60.0
    device_options: tuple[str, ...] = ()
    """Additional options of ``hoop device``: its token or certificates, if they are not in the environment."""
    accelerator: str = "cpu"
    """Kind of the devices' memory: ``--accelerator`` of ``hoop device``."""
    dashboard: int | None = None
    """Port of the dashboard, on loopback (``hoop dashboard``); 0: any free one; None: there is none."""
    dashboard_options: tuple[str, ...] = ()
    """Additional options of ``hoop dashboard``."""


class LocalCluster:
    """A running local cluster. ``stop`` ends every process and removes their files."""

    def __init__(self, config: LocalConfig) -> None:
        self.config = config
        self._server = CoordinatorServer(config.coordinator)
        self._devices: dict[int, asyncio.subprocess.Process] = {}
        self._dashboard: asyncio.subprocess.Process | None = None
        self._mps = contextlib.ExitStack()
        """Context of CUDA MPS, which runs while devices share a GPU."""

    @property
    def address(self) -> Address:
        return self._server.coordinator.address

    async def start(self, address_file: Path | None = None) -> Address:
        """Start the coordinator and the devices; returns when all devices have joined."""
        config = self.config
        arenas = [] if config.state is None else list(config.state.glob("device-*.arena"))
        options = ("--devices", "--memory")
        admit(Request(config.devices, config.memory, STARTED, config.state, len(arenas), options))
        try:
            await self._server.start()
            on_gpus = config.accelerator.partition(":")[0] in ("cuda", "auto")
            # On this thread: the daemon ends with the thread that starts it.
            if warning := self._mps.enter_context(shared_gpus(config.devices if on_gpus else 0)):
                self._server.coordinator.events.publish("gpus_shared", warning)
            for device_id in range(1, self.config.devices + 1):
                self._devices[device_id] = await self._start_device(device_id)
            await self._wait_joined()
            if config.dashboard is not None:
                self._dashboard = await self._start_dashboard(config.dashboard)
            if address_file is not None:
                write_address_file(address_file, self.address)
        except BaseException:
            await self.stop()
            raise
        return self.address

    async def _start_device(self, device_id: int) -> asyncio.subprocess.Process:
        command = hoop_command("device", "--join", str(self.address), "--id", str(device_id))
        command += ["--memory", str(self.config.memory), "--host", self.config.coordinator.host]
        command += ["--accelerator", self._accelerator(device_id)]
        # The device leaves when its stdin closes, so it cannot outlive this process.
        command += [LEAVE_WITH_STDIN, "--quiet", *self.config.device_options]
        if (metrics := self.config.coordinator.metrics) is not None:
            command += ["--metrics", str(device_metrics_address(metrics, device_id))]
        if self.config.coordinator.insecure:
            command.append("--insecure")
        if self.config.state is not None:
            command += ["--arena", str(self.config.state / f"device-{device_id}.arena")]
        # In its own session: Ctrl-C reaches this process only, which then ends the devices in order.
        return await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, start_new_session=True)

    async def _start_dashboard(self, port: int) -> asyncio.subprocess.Process:
        """Starts ``hoop dashboard``, which prints its address. It leaves when its stdin closes."""
        command = hoop_command("dashboard", "--coordinator", str(self.address), "--port", str(port), LEAVE_WITH_STDIN)
        return await asyncio.create_subprocess_exec(
            *command, *self.config.dashboard_options, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )

    def _accelerator(self, device_id: int) -> str:
        """``cuda``: the devices take the GPUs of this machine in turn."""
        wanted, gpus = self.config.accelerator, count_gpus()
        return f"cuda:{(device_id - 1) % gpus}" if gpus and wanted in ("cuda", "auto") else wanted

    async def _wait_joined(self) -> None:
        coordinator = self._server.coordinator
        changed = asyncio.Event()
        unsubscribe = coordinator.events.subscribe(lambda _: changed.set())
        exits = {asyncio.ensure_future(process.wait()): key for key, process in self._devices.items()}
        try:
            async with asyncio.timeout(self.config.join_timeout_s):
                while missing := self._missing():
                    changed.clear()
                    event = asyncio.ensure_future(changed.wait())
                    await asyncio.wait({event, *exits}, return_when="FIRST_COMPLETED")
                    event.cancel()
                    for exited, device_id in exits.items():
                        if exited.done():
                            code = exited.result()  # 2: wrong usage, and the device has printed the reason
                            raise (FailedPrecondition if code == 2 else PeerLost)(
                                f"device {device_id} ended with code {code} as it started"
                            )
        except TimeoutError:
            raise DeadlineExceeded(f"devices {missing} did not join within {self.config.join_timeout_s:g} s") from None
        finally:
            unsubscribe()
            for exited in exits:
                exited.cancel()

    def _missing(self) -> list[int]:
        members = self._server.coordinator.state.members
        alive = {key for key, member in members.items() if member.health == "alive"}
        return sorted(set(self._devices) - alive)

    def watch(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with every new event; returns a function that unsubscribes."""
        return self._server.coordinator.events.subscribe(listener)

    async def wait_failed(self) -> None:
        """Waits until the coordinator cannot go on, and raises why."""
        await self._server.coordinator.wait_failed()

    async def stop(self) -> None:
        """Stop the dashboard and the devices, then the coordinator. One that does not leave in time is killed."""
        processes = [*self._devices.values(), *([self._dashboard] if self._dashboard is not None else [])]
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        exits = [asyncio.ensure_future(process.wait()) for process in processes]
        if exits:
            await asyncio.wait(exits, timeout=STOP_S)
        for process, exited in zip(processes, exits, strict=True):
            if not exited.done():
                process.kill()
                await exited
            remove_arenas(process.pid)
        self._devices.clear()
        self._dashboard = None
        self._mps.close()
        await self._server.stop()
