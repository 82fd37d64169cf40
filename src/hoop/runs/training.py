"""A job that this process starts and follows: on devices of this machine, on a cluster that is up, or on Ray.

Training ──▶ ForkedCluster (devices of this machine), a cluster that is up, or a cluster of Ray actors (on_ray)
   └─ JobFollower: events, files, result; for devices of this machine in the head process, by ``Training.lead``

``hoop.train`` (``api.py``) and ``hoop train`` make a ``Launch`` and run it.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hoop import job_events as ev
from hoop.client.cluster import Cluster, connect
from hoop.engine.entrypoint import train_rank
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument, PeerLost, TrainingStateLost, exit_code
from hoop.files import make_folder
from hoop.job_events import Observed
from hoop.plan.faults import DISK_FULL
from hoop.resources import LEAST_GROWING, Request, admit, largest_arena
from hoop.runs.device_count import check_range, default_device_count, local_processes, wait_for_devices
from hoop.schedulers.base import Placement
from hoop.topology import Address, Addresses, PortRange

if TYPE_CHECKING:
    from hoop.engine.settings import Settings
    from hoop.launch.forked import ForkedConfig, HeadPipes, StartHead
    from hoop.launch.ray_cluster import Ray
    from hoop.runs.by_value import Encoded
    from hoop.runs.job_follower import JobFollower
    from hoop.simulate.cost_model import Costs
    from hoop.wire.auth import Credentials


def choose_devices(cluster: Cluster, count: int | None, least: int = 1) -> list[int]:
    """Ids of ``count`` alive devices of a cluster, or of all, ``least`` or more; FailedPrecondition if there are fewer.

    Devices to which others cannot connect do not count. A job with a range of devices begins with the least number:
    the coordinator invites the others.
    """
    alive = [one for one in cluster.status().devices if one.state == "alive"]
    usable = sorted(one.device.device_id for one in alive if not one.left_out)
    if (count or least) > len(usable):
        left_out = [
            f"; device {one.device.device_id} does not count: {one.unreachable}" for one in alive if one.left_out
        ]
        raise FailedPrecondition(
            f"devices: {count or f'at least {least}'} asked for, {len(usable)} are alive at {cluster.address}; "
            f"start more with: hoop device --join {cluster.address}{''.join(left_out)}"
        )
    return usable[: count or len(usable)]


MAX_RESTARTS = 3
"""Number of times that devices of this machine are started again, if the user states none."""
JOIN_S = 60.0
"""Seconds that the devices of this machine have to join."""
LOAD_S = 600.0
"""The same where each of them executes the user's code first."""
OnStop = Callable[[Callable[[], None]], None]
"""Function that registers the function that asks the job to stop."""


@dataclass(frozen=True)
class Launch:
    """Where and with what a job runs."""

    settings: Settings
    devices: int | None = None
    """Number of devices with which the job begins; None: all of the cluster, or on this machine
    ``default_device_count``. ``settings.max_devices``: up to how many it takes (``--devices 4:16``)."""
    memory: int | None = None
    """Size of each device's arena in bytes; None: it grows with what the job needs, up to the device's share of this
    machine."""
    out: Path | None = None
    """Folder for the run's files; None: no files."""
    resume: Path | None = None
    """Checkpoint to resume from."""
    warnings: tuple[str, ...] = ()
    """Warnings that are reported before the first event."""
    coordinator: Address | Addresses | None = None
    """Address of the cluster to run on; None: processes of this machine, for this job alone."""
    address_file: Path | None = None
    """File that holds the coordinator's address while the job runs."""
    credentials: Credentials | None = None
    """Credentials for the cluster at ``coordinator``, or of the coordinator of rank 0; None: those of the
    environment."""
    costs: Costs | None = None
    """Costs from which a step is predicted; None: those measured before the first step."""
    placement: Placement | None = None
    """This process's rank, if a scheduler started it and the others of the run. It is rank 0."""
    meet_timeout_s: float = 300.0
    """Seconds that rank 0 waits for the other ranks, and that a range of devices is waited for until its first number
    is there."""
    device_host: str = ""
    """Only with a placement: the address that this rank's device listens on; empty: all addresses, or loopback."""
    device_ports: PortRange = field(default_factory=PortRange)
    """Only with a placement: the ports that this rank's device may listen on."""
    ray: Ray | None = None
    """Ray's cluster, if the devices are actors there."""
    device_reason: str = ""
    """Reason why the job begins with this number of devices, if Hoop chose it."""
    job: Encoded | None = None
    """The job, if it is made of the program's objects: it travels by value. None: it is found by its name."""
    max_restarts: int | None = None
    """Number of times that devices of this machine are started again if all were lost, each time from a newer
    checkpoint. None: ``MAX_RESTARTS``. Devices that this process does not start have none: see ``check_restarts``."""


