"""A loss follows the model to its device. The device here is ``meta``: what is tested is what moves, not a GPU."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import nn

from hoop.engine.stage.autograd import copy_on, loss_on
from hoop.engine.torch_losses import ClassMean

META, WEIGHTS = torch.device("meta"), torch.tensor([1.0, 2.0])


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=WEIGHTS),
        nn.BCEWithLogitsLoss(pos_weight=WEIGHTS),
        functools.partial(F.cross_entropy, weight=WEIGHTS),
        functools.partial(nn.CrossEntropyLoss(weight=WEIGHTS)),
    ],
)
def test_the_tensors_of_a_loss_are_copied_to_the_device(loss: object) -> None:
    def weights(one: object) -> torch.Tensor:
        if isinstance(one, functools.partial):
            return one.keywords["weight"] if one.keywords else weights(one.func)
        return next(one.buffers()) if isinstance(one, nn.Module) else torch.zeros(0)

    assert weights(copy_on(loss, META)).is_meta
    assert weights(loss) is not None
    assert not weights(loss).is_meta, "the user's own is as it was"
    mean = ClassMean.of(loss)
    if mean is not None:
        placed = ClassMean.of(copy_on(mean.function, META))
        assert placed is not None
        assert placed.weight is not None
        assert placed.weight.is_meta


def test_a_loss_that_has_no_tensors_to_move_is_itself() -> None:
    trained, function = nn.Linear(2, 2), lambda outputs, targets: outputs.sum()
    assert copy_on(trained, META) is trained, "it may have the model in it"
    assert copy_on(function, META) is function
    assert loss_on(trained, torch.device("cpu")) is trained
