"""Which reduction a user's loss function has, found out by calling it: the mean, the sum, or a value a sample.

    (1) the model's outputs for some training samples
    (2) the loss of all of them, beside the loss of parts of them:
            the sum of the parts                     ──▶ sum
            the mean of the parts, by their samples  ──▶ mean
            a row a sample, the same in every part   ──▶ none
            none of these                            ──▶ refused, with the remedy
    (3) a mean is tried again in training on every shard with a target that has not been tried: a class of another
        weight, or one that is ignored, may be rare

Nothing is changed by trying: random generators and buffers are as before.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hoop.data.dataset import Dataset
from hoop.engine.job import Job
from hoop.engine.stage.autograd import (
    MEAN,
    NONE,
    SUM,
    Criterion,
    Loss,
    Objective,
    buffers_restored,
    called,
    returned,
)
from hoop.errors import InvalidArgument

SAMPLES = 32
"""On which a loss is tried."""
CUTS = ((11,), (2, 5, 16))
"""Where these are cut into parts."""
TOLERANCE = 1e-4
"""By how much, relative to its parts, a loss may differ from their mean or sum: what float32 rounds, and more."""
_REMEDY = (
    "state what Hoop is to take it for, reduction='mean' or 'sum', in hoop.train or hoop.Job: 'mean' weights each "
    "shard's value by its number of samples, which is exact with shards=1"
)


def with_criterion(job: Job, data: Dataset, seed: int, model: nn.Module | None = None) -> Job:
    """The job with the reduction of its loss; raises where that cannot be found out and is not stated.

    Called before the first step, with the training data, wherever a loss is going to be computed; ``model`` is the
    job's own if none is given.
    """
    if job.criterion is not None:
        return job
    function: Any = job.loss
    if model is None:
        with _undisturbed():
            model = job.model(seed)
    indices = np.linspace(0, len(data) - 1, SAMPLES).astype(np.int64)
    inputs, targets = data.batch(indices, epoch=0, seed=seed)
    with _undisturbed(model, function), torch.no_grad():
        outputs: Any = model(inputs)
        if not isinstance(outputs, Tensor):
            raise InvalidArgument(
                f"model: it returned {type(outputs).__name__}, not a tensor; return one tensor, with a row a sample"
            )
        reduction = reduction_of(function, outputs, targets)
        Objective(Criterion.of(function, reduction))(
            outputs, targets, SAMPLES
        )  # raises where there is no gradient
    check = _Watch(function, targets) if reduction == MEAN else None
    return dataclasses.replace(job, loss=Criterion.of(function, reduction, check))


def reduction_of(function: Loss, outputs: Tensor, targets: Tensor) -> str:
    """``mean``, ``sum`` or ``none``."""
    whole = returned(function, outputs, targets)
    if whole.numel() > 1:
        _check_rows(function, outputs, targets, whole)
        return NONE
    weighted = isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss) and function.weight is not None
    if weighted and function.reduction == MEAN and not targets.is_floating_point():  # type: ignore[attr-defined]
        raise InvalidArgument(
            f"loss: {called(function)} has class weights, and divides by the weights of its targets instead of their "
            f"number: shards would not add up to the batch. Give it reduction='none' or 'sum', or {_REMEDY}"
        )
    possible, tried = {MEAN, SUM}, []
    for paired in (outputs, outputs.roll(1, 0)):  # other outputs that the loss is defined for
        for ends in CUTS:
            one = decomposed(function, paired, targets, ends)
            if one.tells:
                possible = {reduction for reduction in possible if one.fits(reduction)}
                tried.append(one)
                if not possible:
                    raise _neither(function, one)
    if len(possible) != 1:
        found = ", ".join(f"{one.whole:g}" for one in tried) or "0, or no number,"
        raise InvalidArgument(
            f"loss: whether {called(function)} is the mean or the sum over its samples cannot be found out: it is "
            f"{found} for the model's first outputs; {_REMEDY}"
        )
    return possible.pop()


@dataclass(frozen=True)
class Decomposition:
    """The loss of some samples beside that of parts of them."""

    whole: float
    parts: Sequence[tuple[int, float]]
    """The number of samples of each part, and its loss."""

    @property
    def samples(self) -> int:
        return sum(count for count, _ in self.parts)

    @property
    def sum(self) -> float:
        return sum(value for _, value in self.parts)

    @property
    def mean(self) -> float:
        return sum(count * value for count, value in self.parts) / self.samples

    @property
    def tells(self) -> bool:
        """Whether it can distinguish a mean from a sum."""
        return math.isfinite(self.whole) and any(value for _, value in self.parts)

    def fits(self, reduction: str) -> bool:
        """Whether the parts make the whole; never where one of them is no number."""
        expected = self.sum if reduction == SUM else self.mean
        sizes = [(count if reduction == MEAN else 1) * abs(value) for count, value in self.parts]
        size = sum(sizes) / (self.samples if reduction == MEAN else 1)
        return abs(self.whole - expected) <= TOLERANCE * max(size, abs(self.whole))


def decomposed(function: Loss, outputs: Tensor, targets: Tensor, ends: Sequence[int]) -> Decomposition:
    """Of a loss that is a scalar, in parts that end before these samples."""
    parts = [
        (high - low, _scalar(function, outputs[low:high], targets[low:high]))
        for low, high in itertools.pairwise([0, *ends, len(targets)])
    ]
    return Decomposition(_scalar(function, outputs, targets), parts)


def _scalar(function: Loss, outputs: Tensor, targets: Tensor) -> float:
    found = returned(function, outputs, targets)
    if found.numel() != 1:
        raise InvalidArgument(
            f"loss: {called(function)} returned a scalar for {SAMPLES} samples and a tensor of shape "
            f"{list(found.shape)} for {len(targets)}; return a scalar (the mean or the sum over the samples) always, "
            "or a value a sample always"
        )
    return float(found)


def _check_rows(function: Loss, outputs: Tensor, targets: Tensor, whole: Tensor) -> None:
    """Raises if a sample's value depends on which other samples there are."""
    for ends in CUTS:
        for low, high in itertools.pairwise([0, *ends, len(targets)]):
            part = returned(function, outputs[low:high], targets[low:high])
            same = part.shape == whole[low:high].shape and torch.allclose(
                part,
                whole[low:high],
                rtol=TOLERANCE,
                atol=TOLERANCE * float(whole.abs().nanmean()),
                equal_nan=True,
            )
            if not same:
                raise InvalidArgument(
                    f"loss: {called(function)} returns a value a sample, and those of samples {low} to {high - 1} "
                    f"of {len(targets)} depend on the others: shards would not add up to the batch; use shards=1 and "
                    "return the mean or the sum, stated as reduction='mean' or 'sum' in hoop.train or hoop.Job"
                )


