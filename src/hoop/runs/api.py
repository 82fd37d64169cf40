"""``hoop.train``: checks model, data and options of a program, runs a ``Training``, returns a ``Result``.

What takes long to import is imported by functions: the program's clean process is started first, and imports the same
meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hoop import job_events as ev
from hoop import torch_versions
from hoop.config import parse_size
from hoop.engine.user_code import attribute_exceptions
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.membership.replication import check_replicas
from hoop.report.progress_view import ProgressView, QuietView
from hoop.runs.callbacks import Callback, CallbackCaller, RunControl, check_callbacks
from hoop.runs.clean_process import CleanProcess, lent_process
from hoop.runs.result import Result
from hoop.texts import counted
from hoop.topology import Addresses, DeviceRange

if TYPE_CHECKING:
    from torch import nn

    from hoop.engine.job import Job
    from hoop.engine.settings import Settings
    from hoop.launch.ray_cluster import Ray
    from hoop.runs.job_objects import JobParts
    from hoop.runs.training import Launch, Training
    from hoop.wire.auth import Credentials


class StrategyLike(Protocol):
    """A strategy object: ``hoop.DataParallel()``, ``hoop.Pipeline()`` …"""

    @property
    def spec(self) -> str:
        """The strategy as text, for example ``pipeline:1f1b``."""


@dataclass(frozen=True)
class _RunTarget:
    """Where a run trains: on this machine, on a Ray cluster, or on a cluster of Hoop that is up."""

    devices: DeviceRange | None
    """Number of devices, or a range; None: none is stated."""
    ray: Ray | None = None
    coordinator: Addresses | None = None
    credentials: Credentials | None = None
    """Credentials for the cluster at ``coordinator``; None: those of the environment."""

    @property
    def first(self) -> int:
        """Devices that the run begins with, as far as checks need to know before it begins."""
        from hoop.runs.device_count import DEFAULT_DEVICES

        return self.devices.first if self.devices is not None else DEFAULT_DEVICES

    @property
    def is_here(self) -> bool:
        """The devices are processes of this machine, for this run alone."""
        return self.ray is None and self.coordinator is None


def _parse_target(on: Any, devices: Any, token: str | None, tls: str | os.PathLike[str] | None) -> _RunTarget:
    """``on``: None, a ``hoop.Ray``, or the address of a coordinator."""
    count = DeviceRange.parse(devices) if devices is not None else None
    if isinstance(on, str):
        from hoop.wire.auth import find_credentials
        from hoop.wire.roles import Role

        given = token is not None or tls is not None
        credentials = find_credentials(Role.CLIENT, token, tls=Path(tls) if tls else None) if given else None
        return _RunTarget(count, coordinator=Addresses.parse(on), credentials=credentials)
    if token is not None or tls is not None:
        raise InvalidArgument("token, tls: they are for the cluster of on='HOST:PORT'; leave them out")
    if on is None:
        return _RunTarget(count)
    from hoop.launch.ray_cluster import Ray
    from hoop.runs.device_count import DEFAULT_DEVICES

    if not isinstance(on, Ray):
        raise InvalidArgument(
            f"on: {on!r:.80} is neither the address of a coordinator, such as '10.0.0.1:4021', nor a "
            "hoop.Ray(devices=…)"
        )
    ray = on.with_range(count or DeviceRange(DEFAULT_DEVICES))
    return _RunTarget(ray.range, ray)


def _parse_strategy(strategy: Any) -> str:
    spec = strategy if isinstance(strategy, str) else getattr(strategy, "spec", None)
    if not isinstance(spec, str):
        raise InvalidArgument(
            f"strategy: {strategy!r:.80} is neither a name, such as 'pipeline:1f1b', nor a strategy, such as "
            "hoop.Pipeline()"
        )
    return spec


def _parse_folder(out: Any) -> Path | None:
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


def _try_optimizer(job: Job, settings: Settings, model: nn.Module, samples: int) -> None:
    """Makes the optimizer and the scheduler of a job, and a step: their mistakes are found before the first device."""
    from hoop.engine.custom.setup import check_parts

    with attribute_exceptions("making the optimizer before the first step"):
        check_parts(job, settings, model, samples)


def _check_loader(stated: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raises if a given setting is another one than the ``DataLoader`` has. ``stated``: the loader's."""
    for name in sorted(set(stated) & set(settings)):
        if settings[name] != stated[name]:
            raise InvalidArgument(
                f"{name}: {settings[name]!r} is given, and the DataLoader has {stated[name]!r}; leave one of them out"
            )


