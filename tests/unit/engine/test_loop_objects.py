"""The state of a user's own loop that is not in tensors: another process loads it through JSON, as recovery does."""

from __future__ import annotations

import json

import torch
from torch import nn

from hoop.elastic.objects import LoopTrainableState


def objects() -> tuple[LoopTrainableState, torch.optim.Optimizer]:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3], gamma=0.5)
    return LoopTrainableState(model, optimizer, scheduler, None), optimizer


def test_schedulers_and_groups_go_on_after_a_load() -> None:
    """MultiStepLR keeps a Counter with numbers as keys, and Adam a tuple: JSON has neither."""
    here, optimizer = objects()
    there, other = objects()
    for one in optimizer.param_groups[0]["params"]:
        one.grad = torch.ones_like(one)
    here.update(0.0, 0)
    there.load_json_state(json.loads(json.dumps(here.json_state())))
    assert other.param_groups[0]["betas"] == (0.8, 0.9)
    rates = []
    for step in range(1, 4):
        for each in (here, there):
            each.update(0.0, step)
        rates.append((here.rate, there.rate))
    assert rates == [(0.05, 0.05), (0.025, 0.025), (0.025, 0.025)]