def _neither(function: Loss, one: Decomposition) -> InvalidArgument:
    return InvalidArgument(
        f"loss: {called(function)} is neither the mean nor the sum over its samples: for {one.samples} samples it is "
        f"{one.whole:g}, for parts of them {one.mean:g} as a mean and {one.sum:g} as a sum. Class weights, "
        "ignore_index and comparisons between samples do this, and shards would not add up to the batch. Give it "
        f"reduction='none' or 'sum', or {_REMEDY}"
    )


class _Watch:
    """Tries a mean again on targets that it has not been tried on."""

    def __init__(self, function: Loss, targets: Tensor) -> None:
        self._function = function
        self._tried = set() if targets.is_floating_point() else set(targets.flatten().tolist())
        self._kept: tuple[Tensor, Tensor] | None = None
        """A sample, for shards of one."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> None:
        if targets.is_floating_point():
            return
        found = set(torch.unique(targets).tolist())
        if found <= self._tried:
            if self._kept is None:
                self._kept = outputs[:1].detach().clone(), targets[:1].clone()
            return
        outputs = outputs.detach()
        if len(targets) == 1 and self._kept is not None:
            outputs, targets = (torch.cat(pair) for pair in zip((outputs, targets), self._kept, strict=True))
        if len(targets) == 1:
            return
        new = torch.tensor([not self._tried >= set(one.flatten().tolist()) for one in targets.cpu()])
        order = torch.argsort(new.int(), descending=True, stable=True).to(targets.device)
        ends = sorted({1, len(targets) // 2, int(new.sum())} - {len(targets)})
        with _undisturbed(self._function, on=outputs.device), torch.no_grad():
            for end in ends:
                one = decomposed(self._function, outputs[order], targets[order], (end,))
                if one.tells and not one.fits(MEAN):
                    raise _neither(self._function, one)
        self._tried |= found


@contextmanager
def _undisturbed(*objects: Any, on: torch.device | None = None) -> Iterator[None]:
    """What is drawn meanwhile is drawn again afterwards, and buffers of these modules are as before."""
    modules = [one for one in objects if isinstance(one, nn.Module)]
    gpus = [on] if on is not None and on.type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=gpus), buffers_restored(modules):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
