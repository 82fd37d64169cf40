"""``hoop.train``: a model, data and some devices in, a result out.

train ──▶ Training ──▶ ForkedCluster (devices of this machine) or a cluster that is up
            │           or a cluster of Ray actors (on_ray)
            └─ JobFollower: events, files, result
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hoop import job_events as ev
from hoop import torch_versions
from hoop.client.cluster import Cluster, connect
from hoop.config import parse_size
from hoop.engine.entrypoint import train_rank
from hoop.engine.user_code import blaming_user_code
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument, exit_code
from hoop.files import make_folder
from hoop.job_events import Observed
from hoop.membership.replication import check_replicas
from hoop.plan.faults import DISK_FULL
from hoop.runs.callbacks import Callback, CallbackCaller, RunControl, check_callbacks
from hoop.runs.elastic import check_range, local_processes, wait_for_devices
from hoop.runs.result import Result
from hoop.topology import Addresses, DeviceRange, PortRange

if TYPE_CHECKING:
    from torch import nn

    from hoop.engine.job import Job
    from hoop.engine.settings import Settings
    from hoop.launch.forked import ForkedConfig
    from hoop.launch.ray_cluster import Ray
    from hoop.schedulers.base import Placement
    from hoop.simulate.cost_model import Costs
    from hoop.topology import Address
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


DEFAULT_DEVICES = 4
DEFAULT_MEMORY = 256 * 1024 * 1024
OnStop = Callable[[Callable[[], None]], None]
"""Registers the function that asks the job to stop."""


class StrategyLike(Protocol):
    """A strategy object: ``hoop.DataParallel()``, ``hoop.Pipeline()`` …"""

    @property
    def spec(self) -> str:
        """The strategy as text, for example ``pipeline:1f1b``."""


@dataclass(frozen=True)
class Launch:
    """Where and with what a job runs."""

    settings: Settings
    devices: int | None = None
    """How many it begins with. ``settings.max_devices``: up to how many it takes (``--devices 4:16``)."""
    memory: int = DEFAULT_MEMORY
    """Bytes of the arena of each device."""
    out: Path | None = None
    """Folder for the run's files; None: no files."""
    resume: Path | None = None
    """Checkpoint to resume from."""
    warnings: tuple[str, ...] = ()
    """Reported before the first event."""
    coordinator: Address | Addresses | None = None
    """Cluster to run on; None: processes of this machine, for this job alone."""
    address_file: Path | None = None
    """File that holds the coordinator's address while the job runs."""
    credentials: Credentials | None = None
    """For the cluster at ``coordinator``, or of the coordinator of rank 0; None: those of the environment."""
    costs: Costs | None = None
    """Costs to predict a step from; None: those measured before the first step."""
    placement: Placement | None = None
    """Of this process, if a scheduler started it and the others of the run. It is rank 0."""
    meet_timeout_s: float = 300.0
    """How long rank 0 waits for the other ranks, and a range of devices for the first of them."""
    device_host: str = ""
    """With a placement: the address that this rank's device listens on; empty: all addresses, or loopback."""
    device_ports: PortRange = field(default_factory=PortRange)
    """With a placement: the ports that this rank's device may listen on."""
    ray: Ray | None = None
    """Ray's cluster, if the devices are actors there."""
    job: Job | None = None
    """A job made of live objects, which Ray brings to the devices."""


