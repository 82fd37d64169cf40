"""Determines the reduction of a user's loss function by calling it: mean, sum, or none (one value a sample).

    (1) compute the model's outputs for some training samples
    (2) compare the loss of all of them with the losses of parts of them:
            the sum of the parts                          ──▶ sum
            the mean of the parts, weighted by samples    ──▶ mean
            one row a sample, the same in every part      ──▶ none
            none of these                                 ──▶ an error, with a remedy
    (3) in training, check a mean again on every shard that contains a new target value: a class with another weight,
        or one that is ignored, may be rare

The trial calls have no side effects: random generators and buffers are restored. The loss itself is computed in
``stage/autograd.py``, or in ``custom/loss.py`` for jobs of ``engine/custom``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoop.data.dataset import Dataset
from hoop.data.structured import StructuredDataset, structured
from hoop.engine.custom.loss import CustomLoss, find_loss, needs_custom, takes_model
from hoop.engine.job import Job, build_model
from hoop.engine.loss_trial import CUTS, SAMPLES, TOLERANCE, Decomposition, no_side_effects
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
)
from hoop.errors import InvalidArgument

_REMEDY = (
    "state what Hoop is to take it for, reduction='mean' or 'sum', in hoop.train or hoop.Job: 'mean' weights each "
    "shard's value by its number of samples, which is exact with shards=1"
)


def with_criterion(job: Job, data: Dataset, seed: int, model: nn.Module | None = None) -> Job:
    """Return the job with a ``Criterion``, or with a ``CustomLoss`` if it has to be trained by ``engine/custom``.

    Raises if the reduction cannot be determined and the job does not state it. Every process that computes a loss calls
    it before the first step, with the training data. ``model``: by default the job's own, which is only built if it is
    needed.
    """
    if isinstance(job.loss, CustomLoss | Criterion):
        return job
    function: Any = job.loss
    custom = job.has_own_parts or takes_model(function) or isinstance(data, StructuredDataset)
    if job.criterion is not None and not custom and model is None:
        return job
    if model is None:
        with no_side_effects():
            model = build_model(job, seed)
    if custom or needs_custom(model):
        return _with_custom_loss(job, data, seed, model)
    if job.criterion is not None:
        return job
    indices = np.linspace(0, len(data) - 1, SAMPLES).astype(np.int64)
    inputs, targets = data.batch(indices, epoch=0, seed=seed)
    with no_side_effects(model, function), torch.no_grad():
        outputs: Any = model(inputs)
        custom = not isinstance(outputs, Tensor) or isinstance(function(outputs, targets), dict | tuple)
    if custom:
        return _with_custom_loss(job, data, seed, model)
    with no_side_effects(model, function), torch.no_grad():
        reduction = reduction_of(function, outputs, targets)
        Objective(Criterion.of(function, reduction))(outputs, targets, SAMPLES)  # raises if there is no gradient
    check = _MeanCheck(function, targets) if reduction == MEAN else None
    return dataclasses.replace(job, loss=Criterion.of(function, reduction, check))


def _with_custom_loss(job: Job, data: Dataset | StructuredDataset, seed: int, model: nn.Module) -> Job:
    function: Any = job.loss
    stated = job.reduction
    if isinstance(function, str):
        function = _NamedLoss(function, stated == SUM)
        stated = SUM if stated == SUM else None
    return dataclasses.replace(job, loss=find_loss(function, stated, structured(data), model, seed), reduction=None)


class _NamedLoss:
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
        total = self._function(outputs, targets)
        return total if self._as_sum else (total, len(targets))


def reduction_of(function: Loss, outputs: Tensor, targets: Tensor) -> str:
    """Return the reduction of a loss function: ``mean``, ``sum`` or ``none``; raises if it has none of them."""
    whole = call_loss(function, outputs, targets)
    if whole.numel() > 1:
        _check_rows(function, outputs, targets, whole)
        return NONE
    weighted = isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss) and function.weight is not None
    if weighted and function.reduction == MEAN and not targets.is_floating_point():  # type: ignore[attr-defined]
        raise InvalidArgument(
            f"loss: {function_name(function)} has class weights, and divides by the weights of its targets instead of "
            f"their number: shards would not add up to the batch. Give it reduction='none' or 'sum', or {_REMEDY}"
        )
    possible, tried = {MEAN, SUM}, []
    for tried_outputs in (outputs, outputs.roll(1, 0)):  # the rolled ones are other valid outputs for these targets
        for ends in CUTS:
            one = decompose(function, tried_outputs, targets, ends)
            if one.is_conclusive:
                possible = {reduction for reduction in possible if one.fits(reduction)}
                tried.append(one)
                if not possible:
                    raise _neither(function, one)
    if len(possible) != 1:
        found = ", ".join(f"{one.whole:g}" for one in tried) or "0, or no number,"
        raise InvalidArgument(
            f"loss: whether {function_name(function)} is the mean or the sum over its samples cannot be found out: it "
            f"is {found} for the model's first outputs; {_REMEDY}"
        )
    return possible.pop()


def decompose(function: Loss, outputs: Tensor, targets: Tensor, ends: Sequence[int]) -> Decomposition:
    """Compute a scalar loss for all samples and for the parts that are cut before the samples ``ends``."""
    parts = [
        (high - low, _scalar(function, outputs[low:high], targets[low:high]))
        for low, high in itertools.pairwise([0, *ends, len(targets)])
    ]
    return Decomposition(_scalar(function, outputs, targets), parts)


def _scalar(function: Loss, outputs: Tensor, targets: Tensor) -> float:
    found = call_loss(function, outputs, targets)
    if found.numel() != 1:
        raise InvalidArgument(
            f"loss: {function_name(function)} returned a scalar for {SAMPLES} samples and a tensor of shape "
            f"{list(found.shape)} for {len(targets)}; return a scalar (the mean or the sum over the samples) always, "
            "or a value a sample always"
        )
    return float(found)


def _check_rows(function: Loss, outputs: Tensor, targets: Tensor, whole: Tensor) -> None:
    """Raise if the value of a sample depends on the other samples."""
    for ends in CUTS:
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


def _neither(function: Loss, one: Decomposition) -> InvalidArgument:
    return InvalidArgument(
        f"loss: {function_name(function)} is neither the mean nor the sum over its samples: for {one.samples} samples "
        f"it is {one.whole:g}, for parts of them {one.mean:g} as a mean and {one.sum:g} as a sum. Class weights, "
        "ignore_index and comparisons between samples do this, and shards would not add up to the batch. Give it "
        f"reduction='none' or 'sum', or {_REMEDY}"
    )


class _MeanCheck:
    """Checks in training, on new target values, that a loss is the mean over its samples (``Criterion.check``)."""

    def __init__(self, function: Loss, targets: Tensor) -> None:
        self._function = function
        self._seen_targets = set() if targets.is_floating_point() else set(targets.flatten().tolist())
        self._spare_sample: tuple[Tensor, Tensor] | None = None
        """A sample with a known target, added to shards that have only one sample."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.is_floating_point():
            return
        found = set(torch.unique(targets).tolist())
        if found <= self._seen_targets:
            if self._spare_sample is None:
                self._spare_sample = outputs[:1].detach().clone(), targets[:1].clone()
            return
        outputs = outputs.detach()
        if len(targets) == 1 and self._spare_sample is not None:
            outputs, targets = (torch.cat(pair) for pair in zip((outputs, targets), self._spare_sample, strict=True))
        if len(targets) == 1:
            return
        new = torch.tensor([not self._seen_targets >= set(one.flatten().tolist()) for one in targets.cpu()])
        order = torch.argsort(new.int(), descending=True, stable=True).to(targets.device)
        ends = sorted({1, len(targets) // 2, int(new.sum())} - {len(targets)})
        with no_side_effects(self._function, on=outputs.device), torch.no_grad():
            for end in ends:
                one = decompose(self._function, outputs[order], targets[order], (end,))
                if one.is_conclusive and not one.fits(MEAN):
                    raise _neither(self._function, one)
        self._seen_targets |= found
