"""A job from live objects: what somebody hands to ``hoop.train``.

Which devices of a cluster a job gets.

``hoop.train``: a model, some devices, and a result.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hoop import torch_versions
from hoop.client.cluster import Cluster
from hoop.config import parse_size
from hoop.data.dataset import Splits
from hoop.data.tensors import MapData, TensorData
from hoop.engine.fault_tolerance.checkpoint import unpacked
from hoop.engine.job import Job
from hoop.engine.stage.autograd import Loss
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument
from hoop.plan.faults import OF_FILES
from hoop.runs.result import Result
from hoop.runs.user_code import blaming_user_code
from hoop.servers.tasks import Emit, TaskContext
from hoop.topology import DeviceInfo
from hoop.wire.service import device_info

if TYPE_CHECKING:
    from torch import nn

    from hoop.engine.job import Job
    from hoop.engine.rank_context import RankContext
    from hoop.engine.settings import Settings
    from hoop.simulate.cost_model import Costs
    from hoop.topology import Address, Addresses
    from hoop.wire.auth import Credentials


def job_from(
    model: nn.Module | Callable[[int], nn.Module], data: Any, loss: str | Loss, reduction: str | None = None
) -> Job:
    """A module (or a function of a seed) and data as a job."""
    splits = splits_from(data)
    build = (lambda seed: model) if isinstance(model, nn.Module) else model
    return Job(build, lambda: splits, loss, reduction=reduction)


def splits_from(data: Any) -> Splits:
    """Two datasets, from a pair of them or of tensors; a single one is also what the model is measured on."""
    if isinstance(data, Splits):
        return data
    if isinstance(data, tuple | list) and len(data) == 2 and not isinstance(data[0], Tensor):
        return Splits(_dataset(data[0], "train"), _dataset(data[1], "test"))
    one = _dataset(data, "train")
    return Splits(one, one)


def _dataset(data: Any, name: str) -> Any:
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(one, Tensor) for one in data):
        return TensorData(*data, name=name)
    if hasattr(data, "batch") and hasattr(data, "checksum"):
        return data
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return MapData(data, name=name)
    raise InvalidArgument(
        f"data: {type(data).__name__} is neither (inputs, targets) nor a dataset; give tensors, a map-style "
        "torch Dataset, or a pair of them for training and test"
    )


def load_into(model: nn.Module, weights: Path | Mapping[str, Tensor]) -> nn.Module:
    """A model with the weights of a file; tensors that share memory, and buffers of every kind, are there once."""
    found = unpacked(weights.read_bytes(), weights)[0] if isinstance(weights, Path) else weights
    with torch.no_grad():
        for name, into in [*model.named_parameters(), *model.named_buffers()]:
            if name not in found or found[name].shape != into.shape:
                there = f"{list(found[name].shape)}" if name in found else "not there"
                raise FailedPrecondition(
                    f"checkpoint: {name} is {there}, the model's is {list(into.shape)}; was the model changed?"
                )
            into.copy_(found[name])
    return model


def members(cluster: Cluster) -> dict[int, DeviceInfo]:
    """The devices that are alive, by id."""
    alive = [one for one in cluster.status().devices if one.state == "alive"]
    return {one.device.device_id: device_info(one.device) for one in alive}


def chosen(cluster: Cluster, count: int | None) -> list[int]:
    """So many devices of a cluster, or all of them."""
    alive = sorted(members(cluster))
    if not alive or (count or 0) > len(alive):
        raise FailedPrecondition(
            f"devices: {count or 'at least 1'} asked for, {len(alive)} are alive at {cluster.address}; "
            f"start more with: hoop device --join {cluster.address}"
        )
    return alive[: count or len(alive)]


DEFAULT_DEVICES = 4
DEFAULT_MEMORY = 256 * 1024 * 1024
AWAY_S = 60.0
"""How long whoever follows a job waits for a coordinator that is away; the job goes on meanwhile."""
LOADS_LATE = "torch.fx.experimental.symbolic_shapes"
"""Autograd's first backward imports it, which takes a second in which Python may hold its breath: better before."""
EventFields = dict[str, Any]
Stoppable = Callable[[Callable[[], None]], None]


class Spelled(Protocol):
    """A strategy: ``hoop.DataParallel()`` and its siblings."""

    @property
    def spec(self) -> str:
        """As it is typed."""


def trainer(
    place: TaskContext,
    settings: str,
    emit: Emit,
    stopping: Callable[[], bool],
    resume: bytes | None,
    jobs: Path | None = None,
) -> None:
    """What a device does with a job; loads PyTorch when the first one comes, unless it was forked with it.

    ``jobs`` is where the code of jobs lies on this machine.
    """
    torch_versions.check(torch_versions.installed())
    # Before PyTorch is loaded: a device owns its cores, and no pool of threads fights for them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from hoop.engine.job import job_for_a_device
    from hoop.engine.recipes import RECIPES
    from hoop.engine.settings import Settings
    from hoop.engine.trainer import Trainer

    wanted = Settings.from_json(settings).check()
    befall = _befall(wanted, place, emit) if wanted.faults else None
    world = _world(place, befall)
    with blaming_user_code(f"in {wanted.job}"):
        job, prefix = job_for_a_device(wanted.job, RECIPES, jobs), f"job{place.job_id}."
        run = Trainer(world, wanted, job, emit, stopping, resume, prefix, place.joining)
        importlib.import_module(LOADS_LATE)
        emit({"kind": "loaded"})
        try:
            run.join() if place.joining else run.go()
        finally:
            run.close()


