"""The result of an asynchronous collective that may not be there yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hoop.horovod import operations
from hoop.horovod.context import current


class Handle:
    """What ``…_async`` returns; ``hvd.synchronize`` waits for it and ``hvd.poll`` asks."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        """``works``: operations of the backend. ``finish``: makes the result of their outputs; called once."""
        self._works: Sequence[Any] | None = works
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    @classmethod
    def of_all(cls, handles: Sequence[Handle]) -> Handle:
        """Several handles as one, whose result is the list of their results."""
        works = [work for one in handles for work in one._works or ()]
        return cls(works, lambda: [one.wait() for one in handles])

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        if self._works is None or all(work is None or work.is_completed() for work in self._works):
            return True
        current().ledger.answer_joined()
        return False

    def wait(self) -> Any:
        """The result; HorovodInternalError if a rank was lost."""
        if self._works is not None:
            for work in self._works:
                operations.wait(work)
            assert self._finish is not None
            self._result = self._finish()
            self._works, self._finish = None, None
        return self._result


def synchronize(handle: Handle) -> Any:
    """Waits for an asynchronous collective and returns its result."""
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Whether an asynchronous collective has finished."""
    return handle.done()
