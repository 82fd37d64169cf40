"""The state of a PyTorch training: models, optimizers, samplers, and plain values."""

from __future__ import annotations

import copy
from typing import Any

import torch

from hoop.horovod import operations
from hoop.horovod.elastic.sampler import ElasticSampler
from hoop.horovod.elastic.state import ObjectState
from hoop.horovod.functions import broadcast_optimizer_state, broadcast_parameters
from hoop.horovod.process_sets import global_process_set

Stateful = torch.nn.Module | torch.optim.Optimizer | ElasticSampler


class TorchState(ObjectState):
    """``TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)``: each is an attribute.

    Modules, optimizers and ``ElasticSampler``s keep their identity: their state_dict is saved, restored and sent. Of
    other values copies are made.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **values: Any
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **values}
        self._stateful = {name: value for name, value in given.items() if isinstance(value, Stateful)}
        self._saved_states: dict[str, Any] = {}
        for name, value in given.items():
            if isinstance(value, Stateful) or value is None:
                setattr(self, name, value)
        rest = {name: value for name, value in values.items() if name not in self._stateful}
        super().__init__(**rest)

    def save(self) -> None:
        self._saved_states = {name: copy.deepcopy(one.state_dict()) for name, one in self._stateful.items()}
        super().save()

    def restore(self) -> None:
        for name, one in self._stateful.items():
            # A copy: an optimizer would take the saved tensors themselves, and change them.
            one.load_state_dict(copy.deepcopy(self._saved_states[name]))
        super().restore()

    def sync(self) -> None:
        for one in self._stateful.values():
            if isinstance(one, torch.nn.Module):
                broadcast_parameters(one.state_dict(), 0)
            elif isinstance(one, torch.optim.Optimizer):
                broadcast_optimizer_state(one, 0)
            else:
                _sync_sampler(one)
        super().sync()

    def reset(self) -> None:
        for one in self._stateful.values():
            if isinstance(one, ElasticSampler):
                one.reset()


def _sync_sampler(sampler: ElasticSampler) -> None:
    """The samples that any rank of the epoch of rank 0 has processed are processed."""
    states = operations.run_all_gather_object(global_process_set, sampler.state_dict())
    epoch = states[0]["epoch"]
    processed = {index for one in states if one["epoch"] == epoch for index in one["processed_indices"]}
    sampler.load_state_dict({"epoch": epoch, "processed_indices": sorted(processed)})