def _world(place: TaskContext, befall: Callable[[Any], None] | None) -> RankContext:
    from hoop.engine.rank_context import RankContext

    def reseated(patience: float, lacks: HoopError | None = None) -> RankContext:
        return _world(place.reseated(patience, lacks), befall)

    def moved() -> RankContext:
        return _world(place.moved(), befall)

    where = place.arena, place.communicator, place.group, place.neighbours
    seats = reseated, place.moving, moved, place.settled
    return RankContext(
        *where, *seats, place.device, befall, place.hosts, place.outlives, place.run, place.left_out
    )


def _befall(settings: Settings, place: TaskContext, emit: Emit) -> Callable[[Any], None]:
    """What is to go wrong with this rank; nothing with one that comes later, whose rank was another's."""
    from hoop.engine.fault_tolerance.fault_injector import FaultInjector

    mine = [one for one in settings.placed if one.rank == place.communicator.rank and not place.joining]
    return FaultInjector(mine, emit, place.heard).befall


def preload() -> None:
    """Everything that devices and whoever leads them will need: imported once, before they are forked."""
    for module in (
        "hoop.client.cluster",
        "hoop.engine.trainer",
        "hoop.runs.job_follower",
        "hoop.launch.forked",
        LOADS_LATE,
    ):
        importlib.import_module(module)


@dataclass(frozen=True)
class Launch:
    """Where and with what a job runs."""

    settings: Settings
    devices: int | None = None
    memory: int = DEFAULT_MEMORY
    out: Path | None = None
    resume: Path | None = None
    """A checkpoint to go on from."""
    warnings: tuple[str, ...] = ()
    """What is to be told first."""
    coordinator: Address | Addresses | None = None
    """A cluster that is up; None: processes of this machine, for this job alone."""
    address_file: Path | None = None
    """Where the coordinator of this job is written while it runs."""
    credentials: Credentials | None = None
    """What the cluster that is up is shown; None: what the environment says."""
    costs: Costs | None = None
    """What a step is predicted from; None: what is profiled before the first one."""