def check_restarts(max_restarts: int | None, starter: Address | Addresses | Placement | Ray | None) -> None:
    """Raises InvalidArgument if a number of restarts is given that is wrong, or that has no effect.

    ``starter``: the cluster that is up, the scheduler's placement or the Ray cluster of the devices; None: this process
    starts them.
    """
    if max_restarts is None:
        return
    if not isinstance(max_restarts, int) or max_restarts < 0:
        raise InvalidArgument(f"max_restarts: {max_restarts!r:.80} is not a whole number of at least 0")
    match starter:
        case None:
            return
        case Address() | Addresses():
            what = f"the devices are those of the cluster at {starter}; leave it out: what started them restarts them"
        case Placement():
            what = (
                f"{starter.scheduler} has started the {starter.world_size} processes of this run, each of which is a "
                "device; leave it out: it can run the command again, with --out and --auto-resume"
            )
        case _:
            what = "the devices are actors of a Ray cluster; leave it out: Ray restarts them"
    raise InvalidArgument(f"max_restarts (--max-restarts): {max_restarts} has no effect here, because {what}")


class HeadStarter(Protocol):
    """A process from which the head of a cluster can be forked (``runs/clean_process.py``)."""

    def start_head(self, training: Training, processes: int, pipes: HeadPipes, others: set[int]) -> Callable[[], None]:
        """Starts a head that calls ``training.lead``: see ``StartHead``."""