class Training:
    """A job that this process starts and follows."""

    def __init__(self, launch: Launch, save: Path | None = None) -> None:
        """``save``: file for the trained weights."""
        for fault in launch.settings.parsed_faults:
            if fault.kind == DISK_FULL and launch.out is None:
                raise InvalidArgument(f"fault {fault}: no file of this run is written; name a folder with out (--out)")
        here = launch.coordinator is None
        if warning := check_range(launch.devices or (DEFAULT_DEVICES if here else None), launch.settings):
            launch = replace(launch, warnings=(*launch.warnings, warning))
        if launch.out is not None:
            make_folder(launch.out, "out (--out)")
        self._launch = launch
        self._save = save
        self._stop_requested = False
        self._stop: Callable[[], None] = lambda: None
        self._head_stopping = threading.Event()
        """In the head process: a stop was requested."""

    def events(self) -> Iterator[Observed]:
        """Runs the job; the last event is ``Finished``. Closing the iterator ends the job."""
        yield from (Observed(ev.Warned(text)) for text in self._launch.warnings)
        if self._launch.ray is not None:
            yield from self._run_on_ray(self._launch.ray)
            return
        coordinator = self._launch.coordinator
        yield from self._run_locally() if coordinator is None else self._run_on(coordinator)

    def stop(self) -> None:
        """Asks the job to stop after a step; events go on to the result. A signal handler may call it."""
        self._stop_requested = True
        self._stop()

    def _run_locally(self) -> Iterator[Observed]:
        from hoop.launch.forked import ForkedCluster
        from hoop.launch.mps import shared_gpus
        from hoop.runs.job_lookup import preload

        launch = self._launch
        devices = DEFAULT_DEVICES if launch.devices is None else launch.devices
        if devices < 1:
            raise InvalidArgument(f"devices: {devices} is not at least 1")

        def head(address: Address, send: Callable[[dict[str, Any]], None], on_stop: OnStop) -> None:
            """Runs in the head process; ``send`` writes to this process."""
            code = 1

            def on_stop_request(stop: Callable[[], None]) -> None:
                def request_stop() -> None:
                    self._head_stopping.set()
                    stop()

                on_stop(request_stop)
                if self._head_stopping.is_set():  # while the ranks met
                    with contextlib.suppress(HoopError):
                        stop()

            try:
                for observed in self._follow(address, devices, on_stop_request, config.client_credentials):
                    if isinstance(observed.event, ev.Finished):
                        code = self._rank_exit_code(observed.event.result)
                    send(observed.to_fields())
            except HoopError as error:
                code = exit_code(error)
                raise
            finally:
                if launch.placement is not None:
                    self._dismiss(address, config.client_credentials, launch.placement, code)

        preload()
        if Cluster.opened:
            raise FailedPrecondition(
                "this process has been connected to a cluster, and devices cannot be forked from it any more; "
                "train first, or in another process, or on the cluster: hoop train --coordinator HOST:PORT"
            )
        processes, warning = devices, ""
        if launch.placement is None:
            processes, warning = local_processes(devices, launch.settings.max_devices, launch.memory)
        if warning:
            yield Observed(ev.Warned(warning))
        config = self._forked_config(processes)
        with shared_gpus(processes if launch.settings.may_use_cuda else 0) as warning:
            if warning:
                yield Observed(ev.Warned(warning))
            forked = ForkedCluster(config, head)
            try:
                self._on_stop(forked.stop)
                yield from map(Observed.from_fields, forked.events())
            finally:
                forked.close()
                if launch.address_file is not None:  # a head process that was killed could not remove it
                    launch.address_file.unlink(missing_ok=True)

    def _forked_config(self, devices: int) -> ForkedConfig:
        from hoop.engine.custom.feed import fork_loaders
        from hoop.launch.forked import ForkedConfig, meeting_coordinator
        from hoop.wire.auth import find_credentials
        from hoop.wire.roles import Role

        launch, placement = self._launch, self._launch.placement
        prepare = partial(fork_loaders, launch.settings.job)
        if placement is None:
            return ForkedConfig(devices, launch.memory, train_rank, prepare=prepare)
        assert placement.meeting_point is not None, "checked by find_placement"
        credentials = launch.credentials or find_credentials(Role.COORDINATOR)
        coordinator = meeting_coordinator(placement.meeting_point, credentials)
        return ForkedConfig(
            1,
            launch.memory,
            train_rank,
            coordinator,
            join=placement.meeting_point,
            host=launch.device_host,
            ports=launch.device_ports,
            prepare=prepare,
        )

    def _rank_exit_code(self, result: dict[str, Any]) -> int:
        """The exit code of the other ranks of a run with this result: the same as that of ``hoop train`` in rank 0."""
        if result["stopped"] and self._head_stopping.is_set():
            return 128 + signal.SIGTERM
        return 2 if self._launch.out is not None and result["checkpoint"] is None else 0

    def _dismiss(self, address: Address, credentials: Credentials, placement: Placement, code: int) -> None:
        from hoop.runs.meeting import dismiss_ranks

        with contextlib.suppress(HoopError), connect(address, credentials=credentials) as cluster:
            dismiss_ranks(cluster, placement.device_id, code)

    def _run_on_ray(self, where: Ray) -> Iterator[Observed]:
        from hoop.launch.ray_cluster import RayCluster
        from hoop.runs.on_ray import device_code, waiting_for_devices

        launch = self._launch
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
            self._launch = replace(launch, devices=None, coordinator=address, credentials=ray.credentials, ray=None)
            yield from self._run_on(address)

    def _run_on(self, address: Address | Addresses) -> Iterator[Observed]:
        def on_stop(stop: Callable[[], None]) -> None:
            def request_stop() -> None:
                with contextlib.suppress(HoopError):  # the job has ended, or its events say why it failed
                    stop()

            # Not in the signal handler: it may have interrupted another call.
            self._on_stop(lambda: threading.Thread(target=request_stop, daemon=True).start())

        return self._follow(address, self._launch.devices, on_stop, self._launch.credentials)

    def _on_stop(self, stop: Callable[[], None]) -> None:
        """``stop`` may be called from now on; it is called at once if a stop was requested before."""
        self._stop = stop
        if self._stop_requested:
            stop()

    def _follow(
        self, address: Address | Addresses, devices: int | None, on_stop: OnStop, credentials: Credentials | None
    ) -> Iterator[Observed]:
        from hoop.runs.job_follower import COORDINATOR_TIMEOUT_S, JobFollower
        from hoop.servers.grpc_server import write_address_file

        launch = self._launch
        with connect(address, credentials=credentials) as cluster:
            if launch.placement is not None:
                self._meet(cluster, launch.placement, devices, on_stop)
                address = launch.placement.meeting_point or address
            elif launch.coordinator is None and devices:
                cluster.wait_for_devices(devices)
            elif launch.settings.max_devices and devices:
                yield from wait_for_devices(cluster, devices, launch.meet_timeout_s, lambda: self._stop_requested)
            if launch.address_file is not None:
                write_address_file(launch.address_file, address)
            try:
                timeout = 0.0 if launch.coordinator is None else COORDINATOR_TIMEOUT_S
                follower = JobFollower(
                    cluster,
                    launch.settings,
                    choose_devices(cluster, devices, launch.settings.min_devices),
                    launch.out,
                    launch.resume,
                    coordinator_timeout=timeout,
                    costs=launch.costs,
                )
                on_stop(partial(follower.job.stop, timeout))
                for observed in follower.events():
                    if isinstance(observed.event, ev.Finished) and self._save is not None:
                        follower.save(self._save)
                    yield observed
            finally:
                if launch.address_file is not None:
                    launch.address_file.unlink(missing_ok=True)

    def _meet(self, cluster: Cluster, placement: Placement, count: int | None, on_stop: OnStop) -> None:
        """Waits for the other ranks, until a stop is requested."""
        from hoop.runs.meeting import wait_for_ranks

        on_stop(lambda: None)
        wait_for_ranks(cluster, placement, self._launch.meet_timeout_s, self._head_stopping.is_set, count)


