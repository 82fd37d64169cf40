"""Process sets: groups of ranks that make collectives of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.horovod.context import BACKEND, current


class ProcessSet:
    """Some ranks of the run. It can be used after ``hvd.init(process_sets=…)`` or ``hvd.add_process_set``."""

    process_set_id: int | None = None
    """Number of the process set at all ranks; None: not registered."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] | None = sorted({int(rank) for rank in ranks})
        if len(self.ranks) != len(ranks):
            raise InvalidArgument(f"ranks: {list(ranks)} names a rank twice")
        self._group: Any = None

    @property
    def group(self) -> Any:
        """The process group of torch.distributed."""
        if self.process_set_id is None:
            raise FailedPrecondition(f"process_set: {self} is not registered; call hvd.add_process_set on every rank")
        if not self.included():
            raise InvalidArgument(f"process_set: rank {current().rank_info.rank} is not one of {self}")
        return self._group

    @property
    def is_global(self) -> bool:
        return False

    def size(self) -> int:
        """The number of its ranks."""
        return len(self._members())

    def rank(self) -> int:
        """The number of this process among its ranks."""
        if not self.included():
            raise InvalidArgument(f"process_set: rank {current().rank_info.rank} is not one of {self}")
        return self._members().index(current().rank_info.rank)

    def included(self) -> bool:
        """Whether this process is one of its ranks."""
        return current().rank_info.rank in self._members()

    def _members(self) -> Sequence[int]:
        assert self.ranks is not None
        return self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    """All ranks, whatever their number is at the moment."""

    process_set_id = 0

    def __init__(self) -> None:
        super().__init__([])
        self.ranks = None

    @property
    def group(self) -> Any:
        current()
        return dist.group.WORLD

    @property
    def is_global(self) -> bool:
        return True

    def _members(self) -> Sequence[int]:
        return range(current().rank_info.size)


global_process_set = _GlobalProcessSet()
"""The process set of all ranks: the default of every collective."""
_registered: dict[int, ProcessSet] = {}
_numbers = iter(range(1, 1 << 62))


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Registers a process set. Every rank of the run must call it, also those that are not in the set."""
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.process_set_id is not None:
        raise InvalidArgument(f"process_set: {added} is registered already")
    size = current().rank_info.size
    wrong = [rank for rank in added._members() if not 0 <= rank < size]
    if wrong or not added._members():
        raise InvalidArgument(f"ranks: {added.ranks} is no list of ranks in 0..{size - 1}")
    if any(one.ranks == added.ranks for one in _registered.values()) or len(added._members()) == size:
        existing = next((one for one in _registered.values() if one.ranks == added.ranks), global_process_set)
        raise InvalidArgument(f"process_set: ranks {added.ranks} are those of {existing} already; use it")
    added._group = dist.new_group(added.ranks, backend=BACKEND)
    added.process_set_id = next(_numbers)
    _registered[added.process_set_id] = added
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a registered process set, on every rank; False if it is not registered or the global one."""
    if process_set.process_set_id is None or _registered.pop(process_set.process_set_id, None) is None:
        return False
    if process_set.included():
        dist.destroy_process_group(process_set._group)
    process_set.process_set_id, process_set._group = None, None
    return True


def forget_process_sets() -> None:
    """Called when the run's group is gone: the sets have to be registered again."""
    for one in _registered.values():
        one.process_set_id, one._group = None, None
    _registered.clear()


def process_set_included(process_set: ProcessSet = global_process_set) -> bool:
    """Whether this process is one of the set's ranks."""
    return process_set.included()
