"""The objects of a user's own loop, whose state Hoop keeps equal on all devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hoop.engine.custom.objects import (
    StateTemplate,
    TrainableState,
    json_groups,
    json_values,
    keeps_gradients,
    load_groups,
    load_scheduler,
    trial_of_copy,
)
from hoop.errors import InvalidArgument


def named(value: Any, kind: type, field: str) -> dict[str, Any]:
    """One object, a list or a dict of them, as a dict; raises if one is of another kind."""
    if value is None:
        return {}
    if isinstance(value, kind):
        return {"": value}
    found = dict(value) if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, Sequence) else {}
    if not found or not all(isinstance(one, kind) for one in found.values()):
        raise InvalidArgument(
            f"{field}: {type(value).__name__} is neither a {kind.__name__} nor a list or dict of them"
        )
    return {str(name): one for name, one in found.items()}


class LoopTrainableState(TrainableState):
    """Models, optimizers, schedulers, and other objects with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, model: Any, optimizer: Any, scheduler: Any, state: Mapping[str, Any] | None) -> None:
        models = named(model, nn.Module, "model")
        optimizers = named(optimizer, Optimizer, "optimizer")
        if not models or not optimizers:
            raise InvalidArgument("model, optimizer: give at least one of each")
        self._schedulers = named(scheduler, LRScheduler, "scheduler")
        self._others = dict(state or {})
        for name, one in self._others.items():
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise InvalidArgument(f"state: {name!r}, {type(one).__name__}, has no state_dict and load_state_dict")
        self.modules = list(models.values())
        self.names = {
            id(tensor): f"{prefix}.{name}" if prefix else name
            for prefix, module in models.items()
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        }
        self.optimizers = list(optimizers.values())
        together = nn.ModuleList(self.modules)
        self.trained = [one for one in together.parameters() if one.requires_grad]
        if len(devices := sorted({str(one.device) for one in together.parameters()})) != 1:
            raise InvalidArgument(
                f"model: its parameters are on {' and '.join(devices) or 'no device'}; a process has one device"
            )
        if not self.trained:
            raise InvalidArgument("model: no parameter has requires_grad, so there is nothing to train")
        self.average = []
        known = {id(one) for one in self.trained}
        for one in self.optimizers:
            if any(id(parameter) not in known for group in one.param_groups for parameter in group["params"]):
                raise InvalidArgument(
                    f"optimizer: {type(one).__name__} has parameters that are in no model of this run"
                )
        self.changes_gradients = not all(map(keeps_gradients, self.optimizers))

    def update(self, rate: float, step: int) -> None:
        for one in self.optimizers:
            one.step()
        for scheduler in self._schedulers.values():
            scheduler.step()

    def json_state(self) -> dict[str, Any]:
        return {
            "groups": [json_groups(one) for one in self.optimizers],
            "schedulers": {
                name: json_values(one.state_dict(), f"scheduler {name}") for name, one in self._schedulers.items()
            },
            "state": {name: json_values(one.state_dict(), f"state {name}") for name, one in self._others.items()},
        }

    def load_json_state(self, state: Mapping[str, Any]) -> None:
        for optimizer, groups in zip(self.optimizers, state["groups"], strict=True):
            load_groups(optimizer, groups)
        for name, one in self._schedulers.items():
            load_scheduler(one, state["schedulers"][name])
        for name, other in self._others.items():
            other.load_state_dict(state["state"][name])

    def trial_state(self) -> StateTemplate:
        modules = nn.ModuleList(self.modules)
        states = [state for optimizer in self.optimizers for state in optimizer.state.values()]
        kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        tensors = [*modules.parameters(), *modules.buffers(), *kept]

        def parts_of(
            copies: tuple[nn.ModuleList, Sequence[Optimizer]],
        ) -> tuple[Sequence[Optimizer], Sequence[Tensor]]:
            return copies[1], [parameter for parameter in copies[0].parameters() if parameter.requires_grad]

        return trial_of_copy((modules, self.optimizers), tensors, parts_of)