@dataclass(frozen=True)
class _Place:
    """Where a run trains: on this machine, on a Ray cluster, or on a cluster of Hoop that is up."""

    ray: Ray | None = None
    coordinator: Addresses | None = None


def _checked_place(on: Any, devices: DeviceRange) -> _Place:
    """``on``: None, a ``hoop.Ray``, or the address of a coordinator."""
    if on is None:
        return _Place()
    if isinstance(on, str):
        return _Place(coordinator=Addresses.parse(on))
    from hoop.launch.ray_cluster import Ray

    if not isinstance(on, Ray):
        raise InvalidArgument(
            f"on: {on!r:.80} is neither the address of a coordinator, such as '10.0.0.1:4021', nor a "
            "hoop.Ray(devices=…)"
        )
    return _Place(ray=on.with_range(devices))


def _checked_strategy(strategy: Any) -> str:
    spec = strategy if isinstance(strategy, str) else getattr(strategy, "spec", None)
    if not isinstance(spec, str):
        raise InvalidArgument(
            f"strategy: {strategy!r:.80} is neither a name, such as 'pipeline:1f1b', nor a strategy, such as "
            "hoop.Pipeline()"
        )
    return spec


def _checked_folder(out: Any) -> Path | None:
    try:
        return None if out is None else Path(out)
    except TypeError:
        raise InvalidArgument(f"out: {out!r:.80} is not the path of a folder") from None


OPTIMIZER_FIELDS = ("lr", "momentum", "nesterov", "beta1", "beta2", "eps", "weight_decay")
SCHEDULE_FIELDS = ("schedule", "warmup", "step_every", "step_factor", "final")


