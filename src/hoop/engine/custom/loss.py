"""A user's loss in custom training: how it is called, and how the losses of shards make up the loss of a batch.

    loss(outputs, targets)   the batch is a pair: ``model`` is called with the inputs
    loss(model, batch)       the loss calls the model; the first parameter is named ``model``

It returns one of these, or a dict with one of them as ``loss`` and more metrics by name:

    a scalar             the mean or the sum over the samples: Hoop finds out which, or ``reduction`` states it
    a value a sample     their mean is minimised
    (sum, count)         a sum over ``count`` tokens, pixels or weights; sum / count over the whole batch is minimised

Every shard adds its sum and its weight. The sums are added over the shards in a fixed order and divided by the sum of
the weights once, so that a mean is the mean over the whole batch, however it is cut.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoop.data.dataset import Indices
from hoop.data.structured import StructuredDataset, split_pair
from hoop.engine.loss_trial import CUTS, SAMPLES, Decomposition, no_side_effects
from hoop.engine.stage.autograd import MEAN, NONE, SUM, function_name, num_correct
from hoop.errors import InvalidArgument

COUNTED = "(sum, count)"
"""The reduction of a loss that returns its sum and its count."""
LOSS_KEY = "loss"
_LOSS_MODULES = "torch.nn.modules.loss"
MAX_METRICS = 64
_REMEDY = (
    "return (sum, count), whose quotient over the whole batch is then minimised, or state what Hoop is to take it for, "
    "reduction='mean' or 'sum', in hoop.train or hoop.Job"
)


def takes_model(function: Any) -> bool:
    """Whether a loss is a function of (model, batch): its first parameter is named ``model``."""
    if isinstance(function, nn.Module | str):
        return False
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return bool(parameters) and parameters[0] == "model"


def call_model(model: nn.Module, inputs: Any) -> Any:
    """``model`` of the inputs of a batch: of a dict as keyword arguments, of a tuple as arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


@dataclass(frozen=True)
class ShardLoss:
    """The loss of one shard."""

    objective: Tensor
    """Contribution of the shard to the sum over the batch; its gradient is the shard's gradient."""
    weight: float
    """Weight of the shard in the batch: its number of samples, or its count."""
    metrics: Mapping[str, tuple[float, float]]
    """Sum and weight of each further metric, by name."""
    correct: float | None = None
    """Number of samples classified correctly; None if the outputs are not those of a classification."""


