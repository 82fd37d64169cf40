"""How an operation of a group is started: in the caller's thread where that is possible, else on the lane.

synchronous     in the caller's thread, if it is its turn (1); else on the lane, and the caller waits
asynchronous    on the lane (2); a small all_reduce in the caller's thread, as long as the others come soon (3)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from hoop.torch_backend import moves, profile
from hoop.torch_backend.links import Links
from hoop.torch_backend.reductions import Reduce
from hoop.torch_backend.work import DONE, HoopWork

AT_ONCE_BYTES = 1 << 20
"""Up to here an asynchronous all_reduce costs less than to hand it over to a thread."""
_ProcessGroup: Any = ProcessGroup  # its stub does not describe what a subclass in Python is called with


class Starting(_ProcessGroup):  # type: ignore[misc]
    """What every operation of a group goes through."""

    _links: Links
    _coalesced: list[Work] | None = None
    _started = 0

    def _start(
        self,
        title: str,
        options: Any,
        job: Callable[[float], None],
        results: Any,
        given: Sequence[torch.Tensor],
    ) -> HoopWork:
        """Runs a job now, if the caller waits for it anyway and it is its turn; else on the lane."""
        self._started += 1
        asynchronous, recorded = getattr(options, "asyncOp", True), profile.enabled()
        timeout = self._seconds(options)
        if not asynchronous and not recorded and self._links.lane.enter():
            try:
                self._links.attempt(title, job, timeout)
            finally:
                self._links.lane.leave()
            return DONE
        work = HoopWork(title, results)
        end_event = profile.record(work, title, given) if recorded else None
        try:
            self._links.start(work, job, timeout)
            if not asynchronous:
                work.wait()
        finally:
            if end_event is not None:
                end_event()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _seconds(self, options: Any) -> float:
        """A call's own time limit, or the group's."""
        own = getattr(options, "timeout", None)
        seconds = own.total_seconds() if own is not None else -1.0
        return seconds if seconds > 0 else self._links.timeout

    def _at_once(self, tensor: torch.Tensor, how: Reduce, opts: Any, results: Any) -> Work | None:
        """An asynchronous all_reduce in the caller's thread, if it is its turn; what is left when others do not come
        soon goes to the lane."""
        links = self._links
        if profile.enabled() or not links.lane.enter():
            return None
        self._started += 1
        work = HoopWork("all_reduce", results)
        timeout, error, rest = self._seconds(opts), None, None
        try:
            rest = links.attempt("all_reduce", partial(moves.begin_all_reduce, links, tensor, how), timeout)
        except Exception as raised:
            error = raised
        except BaseException:
            links.lane.leave()
            raise
        if rest is None:
            links.lane.leave()
            work.finish(error)
        else:
            links.start(work, rest, timeout, entered=True)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work
