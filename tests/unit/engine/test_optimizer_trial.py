"""What an optimizer keeps, found out on a large model without values: the same as on the model itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer

from hoop.engine.custom import objects
from hoop.engine.custom.objects import JobTrainableState, StateTemplate
from hoop.engine.job import Job
from hoop.engine.settings import Settings


class Foreign(Optimizer):
    """It keeps tensors of several shapes and types, by the sizes of a parameter, and looks at values."""

    values_seen = 0

    def __init__(self, parameters: Iterable[Any], needs_memory: bool = False) -> None:
        self.needs_memory = needs_memory
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            kept = self.state[parameter]
            kept["count"] = 1
            kept["row"] = parameter.new_zeros(parameter.shape[0], dtype=torch.bfloat16)
            if parameter.numel() > 1000:
                kept["blocks"] = torch.zeros(-(-parameter.numel() // 256))
            if parameter.grad.norm().item() < 2:
                kept["mean"] = torch.zeros_like(parameter)
            if self.needs_memory:
                parameter.numpy()
            self.values_seen += 1


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 300), nn.Linear(300, 5), nn.BatchNorm1d(5))


def shapes(template: StateTemplate) -> list[dict[Any, Any]]:
    def shape(value: Any) -> Any:
        return (value.shape, value.dtype) if isinstance(value, Tensor) else value

    return [{key: shape(value) for key, value in kept.items()} for kept in template]


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adafactor,
        torch.optim.AdamW,
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        Foreign,
        lambda parameters: Foreign(parameters, needs_memory=True),
    ],
)
def test_a_trial_without_values_finds_what_one_with_values_finds(
    optimizer: Callable[[Any], Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = model()
    state = JobTrainableState(Job(lambda seed: original, lambda: None, optimizer=optimizer), Settings(), original, 1)
    whole = shapes(state.trial_state())
    values = [parameter.clone() for parameter in original.parameters()]
    monkeypatch.setattr(objects, "TRIED_ELEMENTS", 100)
    assert shapes(state.trial_state()) == whole
    assert all(torch.equal(before, after) for before, after in zip(values, original.parameters(), strict=True))


def test_a_large_model_is_not_copied_for_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what needs the memory of its parameters gets a copy of them."""
    monkeypatch.setattr(objects, "TRIED_ELEMENTS", 100)
    seen: list[Optimizer] = []

    def make(parameters: Any) -> Optimizer:
        seen.append(Foreign(parameters))
        return seen[-1]

    original = model()
    JobTrainableState(Job(lambda seed: original, lambda: None, optimizer=make), Settings(), original, 1).trial_state()
    given, tried = (optimizer.param_groups[0]["params"][0] for optimizer in seen)
    assert not isinstance(given, FakeTensor)
    assert isinstance(tried, FakeTensor)
