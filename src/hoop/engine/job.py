"""A ``Job``: model, data and loss. A job is named by an import path, so that no code is ever sent to a device.

``find_job`` resolves a name in the user's own process; ``job_for_a_device`` resolves one that came over the network.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from hoop.data.dataset import Splits
from hoop.data.user_data import user_data
from hoop.engine.job_names import check_job_name
from hoop.engine.job_source import check_declared, check_declared_in_spec, check_path_writers, find_spec
from hoop.engine.settings import Settings
from hoop.engine.stage.autograd import LOSSES, MEAN, REDUCTIONS, SUM, Criterion, Loss, loss_named
from hoop.errors import InvalidArgument, NotFound

GIVEN = "hoop.train"
"""Name of a job that a program has made of its objects. It travels by value (``runs/by_value.py``)."""
LOADED: dict[str, Job] = {}
"""Jobs that this process has loaded, by the name that devices get. Devices forked from this process have them."""
_FACTORIES = {
    "optimizer": "give a function of the parameters, such as functools.partial(torch.optim.AdamW, lr=1e-3)",
    "parameter_groups": "give a function of the model that returns a list of dicts with 'params'",
    "lr_scheduler": "give a function of the optimizer, such as lambda o: torch.optim.lr_scheduler.StepLR(o, 10)",
}
_IMPORT_PATH = re.compile(r"[\w-]+(\.[\w-]+)*:\w+", re.ASCII)


@dataclass(frozen=True)
class Job:
    """A model, its data and its loss, with the settings that suit them.

    ``model(seed)`` makes the model, the same for the same seed; an ``nn.Sequential`` can be partitioned between its
    blocks. ``loss`` is a name, or a function of (outputs, targets) that returns the mean or the sum over the samples,
    or one value per sample. It trains as in PyTorch on the whole batch: with the mean, the sum, or the mean of the
    values.
    ``reduction`` states which of them ``loss`` returns, ``mean``, ``sum`` or ``none``, where neither the type of the
    loss nor its graph says so (``engine/loss_graph.py``).
    ``loss(model, batch)`` calls the model itself, for any batch; it may also return (sum, count), or a dict with
    ``loss`` and further metrics (``engine/custom/loss.py``).
    """

    model: Callable[[int], nn.Module]
    data: Callable[[], Any]
    """Function that returns ``Splits``, or anything else that ``hoop.train`` takes as data; after the job is made it
    returns ``Splits``."""
    loss: str | Loss | Criterion | Callable[..., Any] = "cross_entropy"
    settings: Mapping[str, Any] = field(default_factory=dict)
    about: str = ""
    reduction: str | None = None
    optimizer: Callable[[Any], Any] | None = None
    """Function that makes a ``torch.optim.Optimizer`` of the parameters or parameter groups; None: that of the
    settings."""
    parameter_groups: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    """Function that returns the parameter groups of a model; None: one group of all trained parameters."""
    lr_scheduler: Callable[[Any], Any] | None = None
    """Function that makes a scheduler of ``torch.optim.lr_scheduler`` of the optimizer; None: the schedule of the
    settings."""
    scheduler_interval: Literal["step", "epoch"] = "step"
    """Time when the scheduler steps: after every step, or after every epoch."""
    ema: float = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999; 0: no average."""

    def __new__(cls, *_: Any, **given: Any) -> Job:
        """Raises for a field that a job does not have, with the place where it belongs."""
        parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
        own = [parameter.name for parameter in parameters]
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):  # a class of the user's
            return super().__new__(cls)
        for name in sorted(given.keys() - set(own)):
            try:
                Settings().replaced({name: given[name]})
            except InvalidArgument:
                raise InvalidArgument(f"Job: it has no {name}; there are {', '.join(own)}") from None
            raise InvalidArgument(
                f"Job: it has no {name}, which is a setting: hoop.Job(…, settings={{{name!r}: {given[name]!r:.40}}})"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if not callable(self.data):
            raise InvalidArgument(
                f"data: {type(self.data).__name__} is not a function; a Job takes one that loads the data: lambda: …"
            )
        object.__setattr__(self, "data", _LoadedSplits.of(self.data, self.settings))
        if self.reduction is not None and self.reduction not in REDUCTIONS:
            raise InvalidArgument(
                f"reduction: {self.reduction!r} is unknown; known: {', '.join(REDUCTIONS)}, what the loss returns"
            )
        if isinstance(self.loss, str):
            loss_named(self.loss)
        elif isinstance(self.loss, type):
            raise InvalidArgument(
                f"loss: {self.loss.__name__} is a class; give an object of it, {self.loss.__name__}()"
            )
        elif not callable(self.loss) and not isinstance(self.loss, Criterion):
            known = ", ".join(LOSSES)
            raise InvalidArgument(f"loss: {self.loss!r} is neither a function of (outputs, targets) nor one of {known}")
        for name in ("optimizer", "parameter_groups", "lr_scheduler"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise InvalidArgument(f"{name}: {value!r:.80} is not a function; {_FACTORIES[name]}")
        if self.scheduler_interval not in ("step", "epoch"):
            raise InvalidArgument(f"scheduler_interval: {self.scheduler_interval!r} is neither 'step' nor 'epoch'")
        if not isinstance(self.ema, float | int) or not 0 <= self.ema < 1:
            raise InvalidArgument(f"ema: {self.ema!r} is not in 0..1; give a decay such as 0.999")
        own = getattr(self.loss, "reduction", None) if isinstance(self.loss, nn.Module) else None
        if self.reduction is not None and own in REDUCTIONS and own != self.reduction:
            raise InvalidArgument(
                f"reduction: {self.reduction!r} is stated, {self.loss} has {own!r}; leave it out, or change the loss"
            )

    @property
    def has_own_parts(self) -> bool:
        """Whether the job makes its own optimizer, groups, scheduler or average: then training is custom."""
        return bool(self.optimizer or self.parameter_groups or self.lr_scheduler or self.ema)

    @property
    def loss_function(self) -> Loss:
        if isinstance(self.loss, str):
            return loss_named(self.loss)
        return self.loss.function if isinstance(self.loss, Criterion) else self.loss

    @property
    def criterion(self) -> Criterion | None:
        """The loss with its reduction; None if ``loss_reduction.with_criterion`` has to find the reduction out."""
        if isinstance(self.loss, Criterion):
            return self.loss
        if isinstance(self.loss, str):
            return Criterion(loss_named(self.loss), SUM, SUM if self.reduction == SUM else MEAN)
        return None if self.reduction is None else Criterion.of(self.loss, self.reduction)

    def defaults(self, name: str) -> Settings:
        """The default settings of this job, which is called ``name``."""
        return Settings().replaced({"job": name, **self.settings})


@dataclass(frozen=True)
class _LoadedSplits:
    """A job's data function, whose result, of any form that ``hoop.train`` takes, becomes ``Splits``."""

    function: Callable[[], Any]
    settings: Mapping[str, Any]
    """The job's settings: a ``DataLoader`` states some of them, and they must agree."""

    @classmethod
    def of(cls, function: Callable[[], Any], settings: Mapping[str, Any]) -> _LoadedSplits:
        return cls(function.function if isinstance(function, cls) else function, settings)

    def __call__(self) -> Splits:
        splits, stated = user_data(self.function())
        effective = {name: self.settings.get(name, getattr(Settings(), name)) for name in stated}
        if effective != stated:
            raise InvalidArgument(
                f"data: the DataLoader has {stated}, and devices take these from the job's settings, where they are "
                f"{effective}; write hoop.Job(…, settings={stated})"
            )
        return splits


def check_model_function(model: Any) -> None:
    """Raises InvalidArgument unless ``model`` can be called with a seed, as ``Job.model`` is."""
    name = getattr(model, "__name__", None) or type(model).__name__
    if isinstance(model, nn.Module):
        raise InvalidArgument(
            f"model: {name} is a module; a Job takes a function of the seed that makes one: lambda seed: {name}(…)"
        )
    if not callable(model):
        raise InvalidArgument(f"model: {model!r:.80} is neither a module nor a function of a seed that makes one")
    try:
        signature = inspect.signature(model)
    except (TypeError, ValueError):
        return  # some callables have no signature: the call itself decides
    try:
        signature.bind(0)
    except TypeError:
        takes_seed = False
    else:  # Net(hidden) would be called with the seed as the number of hidden units
        is_module = isinstance(model, type) and issubclass(model, nn.Module)
        takes_seed = not is_module or next(iter(signature.parameters)) == "seed"
    if takes_seed:
        return
    if isinstance(model, type):
        raise InvalidArgument(
            f"model: {name} is a class; give an object of it, {name}(…), or a function of the seed that makes one: "
            f"lambda seed: {name}(…)"
        )
    raise InvalidArgument(f"model: {name}{signature} is called with the seed; make it a function of that one argument")


def build_model(job: Job, seed: int) -> nn.Module:
    """The job's model for a seed; raises if ``Job.model`` is not a function that returns a module."""
    check_model_function(job.model)
    model: Any = job.model(seed)
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"model: for the seed {seed} it returned {type(model).__name__}, not a torch.nn.Module; return the model"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidArgument(
            f"model: {type(model).__name__} has no parameter that requires a gradient, so there is nothing to train"
        )
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The units of partitioning: the children of an ``nn.Sequential``, else the whole model as one block."""
    return list(model) if isinstance(model, nn.Sequential) and len(model) else [model]


def names_of(model: nn.Module) -> dict[int, str]:
    """Name of each parameter and buffer in the model's ``state_dict``, by ``id``."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {id(tensor): name for name, tensor in named}


def is_given(name: str) -> bool:
    """Whether a job's name is that of a job of a program's objects, which only that program has."""
    return name == GIVEN or name.startswith("inherited:")  # in folders of older versions


def import_path(name: str) -> str:
    """The name of a job that is sent to devices: a file becomes a module name, without its path on this machine."""
    where, colon, attribute = name.rpartition(":")
    return f"{Path(where).stem}:{attribute}" if colon and where.endswith(".py") else name


def without_folder(name: str) -> str:
    """The name of a job in a checkpoint, which may be given away: ``/home/me/my_job.py:job`` is ``my_job.py:job``."""
    where, colon, attribute = name.rpartition(":")
    return f"{Path(where).name}:{attribute}" if colon and where.endswith(".py") else name


def job_for_a_device(name: str, recipes: Mapping[str, Job], folder: Path | None) -> Job:
    """Resolves a job's name on a device: a recipe, or ``module:name`` of code that is on this machine already.

    The name comes over the network, so no path in it is opened. The module must be installed, or be in ``folder``,
    which the user that started this device chose and no other user can write to. It is executed only if it declares the
    ``Job``, or a function annotated to return one (``job_source``).
    """
    if name in recipes:
        return recipes[name]
    if name in LOADED:
        return LOADED[name]
    if not _IMPORT_PATH.fullmatch(name):
        raise InvalidArgument(
            f"job: {name[:200]!r} is no recipe and no module:name; a device opens no path that comes from outside"
        )
    where, _, attribute = name.partition(":")
    if where.partition(".")[0] in sys.stdlib_module_names or "__main__" in where.split("."):
        raise InvalidArgument(f"job: {where} is a module of Python's own, or a program; rename your file")
    path = folder.joinpath(*where.split(".")).with_suffix(".py") if folder is not None else None
    if path is not None and folder is not None and path.is_file():
        neighbours = check_path_writers(folder, path, f"job: {name}")
        check_declared(path, attribute, name)
        found = getattr(_from_file(path, neighbours), attribute, None)
    else:
        spec = find_spec(where)
        if spec is None:
            raise _not_here(name, where, path, f"No module named {where!r}")
        check_declared_in_spec(spec, attribute, name)
        try:
            found = getattr(importlib.import_module(where), attribute, None)
        except ImportError as error:
            raise _not_here(name, where, path, str(error)) from None
    if isinstance(found, Job):
        return found
    if getattr(found, "__annotations__", {}).get("return") not in (Job, "Job", "hoop.Job"):
        raise InvalidArgument(f"job: {name} is neither a hoop.Job nor a function that says '-> hoop.Job'")
    return _build(found, name)


def _not_here(name: str, where: str, path: Path | None, reason: str) -> NotFound:
    return NotFound(
        f"job: {name}: {where} is not on this machine ({reason}): there is no {path}; put your file there, or start "
        "devices with --jobs FOLDER"
    )


def find_job(name: str, recipes: Mapping[str, Job]) -> Job:
    """Resolves a job's name in the user's process: a recipe, ``file.py:name`` or ``module:name``."""
    if name in recipes:
        return recipes[name]
    if is_given(name):
        raise NotFound(
            f"job: {name}: a program has made this job of its own objects; run that program again, with resume=True in "
            "hoop.train to go on from a checkpoint"
        )
    check_job_name(name, recipes)
    where, _, attribute = name.rpartition(":")
    found = getattr(_module(where, name), attribute, None)
    if found is None:
        raise NotFound(f"job: {where} has no {attribute!r}")
    job = LOADED[import_path(name)] = _build(found, name)
    return job


def _build(found: Any, name: str) -> Job:
    job = found() if callable(found) and not isinstance(found, Job) else found
    if not isinstance(job, Job):
        raise InvalidArgument(f"job: {name} is {type(job).__name__}; make it a hoop.Job(model=…, data=…)")
    return job


def _module(where: str, name: str) -> Any:
    if not where.endswith(".py"):
        try:
            return importlib.import_module(where)
        except ImportError as error:
            raise NotFound(f"job: {name}: {where} cannot be imported here: {error}") from None
    return _from_file(Path(where).resolve())


def _from_file(path: Path, neighbours: bool = True) -> Any:
    """Executes a file as a module, again on every call, so that a running device sees changes to the file.

    With ``neighbours`` it may import them, now and later. They come last, so that none replaces an installed module.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if neighbours and str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec.loader.exec_module(module)
    return module
