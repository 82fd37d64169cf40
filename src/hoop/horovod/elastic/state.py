"""The state of an elastic training: what is committed, restored, and sent to ranks that join."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from hoop.horovod import operations
from hoop.horovod.context import current
from hoop.horovod.elastic.sampler import ElasticSampler
from hoop.horovod.errors import HostsUpdatedInterrupt
from hoop.horovod.functions import broadcast_optimizer_state, broadcast_parameters
from hoop.horovod.process_sets import global_process_set
from hoop.horovod.reductions import Max

Stateful = torch.nn.Module | torch.optim.Optimizer | ElasticSampler


class State:
    """Subclasses define ``save``, ``restore`` and ``sync``."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Functions that are called when the ranks have changed, for example to adapt the learning rate."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called when the ranks have changed, before ``sync``."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state: a lost rank costs the work since the last commit. Then takes in ranks that wait to join."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, at every rank or at none, if processes wait to join. Every rank calls it."""
        context = current()
        if context.rendezvous is None:
            return
        flag = torch.tensor([int(context.rendezvous.updated.is_set())])
        operations.wait(operations.start_all_reduce(global_process_set, flag, Max))
        if flag.item():
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keeps a copy of the state."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to the last copy."""
        raise NotImplementedError

    def sync(self) -> None:
        """Gives all ranks the state of rank 0, and saves it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Hook for subclasses, called when the ranks have changed."""


class ObjectState(State):
    """A state whose attributes are the given values: ``ObjectState(epoch=0)`` has ``state.epoch``."""

    def __init__(self, bcast_object: Any = None, get_rank: Any = None, **values: Any) -> None:
        """``bcast_object`` and ``get_rank`` are Horovod's first arguments; they are accepted and not used."""
        super().__init__()
        self._names = list(values)
        for name, value in values.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self._values())

    def restore(self) -> None:
        self._set(copy.deepcopy(self._saved))

    def sync(self) -> None:
        if self._names:
            self._set(operations.run_broadcast_object(global_process_set, self._values(), 0))
        self.save()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The values have names of the program's choice."""

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


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