def _find_job(
    model: nn.Module | Callable[[int], nn.Module] | Job | str,
    data: Any,
    parts: JobParts,
    settings: Mapping[str, Any],
    target: _RunTarget,
) -> tuple[Job, str]:
    """Returns the job of a model, or the one that is given or named, and the name by which devices find it."""
    from hoop.engine.job import GIVEN, Job, find_job
    from hoop.engine.recipes import RECIPES
    from hoop.runs.job_objects import job_from

    if isinstance(model, str | Job):
        parts.check_only_default()
        if data is not None:
            raise InvalidArgument(
                f"data: {type(data).__name__} is for a model that is given here; a job has its own data "
                "(dataclasses.replace makes another job of it)"
            )
    if target.coordinator is not None and not isinstance(model, str):
        raise InvalidArgument(
            f"on: the devices at {target.coordinator} are other processes, to which no object of this one can be sent; "
            "name the job, hoop.train('my_job.py:job', on=…), and put the file into the devices' folder (hoop device "
            "--jobs)"
        )
    if isinstance(model, str):
        return find_job(model, RECIPES), model
    if isinstance(model, Job):
        return model, GIVEN
    job = job_from(model, data, parts)
    _check_loader(job.settings, settings)
    return job, GIVEN


def _try_job(job: Job, settings: Settings, devices: int, named: bool, clean: CleanProcess | None) -> Job:
    """Returns the job with what trial calls have found out about its loss. Raises if it cannot be trained.

    ``named``: devices load it by its name, so this process makes no model of it.
    """
    from hoop.engine.custom.loss import CustomLoss
    from hoop.engine.job import build_model
    from hoop.engine.loss_reduction import with_criterion
    from hoop.engine.loss_trial import compilation_disabled
    from hoop.engine.step_schedule import StepSchedule
    from hoop.engine.trainer import check_faults

    if clean is not None and job.has_own_parts:
        clean.import_optimizers()
    loaded = job.data()
    samples = len(loaded.train)
    # Devices compile for themselves.
    with attribute_exceptions("calling the model and the loss before the first step"), compilation_disabled():
        model = None if named else _in_host_memory(build_model(job, settings.seed))
        job = with_criterion(job, loaded.train, settings.seed, model)
    if model is not None and isinstance(job.loss, CustomLoss):
        if clean is not None and not job.has_own_parts:
            clean.import_optimizers()
        _try_optimizer(job, settings, model, samples)
    StepSchedule(settings, samples)  # raises if there is no step
    check_faults(settings, devices, samples)
    return job


def _in_host_memory(model: nn.Module) -> nn.Module:
    """The model, or a copy of one that is on a GPU: the data is in host memory, and devices place both."""
    if all(tensor.device.type == "cpu" for tensor in (*model.parameters(), *model.buffers())):
        return model
    return copy.deepcopy(model).cpu()


def _make_launch(
    settings: Settings, target: _RunTarget, memory: int | str | None, folder: Path | None, resume: bool
) -> Launch:
    """Returns where and with what the job runs; with ``resume``, from the newest checkpoint in the folder."""
    from hoop.runs.checkpoint_store import FOLDER, newest_checkpoint
    from hoop.runs.training import Launch

    if resume and folder is None:
        raise InvalidArgument("resume: it needs out, the folder of the run to go on with")
    if folder is not None and not resume and (folder / FOLDER).is_dir():
        raise FailedPrecondition(f"out: {folder} holds a run; go on with it by resume=True, or name another")
    launch = Launch(
        settings,
        target.first,
        None if memory is None else parse_size(memory, "memory"),
        folder,
        coordinator=target.coordinator,
        credentials=target.credentials,
        ray=target.ray,
    )
    if resume and folder is not None:
        found = newest_checkpoint(folder)
        launch = replace(launch, resume=found.path, warnings=tuple(found.warnings))
    return launch


