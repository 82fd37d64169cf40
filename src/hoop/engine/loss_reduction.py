"""The reduction of a loss of (outputs, targets), and which path trains it: the flat one, or ``engine/custom``.

    (1) a value a sample is known by its shape                                  ──▶ none
    (2) a scalar is known by its type (``torch_losses``), read from its graph
        (``loss_graph``), or stated by the job                                  ──▶ mean or sum, else an error
    (3) a mean over the targets that count (class weights, ignored labels)      ──▶ (sum, count), by ``engine/custom``
    (4) the loss of some samples is compared with the losses of parts of them: this may only refuse it
    (5) in training, what was read is read again for every shard

The trial calls have no side effects: random generators and buffers are restored. The loss itself is computed in
``stage/autograd.py``, or in ``custom/loss.py`` for jobs of ``engine/custom``.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoop.data.dataset import Dataset
from hoop.data.structured import StructuredDataset, structured
from hoop.engine.custom.loss import (
    CustomLoss,
    OutputsLoss,
    check_callable,
    check_parts,
    check_stated,
    find_loss,
    needs_custom,
    unknown_scalar,
    without_gradient,
)
from hoop.engine.job import Job, build_model
from hoop.engine.loss_graph import Basis, Reading, read
from hoop.engine.loss_trial import CUTS, TOLERANCE, no_side_effects, sample_indices
from hoop.engine.stage.autograd import (
    MEAN,
    NONE,
    SUM,
    Criterion,
    Loss,
    Objective,
    call_loss,
    function_name,
    loss_named,
    naming_wrong_targets,
)
from hoop.engine.torch_losses import ClassMean, is_torch_module, stated_reduction
from hoop.errors import InvalidArgument

IGNORED = -100
"""The target that PyTorch's losses over classes ignore by default."""


def with_criterion(job: Job, data: Dataset | StructuredDataset, seed: int, model: nn.Module | None = None) -> Job:
    """Return the job with a ``Criterion``, or with a ``CustomLoss`` if it has to be trained by ``engine/custom``.

    Raises if the reduction is not known and the job does not state it. Every process that computes a loss calls it
    before the first step, with the training data. ``model``: by default the job's own, which is only built if it is
    needed.
    """
    function: Any = job.loss
    if isinstance(function, CustomLoss | Criterion):
        return job
    if isinstance(data, StructuredDataset):
        return _with_custom_loss(job, data, seed, _model_of(job, seed, model))
    targets = known_targets(data)
    if isinstance(function, str):
        _check_named(function, targets)
        if model is None and not job.has_own_parts:
            return job
    model = _model_of(job, seed, model)
    if job.has_own_parts or needs_custom(model):
        return _with_custom_loss(job, data, seed, model)
    if isinstance(function, str):
        return job
    check_callable(function)
    class_mean = ClassMean.of(function)
    if class_mean is not None:
        class_mean.check(job.reduction)
    if class_mean is not None and targets is not None and not class_mean.is_dense(targets):
        return _with_custom_loss(job, data, seed, model)
    indices = sample_indices(model, len(data), lambda part: data.batch(part, epoch=0, seed=seed))
    inputs, targets = data.batch(indices, epoch=0, seed=seed)
    with no_side_effects(model, function):
        with torch.no_grad():
            outputs: Any = model(inputs)
        value = _call(function, outputs, targets) if isinstance(outputs, Tensor) else None
        if value is None or (class_mean is not None and not class_mean.is_dense(targets)):
            criterion = None
        elif class_mean is not None:
            criterion = Criterion.of(function, MEAN, _Counted(class_mean))
        else:
            criterion = find_criterion(function, job.reduction, outputs, targets)
        if criterion is not None:
            Objective(criterion)(outputs, targets, len(targets))  # raises if there is no gradient
            return dataclasses.replace(job, loss=criterion)
    return _with_custom_loss(job, data, seed, model)


def _model_of(job: Job, seed: int, model: nn.Module | None) -> nn.Module:
    if model is not None:
        return model
    with no_side_effects():
        return build_model(job, seed)


def _call(function: Any, outputs: Tensor, targets: Tensor) -> Any:
    """What a loss returns for outputs and targets; None if it is to be called as a custom one.

    That is a loss that cannot be called with them, or that returns (sum, count) or metrics.
    """
    if is_torch_module(function):
        with naming_wrong_targets(outputs, targets):
            return function(outputs, targets)
    try:
        returned = function(outputs, targets)
    except Exception:
        return None  # custom training calls it with the model too, and reports the error
    return None if isinstance(returned, dict | tuple) else returned


def known_targets(data: Any) -> Tensor | None:
    """All targets of a dataset that has them in memory, if they are classes."""
    for name in ("targets", "labels"):
        targets = getattr(data, name, None)
        targets = torch.tensor(targets) if isinstance(targets, np.ndarray) else targets
        if isinstance(targets, Tensor):
            return None if targets.is_floating_point() else targets
    return None


def _check_named(name: str, targets: Tensor | None) -> None:
    """Raises if Hoop's cross-entropy gets targets that are ignored: it is the mean over all of them."""
    if name == "cross_entropy" and targets is not None and bool((targets == IGNORED).any()):
        raise InvalidArgument(
            f"loss: 'cross_entropy' is the mean over all targets, and some are {IGNORED}, which PyTorch ignores; give "
            "loss=torch.nn.CrossEntropyLoss(), the mean over the others"
        )


def _with_custom_loss(job: Job, data: Dataset | StructuredDataset, seed: int, model: nn.Module) -> Job:
    function: Any = job.loss
    stated = job.reduction
    if isinstance(function, str):
        function = _NamedLoss(function, stated == SUM)
        stated = SUM if stated == SUM else None
    return dataclasses.replace(job, loss=find_loss(function, stated, structured(data), model, seed), reduction=None)


