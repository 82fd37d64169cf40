"""A user's loss in custom training: how it is called, and how the losses of shards make up the loss of a batch.

    loss(outputs, targets)   the batch is a pair: ``model`` is called with the inputs
    loss(model, batch)       the loss calls the model; the only form for other batches. For pairs it is this form if it
                             cannot be called with outputs and targets

It returns one of these, or a dict with one of them as ``loss`` and more metrics by name:

    a value a sample     their mean is minimised
    (sum, count)         a sum over ``count`` tokens, pixels or weights; sum / count over the whole batch is minimised
    a scalar             what it is the mean or the sum of is known by its type (``torch_losses``), read from its graph
                         at every call (``loss_graph``), or stated by the job's ``reduction``; else it is refused

Every shard adds its sum and its weight. The sums are added over the shards in a fixed order and divided by the sum of
the weights once, so that a mean is the mean over the whole batch, however it is cut.

Before the first step the loss is called for a few samples, and for parts of them (``find_loss``). This can only refuse
a loss, because it compares samples with each other; its values never decide what a loss is.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hoop.data.dataset import Indices
from hoop.data.structured import StructuredDataset, split_pair
from hoop.engine.loss_graph import Basis, Reading, last_operation, read
from hoop.engine.loss_trial import CUTS, FEW, Decomposition, ShapesOnly, no_side_effects, sample_indices, without_values
from hoop.engine.stage.autograd import MEAN, NONE, SUM, function_name, loss_on, naming_wrong_targets, num_correct
from hoop.engine.torch_losses import ClassMean, is_torch_module, stated_reduction
from hoop.errors import HoopError, InvalidArgument

log = logging.getLogger("hoop.engine")
COUNTED = "(sum, count)"
"""The reduction of a loss that returns its sum and its count."""
LOSS_KEY = "loss"
MAX_METRICS = 64
_REMEDY = (
    "if it is the mean over its samples write hoop.train(…, reduction='mean') or hoop.Job(…, reduction='mean'), if "
    "it is their sum reduction='sum'; or return a value a sample, or (sum, count), whose quotient over the whole batch "
    "is then minimised, for example 'return losses.sum(), losses.numel()'"
)


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
    basis: Basis | None = None
    """What a scalar is the mean or the sum of, by its graph, which is read at every call; None: known otherwise."""

    @property
    def minimised(self) -> str:
        return SUM if self.returns == SUM else MEAN

    def __call__(self, model: nn.Module, batch: Any, samples: int) -> ShardLoss:
        """Calls the loss for a shard of this many samples. Raises if it returns something else than in the trial."""
        wants_gradient = torch.is_grad_enabled()
        with torch.set_grad_enabled(wants_gradient or self.basis is not None):
            shard_loss = self._shard_loss(*self._call(model, batch), samples)
        return shard_loss if wants_gradient else replace(shard_loss, objective=shard_loss.objective.detach())

    def _shard_loss(self, returned: Any, correct: float | None, samples: int) -> ShardLoss:
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
        device = next(model.parameters()).device
        function = self.function.on(device) if isinstance(self.function, ClassMean) else loss_on(self.function, device)
        if self.takes_model:
            return function(model, batch), None
        inputs, targets = split_pair(batch, self.data_name)
        outputs = call_model(model, inputs)
        if is_torch_module(self.function) and not isinstance(outputs, Tensor):
            raise InvalidArgument(
                f"loss: {self.function} takes a tensor, and the model returned {type(outputs).__name__}; give a "
                "function of (outputs, targets), such as lambda outputs, targets: F.mse_loss(outputs['values'], "
                "targets)"
            )
        with naming_wrong_targets(outputs, targets):
            returned = function(outputs, targets)
        classified = isinstance(outputs, Tensor) and isinstance(targets, Tensor) and not targets.is_floating_point()
        classified = classified and outputs.dim() > 1 and not outputs.is_meta
        return returned, float(num_correct(outputs.detach(), targets)) if classified else None

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
        reading = read(found)
        if self.basis is not None:
            if reading is None or not self.basis.fits(reading, samples):
                raise unknown_scalar(self.function, found, reading, samples)
            return self.basis.sum_and_weight(found, reading, samples)
        check_stated(self.function, self.returns, reading)
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
    weight = 1.0 if isinstance(count, Tensor) and count.is_meta else float(count)
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


def check_stated(function: Any, stated: str, reading: Reading | None) -> None:
    """Raises if the job states the mean over the samples, and the loss ignores some targets or weights them."""
    if stated == MEAN and reading is not None and not reading.is_dense:
        raise InvalidArgument(
            f"reduction: 'mean' is stated, the mean over the samples, and {function_name(function)} returned a "
            f"cross-entropy over {reading.weight:g} of {reading.elements} targets, because targets are ignored "
            f"({reading.ignored}) or classes have weights; leave reduction out: Hoop then counts them"
        )


def without_gradient(function: Any) -> InvalidArgument:
    """The error for a loss from which no gradient goes to the model."""
    return InvalidArgument(
        f"loss: no gradient goes from what {function_name(function)} returned to the model; compute it from its "
        "outputs without .detach(), .item(), .argmax() and torch.no_grad()"
    )


def unknown_scalar(function: Any, loss: Tensor, reading: Reading | None, samples: int) -> InvalidArgument:
    """The error for a scalar whose reduction is not known."""
    if reading is None:
        what = f"its last operation, {last_operation(loss)}, does not say of what it is the mean or the sum"
    else:
        of_classes = f" of {reading.classes} classes" if reading.classes else ""
        what = (
            f"it is the {reading.kind} of {reading.elements} values{of_classes} for {samples} samples, which is not "
            "the same for every number of samples"
        )
    return InvalidArgument(f"loss: {function_name(function)} returned a scalar, and {what}; {_REMEDY}")


def check_callable(function: Any) -> None:
    """Raises if a loss cannot be called with two arguments."""
    if isinstance(function, nn.Module):
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # some callables have no signature: the call itself decides
    try:
        signature.bind(None, None)
    except TypeError:
        raise InvalidArgument(
            f"loss: {function_name(function)}{signature} is called with two arguments, (outputs, targets) or (model, "
            "batch); make it a function of these"
        ) from None


def is_pair(batch: Any) -> bool:
    """Whether a batch is inputs and targets."""
    return isinstance(batch, tuple | list) and len(batch) == 2


def with_form(loss: CustomLoss, model: nn.Module, batch: Any) -> tuple[CustomLoss, Any, float | None]:
    """The loss in the form in which it can be called, with what it returned and the number of correct samples.

    Losses of PyTorch and of Hoop take outputs and targets. Another takes the model and the batch if the batch is no
    pair, or if it cannot be called with outputs and targets.
    """
    function = loss.function
    takes_outputs = is_torch_module(function) or isinstance(function, OutputsLoss | ClassMean)
    if not is_pair(batch) and not takes_outputs:
        loss = replace(loss, takes_model=True)
        return loss, *loss._call(model, batch)
    try:
        return loss, *loss._call(model, batch)
    except Exception as error:
        if takes_outputs or isinstance(error, HoopError):
            raise
        with_model = replace(loss, takes_model=True)
        try:
            return with_model, *with_model._call(model, batch)
        except Exception as other:
            if "not callable" in str(error):  # it has called the outputs: it takes the model
                raise other from None
            raise error from None


class OutputsLoss:
    """A loss that is known to be a function of outputs and targets."""


def find_loss(function: Any, stated: str | None, data: StructuredDataset, model: nn.Module, seed: int) -> CustomLoss:
    """The loss with its form and its reduction, from calls on a few training samples; raises if they are not known.

    The calls have no side effects: random generators and buffers are restored. ``stated``: the job's reduction.
    """
    if (mean := ClassMean.of(function)) is not None:
        mean.check(stated)
        function, stated = mean, None
    check_callable(function)
    loss = CustomLoss(function, False, stated or MEAN, data_name=data.name)
    known = stated or stated_reduction(function)

    def load(part: Indices) -> Any:
        return data.load(part, epoch=0, seed=seed)

    with no_side_effects(model, function):
        indices = sample_indices(model, len(data), load)
        if len(indices) == FEW:  # a large model: first without computing
            try:
                shapes, empty = replace(loss, function=without_values(function)), without_values(model)
                with ShapesOnly():  # type: ignore[no-untyped-call]
                    tried = _tried(shapes, known, empty, indices, load)
                return replace(tried, function=function)
            except Exception:  # code that looks at values, or a mistake, which the calls below report
                log.debug("the loss is tried with values", exc_info=True)
        return _tried(loss, known, model, indices, load)


def _tried(
    loss: CustomLoss, known: str | None, model: nn.Module, indices: Indices, load: Callable[[Indices], Any]
) -> CustomLoss:
    """The loss with its form and its reduction, from calls on these samples. ``known``: its reduction, if it is."""
    training = model.training
    try:
        model.train()
        loss, returned, correct = with_form(loss, model, load(indices))
        value, extra = _split_metrics(loss.function, returned)
        form = _form_of(loss.function, value, known, len(indices))
        scalar = value[0] if form == COUNTED else value
        if not scalar.requires_grad:
            raise without_gradient(loss.function)
        loss = replace(loss, metric_names=tuple(sorted(extra)), returns=form or MEAN)
        if form is None:
            model.eval()  # without dropout the loss is a function of its samples
            basis = _basis(loss, model, indices, load, scalar)
            loss = replace(loss, returns=basis.kind, basis=basis)
        if not scalar.is_meta:
            loss._shard_loss(returned, correct, len(indices))
        return loss
    finally:
        model.train(training)


def _form_of(function: Any, value: Any, known: str | None, samples: int) -> str | None:
    """What a loss returns; None: a scalar whose reduction is not known."""
    if isinstance(value, tuple | list):
        if known is not None:
            raise InvalidArgument(
                f"reduction: {known!r} is stated, and {function_name(function)} returns (sum, count); leave it out"
            )
        _counted(function, value)
        return COUNTED
    loss = _as_loss(function, value, samples)
    if known is not None:
        return known
    return NONE if loss.numel() > 1 else None


def _basis(
    loss: CustomLoss, model: nn.Module, indices: Indices, load: Callable[[Indices], Any], tried: Tensor
) -> Basis:
    """What a scalar loss is the mean or the sum of, from its graph; raises if it depends on how samples are cut.

    ``tried``: the loss of all of these samples in training. Without values its graph and that of the first part say all
    that can be compared.
    """

    def call(part: Indices) -> tuple[Tensor, Reading | None]:
        returned, _ = loss._call(model, load(part))
        value = _as_loss(loss.function, _split_metrics(loss.function, returned)[0], len(part)).reshape(())
        return value, read(value)

    parts = [indices[low:high] for low, high in itertools.pairwise([0, *CUTS[len(indices)][0], len(indices)])]
    if tried.is_meta:
        calls = [(len(indices), tried.reshape(()), read(tried.reshape(()))), (len(parts[0]), *call(parts[0]))]
    else:
        calls = [(len(part), *call(part)) for part in (indices, *parts)]
    basis = Basis.of([(reading, samples) for samples, _, reading in calls])
    if basis is None:
        samples, value, reading = calls[0]
        raise unknown_scalar(loss.function, value, reading, samples)
    if calls[0][1].is_meta:
        return basis
    sums = [basis.numbers(value, reading, samples) for samples, value, reading in calls if reading is not None]
    check_parts(loss.function, basis.kind, sums, calls[0][1].dtype)
    return basis


def check_parts(function: Any, kind: str, sums: Sequence[tuple[float, ...]], dtype: torch.dtype) -> None:
    """Raises if the sum over some samples is not that of their parts: a loss that compares samples with each other.

    ``sums``: sum and weight of all samples, then of each part.
    """
    (whole, _), *parts = sums
    decomposition = Decomposition(whole, tuple(total for total, _ in parts))
    if decomposition.is_conclusive and not decomposition.fits(dtype):
        raise InvalidArgument(
            f"loss: {function_name(function)} returned a {kind}, and its value for some samples, {whole:g} as a "
            f"sum, is not that of parts of them, {decomposition.sum:g}: it compares samples with each other, so shards "
            f"would not add up to the batch. Use shards=1, or return a value a sample or (sum, count)"
        )


def needs_custom(model: nn.Module) -> bool:
    """Whether a model has trained weights or buffers of another type than float32; raises for trained float16."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise InvalidArgument(
                f"model: {name} is float16, in which gradients below 6e-8 are 0 and numbers above 65504 are infinite; "
                "train it as bfloat16, model.bfloat16(), or as float32 with precision='bfloat16'"
            )
    trained = [one for one in model.parameters() if one.requires_grad]
    floating = [one for one in [*trained, *model.buffers()] if one.is_floating_point()]
    return any(one.dtype != torch.float32 for one in floating) or any(one.is_complex() for one in trained)