@dataclass(frozen=True)
class CustomLoss:
    """A user's loss with its reduction."""

    function: Callable[[Any, Any], Any]
    takes_model: bool
    returns: str
    """Reduction that the function applies: ``mean``, ``sum``, ``none`` (a value per sample) or ``COUNTED``."""
    metric_names: tuple[str, ...] = ()
    data_name: str = "data"

    @property
    def minimised(self) -> str:
        return SUM if self.returns == SUM else MEAN

    def __call__(self, model: nn.Module, batch: Any, samples: int) -> ShardLoss:
        """Calls the loss for a shard of this many samples. Raises if it returns something else than in the trial."""
        returned, correct = self._call(model, batch)
        value, extra = _split_metrics(self.function, returned)
        total, weight = self._sum_and_weight(value, samples)
        if set(extra) != set(self.metric_names):
            raise InvalidArgument(
                f"loss: {function_name(self.function)} returned the metrics {sorted(extra)}, and "
                f"{list(self.metric_names)} before; return the same ones for every batch"
            )
        metrics = {name: _metric(name, extra[name], samples) for name in self.metric_names}
        return ShardLoss(total, weight, metrics, correct)

    def _call(self, model: nn.Module, batch: Any) -> tuple[Any, float | None]:
        if self.takes_model:
            return self.function(model, batch), None
        inputs, targets = split_pair(batch, self.data_name)
        outputs = call_model(model, inputs)
        if type(self.function).__module__ == _LOSS_MODULES and not isinstance(outputs, Tensor):
            raise InvalidArgument(
                f"loss: {self.function} takes a tensor, and the model returned {type(outputs).__name__}; give a "
                "function of (outputs, targets), such as lambda outputs, targets: F.cross_entropy(outputs['logits'], "
                "targets)"
            )
        returned = self.function(outputs, targets)
        classified = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and not targets.is_floating_point()
        return returned, float(num_correct(outputs.detach(), targets)) if classified and outputs.dim() > 1 else None

    def _sum_and_weight(self, value: Any, samples: int) -> tuple[Tensor, float]:
        if self.returns == COUNTED:
            return _counted(self.function, value)
        found = _as_loss(self.function, value, samples)
        if self.returns == NONE:
            if found.dim() == 0 or len(found) != samples:
                raise InvalidArgument(
                    f"loss: {function_name(self.function)} returned a tensor of shape {list(found.shape)} for "
                    f"{samples} samples, and one value a sample before"
                )
            return (found.flatten(1).mean(1) if found.dim() > 1 else found).sum(), float(samples)
        if found.numel() != 1:
            raise InvalidArgument(
                f"loss: {function_name(self.function)} returned a tensor of shape {list(found.shape)}, and its "
                f"reduction is {self.returns!r}: a scalar; state another reduction, or return that"
            )
        found = found.reshape(())
        return (found if self.returns == SUM else found * samples), float(samples)

    def reported(self, total: float, weight: float) -> float:
        """The loss of a batch from the sums over its shards."""
        if self.returns == SUM:
            return total
        return total / weight if weight else 0.0

    def normalisation(self, weight: float) -> float:
        """The factor for the sum of the shards' gradients, from the sum of their weights."""
        return 1.0 if self.returns == SUM or not weight else 1.0 / weight


def _split_metrics(function: Any, returned: Any) -> tuple[Any, Mapping[str, Any]]:
    if not isinstance(returned, Mapping):
        return returned, {}
    if LOSS_KEY not in returned:
        raise InvalidArgument(
            f"loss: {function_name(function)} returned a dict with {', '.join(map(repr, returned)) or 'nothing'}; it "
            f"needs {LOSS_KEY!r}, the loss, beside other metrics"
        )
    extra = {str(name): value for name, value in returned.items() if name != LOSS_KEY}
    if len(extra) > MAX_METRICS:
        raise InvalidArgument(
            f"loss: {function_name(function)} returned {len(extra)} metrics; {MAX_METRICS} is the most"
        )
    return returned[LOSS_KEY], extra


def _as_loss(function: Any, value: Any, samples: int) -> Tensor:
    if not isinstance(value, Tensor):
        raise InvalidArgument(
            f"loss: {function_name(function)} returned {type(value).__name__}; return the loss as a scalar tensor (the "
            "mean or the sum over the samples), a value a sample, (sum, count), or a dict with one of them as 'loss'"
        )
    if value.numel() != 1 and (not value.dim() or len(value) != samples):
        raise InvalidArgument(
            f"loss: {function_name(function)} returned a tensor of shape {list(value.shape)} for {samples} samples; "
            "return a scalar (the mean or the sum over the samples), a value a sample, or (sum, count)"
        )
    return value


def _counted(function: Any, value: Any) -> tuple[Tensor, float]:
    if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[0], Tensor):
        raise InvalidArgument(
            f"loss: {function_name(function)} returned {type(value).__name__}, and (sum, count) before"
        )
    total, count = value
    if total.numel() != 1 or (isinstance(count, Tensor) and count.numel() != 1):
        raise InvalidArgument(
            f"loss: {function_name(function)} returned (sum, count) with a sum of shape {list(total.shape)}; both are "
            "scalars"
        )
    weight = float(count)
    if not 0 <= weight < float("inf"):
        raise InvalidArgument(f"loss: {function_name(function)} returned the count {weight}, which is not 0 or more")
    return total.reshape(()), weight


