"""A rank for which the strategy has no use at the moment: it keeps in step, so that it can take a lost one's place."""

from __future__ import annotations

from collections.abc import Sequence

from hoop.engine.role import Role, Work
from hoop.engine.worker import Worker


class Spare(Role):
    """Holds nothing but its neighbour's mirror."""

    def __init__(self, worker: Worker, stride: int) -> None:
        super().__init__(worker)
        self.stride = stride

    @property
    def hears(self) -> bool:
        return False

    def advance(self, works: Sequence[Work], stop: bool) -> list[float]:
        self.worker.post.endpoint.flush(self.deadline())  # which notices that a seat is over
        return []
