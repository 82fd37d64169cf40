"""A cluster of Ray actors for one job.

    driver ── CoordinatorActor    on the driver's node: if that node is lost, so is the driver, and Ray ends its actors
           ── DeviceActor 1..n    where Ray finds room, each in a bundle of a placement group

When a node dies, the job goes on without its devices, by Hoop's own recovery. Ray starts their actors again where there
is room, now or when a node is added, and each joins the coordinator, as ``hoop device --join`` does: the running job
takes it in. A coordinator that was killed is started again on its journal, at its old port.

The cluster's token is made in the driver. It travels as an argument of the actors, by Ray's own connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from hoop.errors import FailedPrecondition, InvalidArgument, PeerLost
from hoop.membership.heartbeats import DetectorConfig
from hoop.resources import TRAINING, largest_arena
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.servers.tasks import TrainFunction
from hoop.topology import MAX_DEVICES, Address, DeviceRange
from hoop.wire.auth import Credentials
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

Found = TypeVar("Found")
PLACEMENTS = ("pack", "spread", "strict_pack", "strict_spread")
CLIENT_SCHEME = "ray://"
LEASE_S = 5.0
"""Lease of a device in seconds, for a host that is cut off or without power: a device that was killed is noticed by its
socket. It is longer than that of ``hoop coordinator``, because Ray's own processes share the cores with the devices."""
JOIN_S = 120.0
STOP_S = 10.0
"""Seconds that an actor may take to leave before it is killed."""
INSTALL = "pip install 'hoop[ray]'"


@dataclass(frozen=True)
class Ray:
    """The devices of a job as actors of a Ray cluster: ``hoop.train(…, on=hoop.Ray(devices=8))``.

    ``elastic=(least, most)``: the job starts with ``devices``, or with ``least`` if Ray has no room for more; it takes
    more as they come, up to ``most``. ``placement``: pack (few nodes) or spread (many); with strict_ Ray has no choice.
    ``address``: of Ray's head, ``host:port``; None: the cluster that this program is connected
    to, RAY_ADDRESS, the one that runs on this machine, or else a new one. ``runtime_env``: Ray's, for the actors.
    """

    devices: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    elastic: tuple[int, int] | None = None
    placement: str = "pack"
    address: str | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 300.0
    """Seconds that the job waits for the devices with which it starts."""

    def __post_init__(self) -> None:
        if self.elastic is not None:
            try:
                least, most = self.elastic
            except (TypeError, ValueError):
                raise InvalidArgument(f"elastic: {self.elastic!r:.80} is not (least, most), such as (4, 16)") from None
            _check_count("elastic", least)
            _check_count("elastic", most)
            if least > most:
                raise InvalidArgument(f"elastic: ({least}, {most}) is not (least, most): {least} is above {most}")
        if self.devices is not None:
            _check_count("devices", self.devices)
            least, most = self.elastic or (1, MAX_DEVICES)
            if not least <= self.devices <= most:
                raise InvalidArgument(f"devices: {self.devices} is not in elastic, {least} to {most}")
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidArgument(f"{name}: {value!r:.80} is not a number of at least 0")
        if not self.cpus and not self.gpus:
            raise InvalidArgument("cpus, gpus: both are 0, and Ray places a device by what it needs; try cpus=0.1")
        if self.placement not in PLACEMENTS:
            raise InvalidArgument(f"placement: {self.placement!r:.80} is not one of {', '.join(PLACEMENTS)}")

    def with_range(self, devices: DeviceRange) -> Ray:
        """This, with a number of devices, or a range of them, if it has none."""
        if self.devices or self.elastic:
            return self
        return replace(self, devices=devices.first, elastic=(devices.first, devices.most) if devices.most else None)

    @property
    def range(self) -> DeviceRange:
        return DeviceRange(self.start, self.most if self.elastic else 0)

    @property
    def start(self) -> int:
        """Devices that the job starts with, if Ray has room for them."""
        return self.devices or self.least

    @property
    def least(self) -> int:
        """The job does not start with fewer devices."""
        return self.elastic[0] if self.elastic else self.devices or 1

    @property
    def most(self) -> int:
        return self.elastic[1] if self.elastic else self.devices or 1

    @property
    def is_client(self) -> bool:
        """Whether this program is outside of the cluster, and reaches it through Ray's client server."""
        ray = import_ray()
        if ray.is_initialized():
            return bool(ray.util.client.ray.is_connected())
        return (self.address or os.environ.get("RAY_ADDRESS", "")).startswith(CLIENT_SCHEME)

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray reserves for a device."""
        return {name: float(value) for name, value in (("CPU", self.cpus), ("GPU", self.gpus)) if value}


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_DEVICES:
        raise InvalidArgument(f"{name}: {value!r:.80} is not a number of devices in 1..{MAX_DEVICES}")


@dataclass(frozen=True)
class DeviceCode:
    """What a device actor trains: ``make_trainer(payload, jobs)`` is its train function.

    ``payload`` travels once, by Ray's object store; ``jobs`` is a folder below the actor's working directory.
    """

    make_trainer: Callable[[Any, str], TrainFunction]
    payload: Any = None
    jobs: str = "."
    working_dir: Path | None = None
    """Folder of the job's code, which Ray brings to the actors' working directory. None: the one that the program gave
    to Ray itself, or none."""


# ---- actors


class ServerThread:
    """An asynchronous server of an actor, in a thread with an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="hoop-server", daemon=True).start()

    def call(self, work: Coroutine[Any, Any, Found], timeout_s: float) -> Found:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def when_ended(self, work: Coroutine[Any, Any, Any]) -> None:
        """Ends this actor's process when ``work`` has ended: it has no server any more. Ray starts it again."""
        asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(lambda _: os._exit(1))


