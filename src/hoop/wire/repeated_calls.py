"""Calls that are made again when their connection breaks: each is done once, and answered in the end.

    caller ── call, with an id ─────────────▶ server    the connection breaks: a process was frozen, a network cut
    caller ── the same call, the same id ───▶ server    it did not run: it runs now. It has run, or runs: its answer

Requests that must not be done twice have a field ``call_id``, which ``make_repeatable`` sets. Those in ``_IDEMPOTENT``
have the same effect when they are done twice. Calls with other requests are not repeated.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from hoop.errors import InvalidArgument

MAX_KEPT = 1024
"""Number of ended calls whose answers a server keeps."""
MAX_ID = 64
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
"""Seconds before the first repetition of a call, which double up to the second."""
_OF_COORDINATOR = ("GetStatus", "GetCommunicator", "GetJob", "ExamineHosts", "Copy", "StopJob")
_OF_DEVICE = ("Describe", "ListBuffers", "AssignRank", "Reserve", "Release", "StopTask", "Abort")
_IDEMPOTENT = frozenset(f"{name}Request" for name in (*_OF_COORDINATOR, *_OF_DEVICE))


def make_repeatable(request: Any) -> bool:
    """Whether a call with this request can be repeated; gives it an id if it needs one."""
    fields = request.DESCRIPTOR.fields_by_name
    if "call_id" not in fields:
        return request.DESCRIPTOR.name in _IDEMPOTENT
    request.call_id = request.call_id or secrets.token_hex(16)
    return True


class AnswersOnce:
    """The calls of one server that have an id: each is done once, however often it arrives.

    A call goes on if its caller goes away, who may come back for the answer.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[str, str], asyncio.Task[Any]] = {}

    async def answer(self, method: str, request: Any, do: Callable[[Any], Awaitable[Any]]) -> Any:
        """What ``do`` returns or raises for this request, or for an earlier one with its id."""
        call_id: str = getattr(request, "call_id", "")
        if not call_id:
            return await do(request)
        if len(call_id) > MAX_ID:
            raise InvalidArgument(f"call_id: {len(call_id)} characters; at most {MAX_ID}")
        task = self._calls.get((method, call_id))
        if task is None:
            self._forget_oldest()
            task = self._calls[method, call_id] = asyncio.ensure_future(do(request))
            task.add_done_callback(_mark_as_seen)
        del request
        return await asyncio.shield(task)

    def _forget_oldest(self) -> None:
        if len(self._calls) >= MAX_KEPT:
            ended = next((key for key, task in self._calls.items() if task.done()), None)
            if ended is not None:
                del self._calls[ended]


def _mark_as_seen(task: asyncio.Task[Any]) -> None:
    """Else asyncio would log the error of a call whose caller has gone away. The frames of the error, which may hold
    large requests, are not kept."""
    if not task.cancelled() and (error := task.exception()) is not None:
        error.__traceback__ = None