def _metric(name: str, value: Any, samples: int) -> tuple[float, float]:
    """Sum and weight: of a value that is a mean over the samples, or of (sum, count)."""
    try:
        if isinstance(value, tuple | list) and len(value) == 2:
            return float(value[0]), float(value[1])
        return float(value) * samples, float(samples)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgument(
            f"loss: the metric {name!r} is {type(value).__name__}; give a number or a scalar tensor, the mean over the "
            "samples, or (sum, count)"
        ) from None


def find_loss(function: Any, stated: str | None, data: StructuredDataset, model: nn.Module, seed: int) -> CustomLoss:
    """The loss with its reduction, from trial calls on training samples; raises if it cannot be found out.

    The trial calls have no side effects: random generators and buffers are restored. ``stated``: the job's reduction.
    """
    loss = CustomLoss(function, takes_model(function), stated or MEAN, data_name=data.name)
    indices = np.linspace(0, len(data) - 1, SAMPLES).astype(np.int64)
    training = model.training
    with no_side_effects(model, function):
        try:
            model.train()
            returned, _ = loss._call(model, data.load(indices, epoch=0, seed=seed))
            value, extra = _split_metrics(function, returned)
            loss = replace(loss, metric_names=tuple(sorted(extra)), returns=_form_of(function, value, stated))
            found = loss(model, data.load(indices, epoch=0, seed=seed), SAMPLES)
            if not found.objective.requires_grad:
                raise InvalidArgument(
                    f"loss: no gradient goes from what {function_name(function)} returned to the model; compute it "
                    "from its outputs without .detach(), .item(), .argmax() and torch.no_grad()"
                )
            if stated is None and loss.returns == MEAN:
                model.eval()  # without dropout the loss is a function of its samples
                with torch.no_grad():
                    loss = replace(loss, returns=_scalar_reduction(loss, model, data, indices, seed))
        finally:
            model.train(training)
    return loss


def _form_of(function: Any, value: Any, stated: str | None) -> str:
    if isinstance(value, tuple | list):
        if stated is not None:
            raise InvalidArgument(
                f"reduction: {stated!r} is stated, and {function_name(function)} returns (sum, count); leave it out"
            )
        _counted(function, value)
        return COUNTED
    found = _as_loss(function, value, SAMPLES)
    if stated is not None:
        return stated
    return NONE if found.numel() > 1 else MEAN


def _scalar_reduction(loss: CustomLoss, model: nn.Module, data: StructuredDataset, indices: Indices, seed: int) -> str:
    """``mean`` or ``sum``: compares the loss of all samples with the losses of parts of them."""

    def value(part: Indices) -> float:
        returned, _ = loss._call(model, data.load(part, epoch=0, seed=seed))
        return float(_as_loss(loss.function, _split_metrics(loss.function, returned)[0], len(part)).reshape(()))

    possible = {MEAN, SUM}
    whole = value(indices)
    for ends in CUTS:
        parts = [(high - low, value(indices[low:high])) for low, high in itertools.pairwise([0, *ends, len(indices)])]
        one = Decomposition(whole, parts)
        if one.is_conclusive:
            possible = {reduction for reduction in possible if one.fits(reduction)}
            if not possible:
                raise InvalidArgument(
                    f"loss: {function_name(loss.function)} is neither the mean nor the sum over its samples: for "
                    f"{one.samples} samples it is {one.whole:g}, for parts of them {one.mean:g} as a mean and "
                    f"{one.sum:g} as a sum. A mean over tokens, class weights, ignore_index and comparisons between "
                    f"samples do this, and shards would not add up to the batch; {_REMEDY}"
                )
    if len(possible) != 1:
        raise InvalidArgument(
            f"loss: whether {function_name(loss.function)} is the mean or the sum over its samples cannot be found "
            f"out: it is {whole:g} for the model's first outputs; {_REMEDY}"
        )
    return possible.pop()


def needs_custom(model: nn.Module) -> bool:
    """Whether a model has trained weights or buffers of another type than float32."""
    trained = [one for one in model.parameters() if one.requires_grad]
    floating = [one for one in [*trained, *model.buffers()] if one.is_floating_point()]
    return any(one.dtype != torch.float32 for one in floating) or any(one.is_complex() for one in trained)