class CoordinatorActor:
    """A coordinator in a Ray actor. Started again, it finds its port and its journal in ``folder``."""

    def __init__(self, token: str, folder: str) -> None:
        port = Path(folder) / "port"
        config = CoordinatorConfig(
            host=node_address(),
            port=int(port.read_text()) if port.exists() else 0,
            journal=Path(folder) / "journal",
            detector=DetectorConfig(lease_s=LEASE_S),
            credentials=Credentials(Role.COORDINATOR, Token.parse(token)),
            command="hoop train --on ray",
        )

        async def start() -> Address:
            self._server = CoordinatorServer(config)
            return await self._server.start()

        self._thread = ServerThread()
        self._address = self._thread.call(start(), JOIN_S)
        port.write_text(str(self._address.port))
        self._thread.when_ended(self._server.coordinator.wait_failed())

    def address(self) -> str:
        return str(self._address)

    def pid(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        self._thread.call(self._server.stop(), STOP_S)


class DeviceActor:
    """A device in a Ray actor. It joins in its constructor, which Ray calls again when it starts the actor again."""

    def __init__(
        self,
        token: str,
        coordinator: str,
        memory: int | None,
        make_trainer: Callable[[Any, str], TrainFunction],
        payload: list[Any],
        jobs: str,
        devices: int,
    ) -> None:
        """``memory``: bytes of its arena; None: it grows with what the job needs, up to the share of one of ``devices``
        of this node. ``payload``: a reference in a list, so that Ray does not resolve it: it complains about large
        arguments.
        """
        config = DeviceConfig(
            coordinator=Address.parse(coordinator),
            memory=memory or largest_arena(devices, TRAINING),
            grows=memory is None,
            host=node_address(),
            join_timeout_s=JOIN_S,
            credentials=Credentials(Role.DEVICE, Token.parse(token)),
        )
        trainer = make_trainer(import_ray().get(payload[0]), jobs)

        async def start() -> int:
            self._server = DeviceServer(config, trainer)
            return (await self._server.start()).device_id

        self._thread = ServerThread()
        self._device_id = self._thread.call(start(), JOIN_S + STOP_S)
        self._thread.when_ended(self._server.wait_failed())

    def device(self) -> dict[str, Any]:
        """Number of the device, and where it is."""
        return {"device": self._device_id, "pid": os.getpid(), "host": socket.gethostname()}

    def stop(self) -> None:
        self._thread.call(self._server.stop(), STOP_S)


def node_address() -> str:
    """The address of this Ray node, at which the others reach it."""
    return str(import_ray().util.get_node_ip_address())


# ---- the driver's side


def import_ray() -> Any:
    """The package ``ray``; raises FailedPrecondition if it is not installed."""
    try:
        import ray
        import ray.util.client
        import ray.util.placement_group
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise FailedPrecondition(f"ray: this Python has no Ray ({error}); install it with: {INSTALL}") from None
    return ray


def connect_ray(where: Ray, working_dir: Path | None) -> bool:
    """Connects this process to Ray; returns False if it was connected before.

    ``working_dir``: a folder that Ray brings to every actor.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    environment = dict(where.runtime_env)
    if working_dir is not None:
        environment.setdefault("working_dir", str(working_dir))
    there = where.address or os.environ.get("RAY_ADDRESS") or "this machine"
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=where.address,
            runtime_env=environment or None,
            logging_level=logging.WARNING,
            log_to_driver=False,
        )
    except (ConnectionError, RuntimeError) as error:
        raise PeerLost(
            f"ray: no cluster answers at {there}: {error}; check --ray-address, or run: ray status"
        ) from None
    except ValueError as error:
        raise InvalidArgument(f"ray: {there}, or runtime_env: {error}") from None
    finally:
        if threading.current_thread() is threading.main_thread():  # Ray has replaced what a command does on SIGTERM
            signal.signal(signal.SIGTERM, on_sigterm or signal.SIG_DFL)
    return True


class RayCluster:
    """The actors of one job. Leaving its context ends them, and disconnects from Ray if this object connected."""

    def __init__(self, where: Ray, memory: int | None, code: DeviceCode) -> None:
        self.where = where
        self._memory, self._code = memory, code
        self._token = new_token()
        self._ray = import_ray()
        self._groups: list[Any] = []
        self._devices: list[Any] = []
        self._starting: dict[Any, int] = {}
        """Calls that are answered when a device's constructor is done, each with the device's number."""
        self._coordinator: Any = None
        self._payload: Any = None
        """Reference to the actors' arguments, held as long as an actor may be started again: else Ray deletes the
        object."""
        self._folder = ""
        self._connected = False

    @property
    def credentials(self) -> Credentials:
        return Credentials(Role.CLIENT, Token.parse(self._token))

    def __enter__(self) -> RayCluster:
        self._connected = connect_ray(self.where, self._code.working_dir)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Address:
        """Starts the coordinator, and asks Ray for the devices; returns the coordinator's address."""
        self._folder = tempfile.mkdtemp(prefix="hoop-ray-")
        self._coordinator = self._start_coordinator()
        try:
            address: str = self._ray.get(self._coordinator.address.remote(), timeout=self.where.timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            raise PeerLost(
                f"ray: the coordinator's actor did not start within {self.where.timeout_s:g} s on the driver's node"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise self._start_error("the coordinator", error) from None
        self._payload = payload = self._ray.put(self._code.payload)
        # One group for the devices that must be there together; each further device has its own, which waits for room.
        self._add_devices(address, payload, self.where.least)
        for _ in range(self.where.most - self.where.least):
            self._add_devices(address, payload, 1)
        return Address.parse(address)

    def _start_coordinator(self) -> Any:
        """In a group on this program's node: the selector names the node, the resource is one that each node has."""
        context = self._ray.get_runtime_context()
        node = context.get_node_id()
        group = self._group(
            [{f"node:{node_address()}": 0.001}], "PACK", bundle_label_selector=[{"ray.io/node-id": node}]
        )
        options = self._options(group, 0, num_cpus=0)
        return self._ray.remote(CoordinatorActor).options(**options).remote(self._token, self._folder)

    def _add_devices(self, address: str, payload: Any, count: int) -> None:
        group = self._group([self.where.bundle] * count, self.where.placement.upper())
        actor, code = self._ray.remote(DeviceActor), self._code
        for index in range(count):
            options = self._options(group, index, num_cpus=self.where.cpus, num_gpus=self.where.gpus)
            device = actor.options(**options).remote(
                self._token, address, self._memory, code.make_trainer, [payload], code.jobs, self.where.most
            )
            self._devices.append(device)
            self._starting[device.device.remote()] = len(self._devices)

    def _group(self, bundles: list[dict[str, float]], strategy: str, **options: Any) -> Any:
        group = self._ray.util.placement_group(bundles, strategy=strategy, **options)
        self._groups.append(group)
        return group

    def _options(self, group: Any, bundle: int, **resources: float) -> dict[str, Any]:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, bundle)
        options = {"max_restarts": -1, "scheduling_strategy": strategy, **resources}
        if self.where.runtime_env and not self._connected:  # else Ray applies that of the connection
            options["runtime_env"] = dict(self.where.runtime_env)
        return options

    def check(self) -> None:
        """Raises if a device's actor could not start: the code of the job, or Hoop, is not on its node, for example."""
        if not self._starting:
            return
        done, _ = self._ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)
        for call in done:
            number = self._starting.pop(call)
            try:
                self._ray.get(call)
            except self._ray.exceptions.ActorUnavailableError:  # its node was lost; Ray starts it again
                continue
            except self._ray.exceptions.RayError as error:
                raise self._start_error(f"device {number} of {self.where.most}", error) from None

    def shortage(self) -> str:
        """What Ray's cluster has, and what the devices that did not start need."""
        needed = " and ".join(f"{value:g} {name}" for name, value in self.where.bundle.items())
        free, whole = self._ray.available_resources(), self._ray.cluster_resources()
        there = ", ".join(f"{free.get(name, 0):g} of {whole.get(name, 0):g} {name}" for name in self.where.bundle)
        return f"a device needs {needed}; free in Ray's cluster: {there}"

    def _start_error(self, what: str, error: Exception) -> FailedPrecondition:
        return FailedPrecondition(
            f"ray: {what} could not start: {error}; every node needs Hoop and what the job imports, in its image or by "
            "runtime_env={'pip': [...]}"
        )

    def close(self) -> None:
        """Ends all actors: they leave, and are killed if they do not."""
        ray = self._ray
        if ray.is_initialized():
            with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
                pending = (
                    set(ray.wait(list(self._starting), num_returns=len(self._starting), timeout=0)[1])
                    if self._starting
                    else set()
                )
                waiting = {number for call, number in self._starting.items() if call in pending}
                there = [one for number, one in enumerate(self._devices, start=1) if number not in waiting]
                if leaving := [one.stop.remote() for one in there]:
                    ray.wait(leaving, num_returns=len(leaving), timeout=STOP_S)
            actors = [*self._devices, *([self._coordinator] if self._coordinator is not None else [])]
            for actor in actors:
                with contextlib.suppress(ray.exceptions.RayError, ConnectionError, ValueError):
                    ray.kill(actor, no_restart=True)
            for group in self._groups:
                with contextlib.suppress(ray.exceptions.RayError, ConnectionError, ValueError):
                    ray.util.remove_placement_group(group)
            if self._connected:
                ray.shutdown()
        self._devices, self._groups, self._coordinator, self._payload, self._connected = [], [], None, None, False
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
