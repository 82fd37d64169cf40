"""The objects that custom training changes on one rank: model, optimizer, learning-rate scheduler, averaged weights.

Every rank makes its own from the same job. ``trial_state`` finds out, on copies, which tensors the optimizer keeps, so
that they have places in the arena before the first step.
"""

from __future__ import annotations

import copy
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils._python_dispatch import TorchDispatchMode

from hoop.engine.job import Job, names_of
from hoop.engine.optimizer_settings import OptimizerSettings
from hoop.engine.settings import Settings
from hoop.errors import InvalidArgument

log = logging.getLogger("hoop.engine")
Copied = TypeVar("Copied")
Scheduler = LRScheduler | ReduceLROnPlateau
StateTemplate = list[dict[tuple[int, str], Any]]
"""State that the optimizers keep of each trained parameter, by number of the optimizer and key."""
TRIED_ELEMENTS = 1_000_000
"""Number of elements up to which an optimizer is tried on a copy of the whole model."""
JSON_TYPES = (bool, int, float, str, type(None))


def make_optimizer(job: Job, settings: Settings, model: nn.Module) -> Optimizer:
    """The job's own optimizer, or that of the settings, over the trained parameters or the job's parameter groups."""
    trained = [one for one in model.parameters() if one.requires_grad]
    groups: Any = trained
    if job.parameter_groups is not None:
        groups = job.parameter_groups(model)
        groups = list(groups) if isinstance(groups, Iterable) else groups
        _check_groups(groups)
    if not trained:
        raise InvalidArgument("model: it has no parameter with requires_grad=True; there is nothing to train")
    if job.optimizer is None:
        return _named_optimizer(settings.optimizer, groups)
    optimizer: Any = job.optimizer(groups)
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgument(
            f"optimizer: it returned {type(optimizer).__name__}; give a function of the parameters that returns a "
            "torch.optim.Optimizer, such as functools.partial(torch.optim.AdamW, lr=1e-3)"
        )
    known = {id(one) for one in model.parameters()}
    foreign = sum(id(one) not in known for group in optimizer.param_groups for one in group["params"])
    if foreign:
        raise InvalidArgument(
            f"optimizer: it has {foreign} parameters that are not the model's: make it of the parameters that it is "
            "called with; each device has a model of its own"
        )
    return optimizer


def _check_groups(groups: Any) -> None:
    if not isinstance(groups, list) or not all(isinstance(one, Mapping) and "params" in one for one in groups):
        raise InvalidArgument(
            "parameter_groups: it returned no list of dicts with 'params'; give a function of the model that returns "
            "[{'params': …, 'weight_decay': 0.1}, {'params': …, 'weight_decay': 0.0}]"
        )


def _named_optimizer(settings: OptimizerSettings, groups: Any) -> Optimizer:
    shared: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum, nesterov=settings.nesterov, **shared)
    kind = torch.optim.Adam if settings.name == "adam" else torch.optim.AdamW
    return kind(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, **shared)


def make_scheduler(job: Job, optimizer: Optimizer) -> Scheduler | None:
    """The job's own learning-rate scheduler of this optimizer; None if it has none."""
    if job.lr_scheduler is None:
        return None
    found: Any = job.lr_scheduler(optimizer)
    if not isinstance(found, LRScheduler | ReduceLROnPlateau):
        raise InvalidArgument(
            f"lr_scheduler: it returned {type(found).__name__}; give a function of the optimizer that returns one of "
            "torch.optim.lr_scheduler"
        )
    json_values(found.state_dict(), "lr_scheduler")
    return found