class _NamedLoss(OutputsLoss):
    """One of Hoop's losses by name, as (sum, count)."""

    def __init__(self, name: str, as_sum: bool) -> None:
        self._name, self._function, self._as_sum = name, loss_named(name), as_sum

    def __call__(self, outputs: Any, targets: Any) -> Any:
        for field, value in (("the model returned", outputs), ("the targets are", targets)):
            if not isinstance(value, Tensor):
                raise InvalidArgument(
                    f"loss: {self._name!r} takes tensors, and {field} {type(value).__name__}; give a function of "
                    "(outputs, targets), or of (model, batch), that returns the loss"
                )
        _check_named(self._name, None if targets.is_floating_point() else targets)
        total = self._function(outputs, targets)
        return total if self._as_sum else (total, len(targets))


def find_criterion(function: Loss, stated: str | None, outputs: Tensor, targets: Tensor) -> Criterion | None:
    """The criterion of a loss function; None if it is a mean over the targets that count, and not all of them do.

    Raises if its reduction is neither known nor stated.
    """
    outputs = outputs.detach().requires_grad_()
    with torch.enable_grad():
        whole = call_loss(function, outputs, targets)
        known = stated or stated_reduction(function)
        if not whole.requires_grad:
            raise without_gradient(function)
        if known is not None:
            if whole.numel() == 1:
                check_stated(function, known, read(whole))
            return Criterion.of(function, known, None if known == NONE else _Stated(function, known))
        if whole.numel() > 1:
            _check_rows(function, outputs, targets, whole.detach())
            return Criterion.of(function, NONE)
        calls = [(len(targets), whole, read(whole))]
        for low, high in itertools.pairwise([0, *CUTS[len(targets)][0], len(targets)]):
            part = _scalar(function, outputs[low:high], targets[low:high])
            calls.append((high - low, part, read(part)))
        basis = Basis.of([(reading, samples) for samples, _, reading in calls])
        if basis is None:
            raise unknown_scalar(function, whole, read(whole), len(targets))
        readings = [(samples, value, reading) for samples, value, reading in calls if reading is not None]
        if not all(reading.is_dense for _, _, reading in readings):
            return None
        sums = [basis.numbers(value.reshape(()), reading, samples) for samples, value, reading in readings]
    check_parts(function, basis.kind, sums, whole.dtype)
    return Criterion.of(function, basis.kind, _Read(function, basis))


def _scalar(function: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    found = call_loss(function, outputs, targets)
    if found.numel() != 1:
        raise InvalidArgument(
            f"loss: {function_name(function)} returned a scalar for some samples and a tensor of shape "
            f"{list(found.shape)} for {len(targets)}; return a scalar (the mean or the sum over the samples) always, "
            "or a value a sample always"
        )
    return found


def _check_rows(function: Loss, outputs: Tensor, targets: Tensor, whole: Tensor) -> None:
    """Raise if the value of a sample depends on the other samples."""
    for ends in CUTS[len(targets)]:
        for low, high in itertools.pairwise([0, *ends, len(targets)]):
            part = call_loss(function, outputs[low:high], targets[low:high])
            same = part.shape == whole[low:high].shape and torch.allclose(
                part, whole[low:high], rtol=TOLERANCE, atol=TOLERANCE * float(whole.abs().nanmean()), equal_nan=True
            )
            if not same:
                raise InvalidArgument(
                    f"loss: {function_name(function)} returns a value a sample, and those of samples {low} to "
                    f"{high - 1} of {len(targets)} depend on the others: shards would not add up to the batch; use "
                    "shards=1 and return the mean or the sum, stated as reduction='mean' or 'sum' in hoop.train or "
                    "hoop.Job"
                )


def _uncounted(function: Any, targets: str) -> InvalidArgument:
    return InvalidArgument(
        f"loss: {function_name(function)} is a mean over the targets that count, and {targets}, which none of the "
        "samples that were tried before the first step had; so that they are counted in every shard, return (sum, "
        "count) from a loss of (model, batch)"
    )


@dataclass(frozen=True)
class _Counted:
    """Check of a cross-entropy of PyTorch in training (``Criterion.check``): no target of a shard is ignored."""

    loss: ClassMean

    def __call__(self, loss: Tensor, targets: Tensor) -> None:
        if not targets.is_cuda and not self.loss.is_dense(targets):  # asking a GPU would wait for it
            raise _uncounted(self.loss.function, f"a target is {self.loss.ignored}")


@dataclass(frozen=True)
class _Read:
    """Check of a loss that was read from its graph (``Criterion.check``): the graph of a shard says the same."""

    function: Any
    basis: Basis

    def __call__(self, loss: Tensor, targets: Tensor) -> None:
        if loss.grad_fn is None:  # in an evaluation
            return
        reading: Reading | None = read(loss)
        if reading is None or not self.basis.fits(reading, len(targets)):
            raise unknown_scalar(self.function, loss, reading, len(targets))
        if not targets.is_cuda and not reading.is_dense:
            raise _uncounted(self.function, "a target is ignored, or its class has a weight")


@dataclass(frozen=True)
class _Stated:
    """Check of a loss whose reduction is stated (``Criterion.check``): its graph does not say otherwise."""

    function: Any
    stated: str

    def __call__(self, loss: Tensor, targets: Tensor) -> None:
        if self.stated == MEAN and loss.grad_fn is not None and not targets.is_cuda:
            check_stated(self.function, self.stated, read(loss))