class Training:
    """A job under way, seen from this process."""

    def __init__(self, launch: Launch, save: Path | None = None) -> None:
        for fault in launch.settings.placed:
            if fault.kind == OF_FILES and launch.out is None:
                raise InvalidArgument(
                    f"fault {fault}: no file of this run is written; name a folder with out (--out)"
                )
        self._launch = launch
        self._save = save
        self._asked = False
        self._stop: Callable[[], None] = lambda: None

    def events(self) -> Iterator[EventFields]:
        """What it tells, the last being its result; it ends when this is closed."""
        yield from ({"kind": "warning", "text": text} for text in self._launch.warnings)
        there = self._launch.coordinator
        yield from self._here() if there is None else self._there(there)

    def stop(self) -> None:
        """Asks it to stop after a step; its events go on to the result. At any time, from a signal's handler too."""
        self._asked = True
        self._stop()

    def _here(self) -> Iterator[EventFields]:
        from hoop.client.cluster import Cluster
        from hoop.launch.forked import ForkedCluster, ForkedConfig

        launch = self._launch
        devices = DEFAULT_DEVICES if launch.devices is None else launch.devices
        if devices < 1:
            raise InvalidArgument(f"devices: {devices} is not at least 1")

        def head(address: Address, tell: Callable[[EventFields], None], stoppable: Stoppable) -> None:
            for event in self._follow(address, devices, stoppable):
                tell(event)

        preload()
        if Cluster.opened:
            raise FailedPrecondition(
                "this process has been connected to a cluster, and devices cannot be forked from it any more; "
                "train first, or in another process, or on the cluster: hoop train --coordinator HOST:PORT"
            )
        forked = ForkedCluster(ForkedConfig(devices, launch.memory, trainer), head)
        try:
            self._stoppable(forked.stop)
            yield from forked.events()
        finally:
            forked.close()
            if launch.address_file is not None:  # whoever leads may have been ended at once
                launch.address_file.unlink(missing_ok=True)

    def _there(self, address: Address | Addresses) -> Iterator[EventFields]:
        def stoppable(stop: Callable[[], None]) -> None:
            def ask() -> None:
                with contextlib.suppress(HoopError):  # it ended by itself, or failed and says so
                    stop()

            # Not in the handler of a signal: it may have come in the middle of another call.
            self._stoppable(lambda: threading.Thread(target=ask, daemon=True).start())

        return self._follow(address, self._launch.devices, stoppable)

    def _stoppable(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        if self._asked:
            stop()

    def _follow(
        self, address: Address | Addresses, devices: int | None, stoppable: Stoppable
    ) -> Iterator[EventFields]:
        from hoop.client.cluster import connect
        from hoop.launch.forked import own_token
        from hoop.runs.job_follower import JobFollower
        from hoop.servers.grpc_server import write_address_file
        from hoop.wire.auth import Credentials
        from hoop.wire.roles import Role

        launch = self._launch
        own = Credentials(Role.CLIENT, own_token()) if launch.coordinator is None else None
        with connect(address, credentials=own or launch.credentials) as cluster:
            if launch.coordinator is None and devices:
                cluster.wait_for_devices(devices)
            if launch.address_file is not None:
                write_address_file(launch.address_file, address)
            try:
                patience = 0.0 if launch.coordinator is None else AWAY_S
                job = JobFollower(
                    cluster,
                    launch.settings,
                    chosen(cluster, devices),
                    launch.out,
                    launch.resume,
                    patience=patience,
                    costs=launch.costs,
                )
                stoppable(partial(job.job.stop, patience))
                for event in job.events():
                    if event["kind"] == "result" and self._save is not None:
                        job.save(self._save)
                    yield event
            finally:
                if launch.address_file is not None:
                    launch.address_file.unlink(missing_ok=True)


def train(
    model: nn.Module | Callable[[int], nn.Module] | Job | str,
    data: Any = None,
    *,
    devices: int = DEFAULT_DEVICES,
    strategy: str | Spelled = "data",
    memory: int | str = DEFAULT_MEMORY,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: Callable[[EventFields], None] | None = None,
    loss: str | Callable[[Any, Any], Any] = "cross_entropy",
    reduction: str | None = None,
    **settings: Any,
) -> Result:
    """Trains a model on devices of this machine and returns what came of it.

    ``model`` is a module (it has the trained weights afterwards), a function of a seed, a ``Job``, or a recipe's name;
    ``data`` is (inputs, targets), ((inputs, targets), (test inputs, test targets)), or two datasets; without test data
    the model is measured on the training data, and ``result.split`` says so. ``loss`` is
    ``cross_entropy``, ``mse``, or a function of (outputs, targets), such as ``nn.CrossEntropyLoss()``. It trains as it
    does in PyTorch on the whole batch: a mean as the mean, a sum as the sum, a value a sample as their mean. Hoop finds
    out which of them it is, or refuses; ``reduction``, ``mean``, ``sum`` or ``none``, states it.
    ``settings`` are those of ``hoop train`` (docs/training.md): epochs, batch_size, shards, lr, optimizer, seed …
    ``out`` is a folder for metrics, checkpoints and plots; with ``resume`` it goes on from the newest checkpoint there.
    ``progress`` is called with every event.

    >>> result = hoop.train(model, (images, labels), devices=4, epochs=3)
    >>> result.accuracy
    """
    if untested := torch_versions.check(torch_versions.installed()):
        warnings.warn(untested, torch_versions.UntestedTorchWarning, stacklevel=2)
    from hoop.engine.job import INHERITED, Job, find_job
    from hoop.engine.loss_reduction import with_criterion
    from hoop.engine.recipes import RECIPES
    from hoop.engine.trainer import check_faults
    from hoop.runs.checkpoint_store import FOLDER, newest_checkpoint

    if reduction is not None and isinstance(model, str | Job):
        raise InvalidArgument(
            f"reduction: {reduction!r} is for a loss that is given here; a job states its own"
        )
    if isinstance(model, str):
        job, name = find_job(model, RECIPES), model
    else:
        job = model if isinstance(model, Job) else job_from(model, data, loss, reduction)
        name = f"inherited:{len(INHERITED)}"
    spec = strategy if isinstance(strategy, str) else strategy.spec
    wanted = job.defaults(name).replaced({**settings, "strategy": spec}).check()
    loaded = job.data()  # before the fork: devices share what is loaded now
    with blaming_user_code("calling the loss before the first step"):
        job = with_criterion(job, loaded.train, wanted.seed)
    check_faults(wanted, devices, len(loaded.train))
    if not isinstance(model, str):
        INHERITED.append(job)
    folder = None if out is None else Path(out)
    if resume and folder is None:
        raise InvalidArgument("resume: it needs out, the folder of the run to go on with")
    if folder is not None and not resume and (folder / FOLDER).is_dir():
        raise FailedPrecondition(f"out: {folder} holds a run; go on with it by resume=True, or name another")
    found = newest_checkpoint(folder) if resume and folder else None
    size = parse_size(memory, "memory")
    launch = Launch(wanted, devices, size, folder)
    if found is not None:
        launch = replace(launch, resume=found.path, warnings=tuple(found.warnings))
    with tempfile.TemporaryDirectory(prefix="hoop-") as scratch:
        weights = Path(scratch) / "weights.safetensors"
        summary: EventFields = {}
        for event in Training(launch, save=weights).events():
            if progress is not None:
                progress(event)
            if event["kind"] == "result":
                summary = {key: value for key, value in event.items() if key != "kind"}
        return Result(summary, load_into(job.model(wanted.seed), weights))
