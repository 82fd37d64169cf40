"""Groups: operations between GroupStart and GroupEnd, queued to run in order as one launch."""

from __future__ import annotations

from hoop.errors import FailedPrecondition, ResourceExhausted
from hoop.servers.runner import MAX_OPERATIONS
from hoop.servers.work import Work


class Groups:
    """The open groups, at most one a communicator."""

    def __init__(self) -> None:
        self._open: dict[int, list[Work]] = {}

    def start(self, communicator_id: int) -> None:
        if communicator_id in self._open:
            raise FailedPrecondition(f"communicator {communicator_id} has an open group: call GroupEnd first")
        self._open[communicator_id] = []

    def is_open(self, communicator_id: int) -> bool:
        return communicator_id in self._open

    def queue(self, communicator_id: int, work: Work) -> None:
        works = self._open[communicator_id]
        if len(works) >= MAX_OPERATIONS:
            raise ResourceExhausted(f"the group holds {MAX_OPERATIONS} operations already: call GroupEnd")
        works.append(work)

    def end(self, communicator_id: int) -> list[Work]:
        if communicator_id not in self._open:
            raise FailedPrecondition(
                f"communicator {communicator_id} has no open group: call GroupStart first"
            )
        return self._open.pop(communicator_id)

    def forget(self, communicator_id: int) -> None:
        self._open.pop(communicator_id, None)