def train(
    model: nn.Module | Callable[[int], nn.Module] | Job | str,
    data: Any = None,
    *,
    test_data: Any = None,
    devices: int | str | tuple[int, int] | None = None,
    on: Ray | str | None = None,
    token: str | None = None,
    tls: str | os.PathLike[str] | None = None,
    strategy: str | StrategyLike = "data",
    memory: int | str | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    max_restarts: int | None = None,
    callbacks: Sequence[Callback] | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
    quiet: bool = False,
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
    workers. ``test_data`` has the same forms; a pair of them as ``data`` is training and test data, too. Without test
    data the model is measured on the training data, and ``result.split`` says so.

    ``loss`` is ``cross_entropy``, ``mse``, a function of (outputs, targets), such as ``nn.CrossEntropyLoss()``, or a
    function of (model, batch). It trains as it does in PyTorch on the whole batch: a mean as the mean, a sum as the
    sum, a value a sample as their mean, (sum, count) as their quotient over the batch. What a scalar is the mean or the
    sum of is known by the type of the loss, read from its graph, or stated by ``reduction`` (``mean`` or ``sum`` over
    the samples, or ``none``); else it is refused. It may return a dict with ``loss`` and further metrics.

    ``optimizer`` is a name (with the settings lr, momentum, weight_decay …), or a function of the parameters, or of the
    ``parameter_groups``, that returns any ``torch.optim.Optimizer``; ``lr_scheduler`` is a function of the optimizer,
    which steps every step or epoch (``scheduler_interval``). ``ema`` averages the weights (``result.average``).

    ``devices`` is a number, by default one for each GPU or else each core, or a range, ``"4:16"`` or
    ``(4, 16)``: training begins when 4 are ready, and takes in the others as they come. ``on="HOST:PORT"`` trains on
    the cluster whose coordinator is there, with ``token`` or ``tls`` (a folder of ``hoop certs``); its devices load the
    job by name, so ``model`` is one, for example ``"my_job.py:job"``. ``on=hoop.Ray(devices=8)`` trains on actors of a
    Ray cluster.

    ``memory`` is that of each device, in bytes or as ``"2GiB"``; without it a device takes what the job needs.

    ``out`` is a folder for metrics, checkpoints and plots; with ``resume`` the run resumes from the newest checkpoint
    there. If all devices of this machine are lost, they are started again from a newer checkpoint in ``out``, at most
    ``max_restarts`` times (3); what started the devices of a cluster restarts them, so it is refused with ``on``.
    Progress, losses and recoveries are shown on standard error, or in the notebook's cell, unless ``quiet``.
    ``callbacks`` are called while it trains (``hoop.Callback``), ``progress`` with every event as a dict. ``settings``
    are those of ``hoop train`` (docs/training.md): epochs, batch_size, shards, patience …

    >>> result = hoop.train(model, (images, labels), devices=4, epochs=3)
    >>> result.accuracy
    """
    if untested := torch_versions.check_version(torch_versions.installed_version()):
        warnings.warn(untested, torch_versions.UntestedTorchWarning, stacklevel=2)
    with contextlib.ExitStack() as ends:
        # It imports what devices need while this process imports the same and checks the job.
        clean = ends.enter_context(lent_process()) if on is None else None
        from hoop.data.user_data import TrainAndTest
        from hoop.engine.job import build_model
        from hoop.runs.by_value import encode
        from hoop.runs.device_count import default_device_count
        from hoop.runs.job_objects import JobParts, averages, load_into
        from hoop.runs.training import Training, check_restarts

        if isinstance(optimizer, str) or (optimizer is not None and not callable(optimizer)):
            settings["optimizer"], optimizer = optimizer, None
        target = _parse_target(on, devices, token, tls)
        check_restarts(max_restarts, target.coordinator or target.ray)
        spec, folder = _parse_strategy(strategy), _parse_folder(out)
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
        whole = data if test_data is None else TrainAndTest(data, test_data)
        job, name = _find_job(model, whole, parts, settings, target)
        _check_effective(job, settings)
        limit = {"max_devices": target.devices.most} if target.devices is not None and target.devices.most else {}
        wanted = job.defaults(name).replaced({**settings, **limit, "strategy": spec}).check()
        if target.is_here and target.devices is None:
            target = replace(target, devices=DeviceRange(default_device_count(wanted).devices))
        check_replicas(wanted.replicas, target.first)
        job = _try_job(job, wanted, target.first, isinstance(model, str), clean)
        launch = replace(_make_launch(wanted, target, memory, folder, resume), max_restarts=max_restarts)
        if not isinstance(model, str):
            launch = replace(launch, job=encode(job))
        if target.coordinator is not None and devices is None:
            launch = replace(launch, devices=None)  # all that are there
        scratch = ends.enter_context(tempfile.TemporaryDirectory(prefix="hoop-"))
        weights = Path(scratch) / "weights.safetensors"
        view = ends.enter_context(QuietView() if quiet else ProgressView())
        if launch.devices is not None:
            view.say(f"starting {counted(launch.devices, 'device')} …")
        summary = _follow(Training(launch, weights, clean), view, called, progress, wanted)
        return Result(summary, load_into(build_model(job, wanted.seed), weights), averages(weights))


def _follow(
    training: Training,
    view: QuietView,
    callbacks: Sequence[Callback],
    progress: Callable[[dict[str, Any]], None] | None,
    settings: Settings,
) -> dict[str, Any]:
    """Runs the training, shows it and calls the callbacks; returns its result."""
    summary: dict[str, Any] = {}
    caller = CallbackCaller(callbacks, RunControl(training.stop, json.loads(settings.to_json())))
    with caller.reporting_failure():
        for observed in training.events():
            view.show(observed.event)
            if progress is not None:
                progress(observed.to_fields())
            caller.on_observed(observed)
            if isinstance(observed.event, ev.Finished):
                summary = observed.event.result
                view.finish(summary)
    return summary