class Training:
    """A job that this process starts and follows."""

    def __init__(self, launch: Launch, save: Path | None = None, clean: HeadStarter | None = None) -> None:
        """``save``: file for the trained weights. ``clean``: where the processes of this machine are forked.

        Without ``clean`` they are forked from this process: of a command that has not run a user's code, or has
        checked what it did.
        """
        for fault in launch.settings.parsed_faults:
            if fault.kind == DISK_FULL and launch.out is None:
                raise InvalidArgument(f"fault {fault}: no file of this run is written; name a folder with out (--out)")
        check_restarts(launch.max_restarts, launch.coordinator or launch.placement or launch.ray)
        if launch.max_restarts and launch.out is None:
            raise InvalidArgument(
                f"max_restarts (--max-restarts): {launch.max_restarts} has no effect without checkpoints, from which "
                "devices start again; name a folder with out (--out)"
            )
        if launch.devices is None and launch.coordinator is None and launch.ray is None:
            launch = replace(launch, devices=default_device_count(launch.settings).devices)
        if warning := check_range(launch.devices, launch.settings):
            launch = replace(launch, warnings=(*launch.warnings, warning))
        if launch.out is not None:
            make_folder(launch.out, "out (--out)")
        self.launch = launch
        self.save = save
        self._clean = clean
        self._stop_requested = False
        self._stop: Callable[[], None] = lambda: None
        self._head_stopping = threading.Event()
        """Set in the head process when a stop was requested."""

    def events(self) -> Iterator[Observed]:
        """Runs the job; the last event is ``Finished``. Closing the iterator ends the job."""
        yield from (Observed(ev.Warned(text)) for text in self.launch.warnings)
        if self.launch.ray is not None:
            yield from self._run_on_ray(self.launch.ray)
            return
        coordinator = self.launch.coordinator
        yield from self._run_locally() if coordinator is None else self._run_on(coordinator)

    def stop(self) -> None:
        """Asks the job to stop after a step; events go on to the result. A signal handler may call it."""
        self._stop_requested = True
        self._stop()

    def _run_locally(self) -> Iterator[Observed]:
        """Runs the job on devices of this machine, and starts them again if all were lost."""
        from hoop.runs.checkpoint_store import step_of

        given = self.launch.max_restarts
        for restarts_left in range(MAX_RESTARTS if given is None else given, -1, -1):
            try:
                yield from self._run_forked()
                return
            except PeerLost as error:
                checkpoint = self._newer_checkpoint()
                if checkpoint is None or not restarts_left:
                    raise self._with_remedy(error) from None
                step = step_of(checkpoint)
                yield Observed(ev.Warned(f"{error}. The devices start again from the checkpoint of step {step}"))
                settings = self.launch.settings.replaced({"faults": ""})  # placed faults have happened
                self.launch = replace(self.launch, resume=checkpoint, settings=settings)

    def _newer_checkpoint(self) -> Path | None:
        """The newest checkpoint of this run, if it is newer than the one that it began with."""
        from hoop.runs.checkpoint_store import newest_checkpoint, step_of

        launch = self.launch
        if launch.out is None or launch.placement is not None or self._stop_requested:
            return None
        try:
            found = newest_checkpoint(launch.out).path
        except FailedPrecondition:
            return None
        return found if launch.resume is None or step_of(found) > step_of(launch.resume) else None

    def _with_remedy(self, error: PeerLost) -> PeerLost:
        """The error, and how to go on, where this run has a checkpoint."""
        from hoop.runs.checkpoint_store import listed

        out = self.launch.out
        if out is None or isinstance(error, TrainingStateLost) or not listed(out):
            return error
        return type(error)(f"{error}; go on from the newest checkpoint: hoop train --resume --out {out}")

    def _run_forked(self) -> Iterator[Observed]:
        from hoop.launch.forked import ForkedCluster, fork_head
        from hoop.launch.mps import shared_gpus
        from hoop.runs.job_lookup import preload

        launch = self.launch
        devices = launch.devices
        assert devices is not None, "set by __init__"
        if devices < 1:
            raise InvalidArgument(f"devices: {devices} is not at least 1")
        processes, warning = devices, ""
        if launch.placement is None:
            processes, warning = local_processes(devices, launch.settings.max_devices, launch.memory or LEAST_GROWING)
        if warning:
            yield Observed(ev.Warned(warning))
        admit(Request(1 if launch.placement is not None else processes, launch.memory or LEAST_GROWING))
        start: StartHead
        if self._clean is None:
            preload()
            start = partial(fork_head, partial(self.lead, processes))
        else:
            start = partial(self._clean.start_head, self, processes)
        with shared_gpus(processes if launch.settings.may_use_cuda else 0) as warning:
            if warning:
                yield Observed(ev.Warned(warning))
            forked = ForkedCluster(start)
            try:
                self._on_stop(forked.stop)
                yield from map(Observed.from_fields, forked.events())
            finally:
                forked.close()
                if launch.address_file is not None:  # a head process that was killed could not remove it
                    launch.address_file.unlink(missing_ok=True)

    def _arena_bytes(self, processes: int) -> int:
        """Size of a device's arena, or the most to which it grows."""
        placement = self.launch.placement
        return self.launch.memory or largest_arena(processes if placement is None else placement.local_world_size)

    # ---- the head process

    def lead(
        self,
        processes: int,
        pipes: HeadPipes,
        load: Callable[[], None] = lambda: None,
        load_on_device: Callable[[], None] | None = None,
    ) -> None:
        """The work of the head process: forks the coordinator and ``processes`` devices, and follows the job.

        ``load`` is called before the devices are forked; ``load_on_device`` in each of them.
        """
        from hoop.launch.forked import run_head

        credentials: Credentials | None = None

        def prepare() -> ForkedConfig:
            nonlocal credentials
            load()
            config = self._forked_config(processes, load_on_device)
            credentials = config.client_credentials
            return config

        def head(address: Address, send: Callable[[dict[str, Any]], None], on_stop: OnStop) -> None:
            assert credentials is not None, "prepare was called"
            self._follow_in_head(address, send, on_stop, credentials)

        run_head(prepare, head, pipes)

    def _follow_in_head(
        self, address: Address, send: Callable[[dict[str, Any]], None], on_stop: OnStop, credentials: Credentials
    ) -> None:
        """Follows the job; ``send`` writes to the program."""
        launch = self.launch
        code: int | None = 1

        def on_stop_request(stop: Callable[[], None]) -> None:
            def request_stop() -> None:
                self._head_stopping.set()
                stop()

            on_stop(request_stop)
            if self._head_stopping.is_set():  # while the ranks met
                with contextlib.suppress(HoopError):
                    stop()

        try:
            for observed in self._follow(address, launch.devices, on_stop_request, credentials):
                if isinstance(observed.event, ev.Finished):
                    code = self._rank_exit_code(observed.event.result)
                send(observed.to_fields())
        except HoopError as error:
            code = exit_code(error)
            raise
        except BrokenPipeError:  # this rank's own process was killed: each other rank notices that and says so
            code = None
            raise
        finally:
            if launch.placement is not None and code is not None:
                self._dismiss(address, credentials, launch.placement, code)

    def _forked_config(self, devices: int, load_on_device: Callable[[], None] | None) -> ForkedConfig:
        from hoop.engine.custom.feed import fork_loaders
        from hoop.engine.user_code import attribute_exceptions
        from hoop.launch.forked import ForkedConfig, meeting_coordinator
        from hoop.wire.auth import find_credentials
        from hoop.wire.roles import Role

        launch, placement = self.launch, self.launch.placement
        memory, grows = self._arena_bytes(devices), launch.memory is None

        def prepare() -> None:
            with attribute_exceptions("loading the job on a device"):
                if load_on_device is not None:
                    load_on_device()
                fork_loaders(launch.settings.job)

        if placement is None:
            awaited = devices if launch.devices is None else launch.devices
            timeout = JOIN_S if load_on_device is None else LOAD_S
            return ForkedConfig(devices, memory, train_rank, awaited, timeout, grows=grows, prepare=prepare)
        assert placement.meeting_point is not None, "checked by find_placement"
        credentials = launch.credentials or find_credentials(Role.COORDINATOR)
        coordinator = meeting_coordinator(placement.meeting_point, credentials)
        return ForkedConfig(
            1,
            memory,
            train_rank,
            awaited=1,
            coordinator=coordinator,
            join=placement.meeting_point,
            host=launch.device_host,
            ports=launch.device_ports,
            grows=grows,
            prepare=prepare,
        )

    def _rank_exit_code(self, result: dict[str, Any]) -> int:
        """The exit code of the other ranks of a run with this result: the same as that of ``hoop train`` in rank 0."""
        if result["stopped"] and self._head_stopping.is_set():
            return 128 + signal.SIGTERM
        return 2 if self.launch.out is not None and (result["checkpoint"] is None or result["lost_files"]) else 0

    def _dismiss(self, address: Address, credentials: Credentials, placement: Placement, code: int) -> None:
        from hoop.runs.meeting import dismiss_ranks

        with contextlib.suppress(HoopError), connect(address, credentials=credentials) as cluster:
            dismiss_ranks(cluster, placement.device_id, code)

    def _run_on_ray(self, where: Ray) -> Iterator[Observed]:
        from hoop.launch.ray_cluster import RayCluster
        from hoop.runs.on_ray import device_code, waiting_for_devices

        launch = self.launch
        code = device_code(launch.settings.job, launch.job)
        if where.is_client:
            raise FailedPrecondition(
                "ray: through ray:// this program cannot reach the coordinator and the devices; run it on a node of "
                "the cluster, for example with: ray job submit --working-dir . -- hoop train …"
            )
        with RayCluster(where, launch.memory, code) as ray:
            address = ray.start()
            for text in waiting_for_devices(ray, address, lambda: self._stop_requested):
                yield Observed(ev.Warned(text))
            self.launch = replace(launch, devices=None, coordinator=address, credentials=ray.credentials, ray=None)
            yield from self._run_on(address)

    def _run_on(self, address: Address | Addresses) -> Iterator[Observed]:
        def on_stop(stop: Callable[[], None]) -> None:
            def request_stop() -> None:
                with contextlib.suppress(HoopError):  # the job has ended, or its events say why it failed
                    stop()

            # Not in the signal handler: it may have interrupted another call.
            self._on_stop(lambda: threading.Thread(target=request_stop, daemon=True).start())

        return self._follow(address, self.launch.devices, on_stop, self.launch.credentials)

    def _on_stop(self, stop: Callable[[], None]) -> None:
        """``stop`` may be called from now on; it is called at once if a stop was requested before."""
        self._stop = stop
        if self._stop_requested:
            stop()

    def _follow(
        self, address: Address | Addresses, devices: int | None, on_stop: OnStop, credentials: Credentials | None
    ) -> Iterator[Observed]:
        from hoop.runs.job_follower import COORDINATOR_TIMEOUT_S
        from hoop.servers.grpc_server import write_address_file

        launch = self.launch
        with connect(address, credentials=credentials) as cluster:
            if launch.placement is not None:
                self._meet(cluster, launch.placement, devices, on_stop)
                address = launch.placement.meeting_point or address
            elif launch.coordinator is not None and launch.settings.max_devices and devices:
                yield from wait_for_devices(cluster, devices, launch.meet_timeout_s, lambda: self._stop_requested)
            if launch.address_file is not None:
                write_address_file(launch.address_file, address)
            try:
                timeout = 0.0 if launch.coordinator is None else COORDINATOR_TIMEOUT_S
                follower, chosen = self._start_job(cluster, devices, timeout)
                if devices is not None and len(chosen) < devices:
                    yield Observed(
                        ev.Warned(
                            f"{devices} devices were started, and {devices - len(chosen)} ended before the job began: "
                            f"it begins with {len(chosen)}"
                        )
                    )
                on_stop(partial(follower.job.stop, timeout))
                for observed in follower.events():
                    if isinstance(observed.event, ev.Finished) and self.save is not None:
                        follower.save(self.save)
                    yield observed
            finally:
                if launch.address_file is not None:
                    launch.address_file.unlink(missing_ok=True)

    def _start_job(self, cluster: Cluster, devices: int | None, timeout: float) -> tuple[JobFollower, list[int]]:
        """Starts the job; returns its follower and the devices that it begins with.

        Those that this run has started are all there is: the job begins without one that has ended since, as it would
        go on without one that is lost later.
        """
        from hoop.runs.job_follower import JobFollower

        launch = self.launch
        least, own = launch.settings.min_devices, launch.coordinator is None
        while True:
            wanted = None if own and devices is not None else devices
            chosen = choose_devices(cluster, wanted, least)[:devices]
            try:
                follower = JobFollower.start(
                    cluster,
                    launch.settings,
                    chosen,
                    launch.out,
                    launch.resume,
                    coordinator_timeout=timeout,
                    costs=launch.costs,
                )
                return follower, chosen
            except HoopError:
                alive = {member.device.device_id for member in cluster.status().devices if member.state == "alive"}
                if not own or alive.issuperset(chosen):
                    raise

    def _meet(self, cluster: Cluster, placement: Placement, count: int | None, on_stop: OnStop) -> None:
        """Waits for the other ranks, until a stop is requested."""
        from hoop.runs.meeting import wait_for_ranks

        on_stop(lambda: None)
        wait_for_ranks(cluster, placement, self.launch.meet_timeout_s, self._head_stopping.is_set, count)