def _check_effective(job: Job, settings: Mapping[str, Any]) -> None:
    """Raises if a given setting has no effect, because the job makes its own optimizer or scheduler."""
    for own, made, fields in (
        ("optimizer", job.optimizer, OPTIMIZER_FIELDS),
        ("lr_scheduler", job.lr_scheduler, SCHEDULE_FIELDS),
    ):
        for name in sorted(set(fields) & set(settings)) if made is not None else ():
            raise InvalidArgument(
                f"{name}: {settings[name]!r} has no effect, because {own} is a function that has its own; state it "
                f"there, or leave out {own}"
            )


def _check_loader(stated: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raises if a given setting is another one than the ``DataLoader`` has. ``stated``: the loader's."""
    for name in sorted(set(stated) & set(settings)):
        if settings[name] != stated[name]:
            raise InvalidArgument(
                f"{name}: {settings[name]!r} is given, and the DataLoader has {stated[name]!r}; leave one of them out"
            )


def train(
    model: nn.Module | Callable[[int], nn.Module] | Job | str,
    data: Any = None,
    *,
    devices: int | str | tuple[int, int] | None = None,
    on: Ray | str | None = None,
    token: str | None = None,
    tls: str | os.PathLike[str] | None = None,
    strategy: str | StrategyLike = "data",
    memory: int | str = DEFAULT_MEMORY,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
    loss: str | Callable[..., Any] = "cross_entropy",
    reduction: str | None = None,
    optimizer: str | Callable[[Any], Any] | None = None,
    parameter_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None,
    lr_scheduler: Callable[[Any], Any] | None = None,
    scheduler_interval: Literal["step", "epoch"] = "step",
    ema: float = 0.0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    num_workers: int | None = None,
    **settings: Any,
) -> Result:
    """Trains a model on devices of this machine, or of a cluster (``on``), and returns the result.

    ``model`` is a module (it has the trained weights afterwards), a function of a seed, a ``Job``, or the name of a
    recipe or job.

    ``data`` is (inputs, targets), tensors or NumPy arrays, of which float64 becomes float32; any nesting of dicts and
    tuples of them; a map-style dataset with samples of any structure, of which ``collate_fn`` makes batches, loaded by
    ``num_workers`` processes on each device; or a ``DataLoader``, which states batch size, order, collate function and
    workers. A pair of these is training and test data. Without test data the model is measured on the training data,
    and ``result.split`` says so.

    ``loss`` is ``cross_entropy``, ``mse``, a function of (outputs, targets), such as ``nn.CrossEntropyLoss()``, or a
    function of (model, batch). It trains as it does in PyTorch on the whole batch: a mean as the mean, a sum as the
    sum, a value a sample as their mean, (sum, count) as their quotient over the batch. Hoop finds out which of them it
    is, or refuses; ``reduction``, ``mean``, ``sum`` or ``none``, states it. It may return a dict with ``loss`` and
    further metrics.

    ``optimizer`` is a name (with the settings lr, momentum, weight_decay …), or a function of the parameters, or of the
    ``parameter_groups``, that returns any ``torch.optim.Optimizer``; ``lr_scheduler`` is a function of the optimizer,
    which steps every step or epoch (``scheduler_interval``). ``ema`` averages the weights (``result.average``).

    ``devices`` is a number, 4 by default, or a range, ``"4:16"`` or ``(4, 16)``: training begins when 4 are ready, and
    takes in the others as they come. ``on="HOST:PORT"`` trains on the cluster whose coordinator is there, with
    ``token`` or ``tls`` (a folder of ``hoop certs``); its devices load the job by name, so ``model`` is one, for
    example ``"my_job.py:job"``. ``on=hoop.Ray(devices=8)`` trains on actors of a Ray cluster.

    ``out`` is a folder for metrics, checkpoints and plots; with ``resume`` the run resumes from the newest checkpoint
    there. ``callbacks`` are called while it trains (``hoop.Callback``), ``progress`` with every event as a dict.
    ``settings`` are those of ``hoop train`` (docs/training.md): epochs, batch_size, shards, patience …

    >>> result = hoop.train(model, (images, labels), devices=4, epochs=3)
    >>> result.accuracy
    """
    if untested := torch_versions.check_version(torch_versions.installed_version()):
        warnings.warn(untested, torch_versions.UntestedTorchWarning, stacklevel=2)
    from hoop.engine.custom.loss import CustomLoss
    from hoop.engine.custom.setup import check_parts
    from hoop.engine.job import INHERITED, Job, build_model, find_job
    from hoop.engine.loss_reduction import with_criterion
    from hoop.engine.recipes import RECIPES
    from hoop.engine.step_schedule import StepSchedule
    from hoop.engine.trainer import check_faults
    from hoop.runs.checkpoint_store import FOLDER, newest_checkpoint
    from hoop.runs.job_objects import JobParts, averages, job_from, load_into

    if isinstance(optimizer, str) or (optimizer is not None and not callable(optimizer)):
        settings["optimizer"], optimizer = optimizer, None
    count = DeviceRange.parse(DEFAULT_DEVICES if devices is None else devices)
    spec, folder = _checked_strategy(strategy), _checked_folder(out)
    place = _checked_place(on, count)
    count = count if place.ray is None else place.ray.range
    called = check_callbacks(callbacks)
    if progress is not None and not callable(progress):
        raise InvalidArgument(f"progress: {progress!r:.80} is not a function of an event, which is a dict")
    parts = JobParts(
        loss=loss,
        reduction=reduction,
        optimizer=optimizer,
        parameter_groups=parameter_groups,
        lr_scheduler=lr_scheduler,
        scheduler_interval=scheduler_interval,
        ema=ema,
        collate_fn=collate_fn,
        num_workers=num_workers,
    )
    if isinstance(model, str | Job):
        parts.check_only_default()
    if place.coordinator is not None and not isinstance(model, str):
        raise InvalidArgument(
            f"on: the devices at {on} are other processes, to which no object of this one can be sent; name the job, "
            "hoop.train('my_job.py:job', on=…), and put the file into the devices' folder (hoop device --jobs)"
        )
    if place.coordinator is None and (token is not None or tls is not None):
        raise InvalidArgument("token, tls: they are for the cluster of on='HOST:PORT'; leave them out")
    if isinstance(model, str):
        job, name = find_job(model, RECIPES), model
    else:
        job = model if isinstance(model, Job) else job_from(model, data, parts)
        name = f"inherited:{len(INHERITED)}"
    if not isinstance(model, str | Job):
        _check_loader(job.settings, settings)
    _check_effective(job, settings)
    limit = {"max_devices": count.most} if count.most else {}
    wanted = job.defaults(name).replaced({**settings, **limit, "strategy": spec}).check()
    check_replicas(wanted.replicas, count.first)
    loaded = job.data()  # before the fork: devices share what is loaded now
    with blaming_user_code("calling the model and the loss before the first step"):
        live = None if isinstance(model, str) else build_model(job, wanted.seed)
        job = with_criterion(job, loaded.train, wanted.seed, live)
        if live is not None and isinstance(job.loss, CustomLoss):
            check_parts(job, wanted, live, len(loaded.train))
    StepSchedule(wanted, len(loaded.train))  # raises if there is no step
    check_faults(wanted, count.first, len(loaded.train))
    if not isinstance(model, str):
        INHERITED.append(job)
    if resume and folder is None:
        raise InvalidArgument("resume: it needs out, the folder of the run to go on with")
    if folder is not None and not resume and (folder / FOLDER).is_dir():
        raise FailedPrecondition(f"out: {folder} holds a run; go on with it by resume=True, or name another")
    found = newest_checkpoint(folder) if resume and folder else None
    size = parse_size(memory, "memory")
    launch = Launch(wanted, count.first, size, folder)
    if place.ray is not None:
        launch = replace(launch, ray=place.ray, job=None if isinstance(model, str) else job)
    if place.coordinator is not None:
        from hoop.wire.auth import find_credentials
        from hoop.wire.roles import Role

        given = token is not None or tls is not None
        credentials = find_credentials(Role.CLIENT, token, tls=Path(tls) if tls else None) if given else None
        first = None if devices is None else count.first
        launch = replace(launch, coordinator=place.coordinator, credentials=credentials, devices=first)
    if found is not None:
        launch = replace(launch, resume=found.path, warnings=tuple(found.warnings))
    with tempfile.TemporaryDirectory(prefix="hoop-") as scratch:
        weights = Path(scratch) / "weights.safetensors"
        summary: dict[str, Any] = {}
        training = Training(launch, save=weights)
        caller = CallbackCaller(called, RunControl(training.stop, json.loads(wanted.to_json())))
        for observed in training.events():
            if progress is not None:
                progress(observed.to_fields())
            caller.on_observed(observed)
            if isinstance(observed.event, ev.Finished):
                summary = observed.event.result
        trained = load_into(build_model(job, wanted.seed), weights)
        return Result(summary, trained, averages(weights))