def json_values(state: Any, field: str) -> Any:
    """State made of numbers, texts, lists and dicts, as JSON has it; raises for anything else, and names ``field``."""
    if isinstance(state, JSON_TYPES):
        return state
    if isinstance(state, Tensor) and state.numel() == 1:
        return state.item()
    if isinstance(state, Mapping):
        return {str(key): json_values(value, f"{field}.{key}") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [json_values(one, field) for one in state]
    if hasattr(state, "item") and getattr(state, "size", 0) == 1:
        return state.item()
    raise InvalidArgument(
        f"{field}: its state is {type(state).__name__}, which cannot be kept in a checkpoint; keep numbers, texts, "
        "lists and dicts of them, or tensors"
    )


def json_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of an optimizer's parameter groups, in the form that JSON has."""
    return [
        {key: json_values(value, f"optimizer.{key}") for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def load_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Loads what ``json_groups`` returned."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            own = group.get(key)
            if isinstance(own, Tensor):
                own.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(own, tuple) else value


def load_scheduler(scheduler: Scheduler, state: Mapping[str, Any]) -> None:
    """Loads ``json_values(scheduler.state_dict())``."""
    own = scheduler.state_dict()
    scheduler.load_state_dict({key: _like(value, own.get(key)) for key, value in state.items()})


def keeps_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer leaves the gradients that it gets unchanged: those of PyTorch do, others get copies."""
    return type(optimizer).__module__.startswith("torch.optim")


class TrainableState(ABC):
    """What ``CustomState`` keeps in the arena: objects of a job (``JobTrainableState``), or of a user's own loop."""

    modules: Sequence[nn.Module]
    names: Mapping[int, str]
    """Name of each parameter and buffer, by ``id``."""
    trained: Sequence[Tensor]
    """Parameters that have gradients."""
    optimizers: Sequence[Optimizer]
    average: Sequence[Tensor]
    """Averages of the trained parameters; empty if there are none."""
    changes_gradients: bool
    """True if an optimizer may change the gradients that it gets."""

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return self.trained[0].device

    @property
    def rate(self) -> float:
        """Learning rate of the first parameter group of the first optimizer."""
        return float(self.optimizers[0].param_groups[0]["lr"])

    @abstractmethod
    def update(self, rate: float, step: int) -> None:
        """Updates the parameters with their ``grad``; ``step`` counts from 0."""

    def on_evaluated(self, done: int, loss: float) -> None:  # noqa: B027 - most objects do not need it
        """The model was evaluated after ``done`` steps; the loss is the same at every rank."""

    @abstractmethod
    def json_state(self) -> dict[str, Any]:
        """State that is not in tensors, in the form that JSON has."""

    @abstractmethod
    def load_json_state(self, state: Mapping[str, Any]) -> None:
        """Loads what ``json_state`` returned, on this rank or another one."""

    @abstractmethod
    def trial_state(self) -> StateTemplate:
        """What the optimizers keep of each trained parameter after a step, tried on copies."""


class JobTrainableState(TrainableState):
    """Model, optimizer, scheduler and averaged weights of one rank of a job."""

    def __init__(self, job: Job, settings: Settings, model: nn.Module, steps_per_epoch: int) -> None:
        self._job, self._all_settings = job, settings
        self.model, self.modules, self.names = model, [model], names_of(model)
        self.optimizer = make_optimizer(job, settings, model)
        self.optimizers = [self.optimizer]
        self.scheduler = make_scheduler(job, self.optimizer)
        self.trained = [one for one in model.parameters() if one.requires_grad]
        self.average = [one.detach().clone() for one in self.trained] if job.ema else []
        """Exponential moving average of the trained parameters; empty if the job wants none."""
        self._decay, self._settings, self._steps_per_epoch = job.ema, settings.optimizer, steps_per_epoch
        self._every_epoch = job.scheduler_interval == "epoch"
        self._evaluated = -1
        """Number of steps done at the last evaluation that a ReduceLROnPlateau has seen; -1: none."""
        self._base_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.changes_gradients = not keeps_gradients(self.optimizer)

    def update(self, rate: float, step: int) -> None:
        """Updates the parameters with their ``grad``.

        ``rate``: the learning rate of the settings' schedule at this step; groups keep their proportions to it.
        """
        if self.scheduler is None:
            factor = rate / self._settings.lr
            for group, base in zip(self.optimizer.param_groups, self._base_rates, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(base * factor)
                else:
                    group["lr"] = base * factor
        self.optimizer.step()
        due = not self._every_epoch or (step + 1) % self._steps_per_epoch == 0
        if due and isinstance(self.scheduler, LRScheduler) and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        if self.average:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.average), [one.detach() for one in self.trained], 1.0 - self._decay)

    def on_evaluated(self, done: int, loss: float) -> None:
        """Gives a ``ReduceLROnPlateau`` the loss of the evaluation after ``done`` steps, the same at every rank.

        After a recovery the same evaluation may come again, at ranks that have had it and at ranks that have not.
        """
        if isinstance(self.scheduler, ReduceLROnPlateau) and done > self._evaluated:
            self.scheduler.step(loss)
            self._evaluated = done

    def trial_state(self) -> StateTemplate:
        if keeps_gradients(self.optimizer) and sum(parameter.numel() for parameter in self.trained) > TRIED_ELEMENTS:
            small = small_twin(self.model)
            trained = [parameter for parameter in small.parameters() if parameter.requires_grad]
            template_of_small = trial_state([make_optimizer(self._job, self._all_settings, small)], trained)
            if (template := _enlarged(template_of_small, trained, self.trained)) is not None:
                return template

        def parts_of(twin: nn.Module) -> tuple[Sequence[Optimizer], Sequence[Tensor]]:
            trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]
            return [make_optimizer(self._job, self._all_settings, twin)], trained

        tensors = [*self.model.parameters(), *self.model.buffers()]
        return trial_of_copy(self.model, tensors, parts_of)

    # ---- state that is not in tensors

    def json_state(self) -> dict[str, Any]:
        """The values of parameter groups and of the scheduler, in the form that JSON has."""
        scheduler = None if self.scheduler is None else json_values(self.scheduler.state_dict(), "lr_scheduler")
        return {"groups": json_groups(self.optimizer), "scheduler": scheduler, "evaluated": self._evaluated}

    def load_json_state(self, state: Mapping[str, Any]) -> None:
        """Loads what ``json_state`` returned, on this rank or another one."""
        self._evaluated = int(state["evaluated"])
        load_groups(self.optimizer, state["groups"])
        if self.scheduler is not None and state["scheduler"] is not None:
            load_scheduler(self.scheduler, state["scheduler"])


def _like(value: Any, own: Any) -> Any:
    """A value of JSON in the type of the scheduler's own: JSON has no tuples, no tensors, and only texts as keys."""
    if isinstance(own, tuple):
        return tuple(value)
    if isinstance(own, Tensor):
        return torch.full_like(own, value)
    if isinstance(own, Mapping) and isinstance(value, Mapping):
        by_text = {str(key): key for key in own}
        rebuilt = {by_text.get(key, _number(key)): one for key, one in value.items()}
        return type(own)(rebuilt)  # type: ignore[call-arg]  # MultiStepLR keeps a Counter
    return value


def _number(key: str) -> Any:
    return int(key) if key.lstrip("-").isdigit() else key


def small_twin(model: nn.Module) -> nn.Module:
    """A copy of a model whose parameters have few elements, and as many dimensions; it shares the buffers.

    An optimizer's step on it costs milliseconds whatever the size of the model.
    """
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        few = parameter.detach()[tuple(slice(0, 2 + axis) for axis in range(parameter.dim()))].clone()
        memo[id(parameter)] = nn.Parameter(few, parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _enlarged(template: StateTemplate, small: Sequence[Tensor], trained: Sequence[Tensor]) -> StateTemplate | None:
    """The template of parameters, from that of a ``small_twin``; None if it does not follow from the shapes.

    Its tensors have no elements: a template says types and shapes.
    """
    enlarged: StateTemplate = []
    for kept, few, parameter in zip(template, small, trained, strict=True):
        enlarged.append({})
        for key, value in kept.items():
            if isinstance(value, Tensor) and value.dim():
                if value.shape != few.shape:
                    return None
                value = torch.empty(parameter.shape, dtype=value.dtype, device="meta")
            enlarged[-1][key] = value
    return enlarged


def _python_type(dtype: torch.dtype) -> type:
    if dtype == torch.bool:
        return bool
    return complex if dtype.is_complex else float if dtype.is_floating_point else int


class _ReadAsOne(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which a number that is read from a tensor without values, as by ``item()``, is 1."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As that of ``ShapesOnly``."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _python_type(args[0].dtype)(1)
        return func(*args, **(kwargs or {}))


def trial_of_copy(
    original: Copied,
    tensors: Sequence[Tensor],
    parts_of: Callable[[Copied], tuple[Sequence[Optimizer], Sequence[Tensor]]],
) -> StateTemplate:
    """What the optimizers of a copy keep of each parameter: ``trial_state`` of what ``parts_of`` makes of the copy.

    ``tensors``: those of the original. If they are large the copy has tensors with shapes, types and devices, and no
    values, if the optimizers can do without: it takes neither their memory nor the time of a step. What an optimizer
    really keeps is compared with the result in training (``CustomState``).
    """
    if sum(tensor.numel() for tensor in tensors) > TRIED_ELEMENTS:
        try:
            mode, memo = FakeTensorMode(), dict[int, Any]()
            for tensor in tensors:
                fake = mode.from_tensor(tensor.detach())
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
            with mode, _ReadAsOne():  # type: ignore[no-untyped-call]
                template = trial_state(*parts_of(copy.deepcopy(original, memo)))
            return [{key: _shape_of(value) for key, value in kept.items()} for kept in template]
        except Exception:  # kernels of its own, or a mistake, which the step below reports
            log.debug("the optimizer is tried with values", exc_info=True)
    return trial_state(*parts_of(copy.deepcopy(original)))


def _shape_of(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, Tensor) else value


def _needs_closure(optimizer: Optimizer) -> bool:
    """Whether ``step`` cannot be called without an argument: the only one that an optimizer takes is the closure."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    # Of the class: a scheduler replaces the method of the object. The first parameter is ``self``.
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    return any(one.default is one.empty and one.kind not in variadic for one in parameters)


def trial_state(optimizers: Sequence[Optimizer], trained: Sequence[Tensor]) -> StateTemplate:
    """What optimizers keep of each parameter after a step with gradients of 0. Changes both: give copies.

    Raises if an optimizer cannot make a step without a closure.
    """
    for one in trained:
        one.grad = torch.zeros_like(one)
    found: StateTemplate = [{} for _ in trained]
    index = {id(one): number for number, one in enumerate(trained)}
    for number, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        if _needs_closure(optimizer):
            raise InvalidArgument(
                f"optimizer: {kind} calls the loss by itself (step(closure)), which a batch in shards does not allow; "
                "use another one"
            )
        optimizer.step()
        for parameter, kept in optimizer.state.items():
            for key, value in kept.items():
                if not isinstance(key, str) or not isinstance(value, (Tensor, *JSON_TYPES)):
                    raise InvalidArgument(
                        f"optimizer: {kind} keeps {key!r}, {type(value).__name__}, of a parameter; Hoop can replicate "
                        "tensors, numbers and texts"
                    )
                found[index[id(parameter)]][number, key] = value
    return found
