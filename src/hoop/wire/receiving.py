"""Bounds the requests that arrive at a server at the same time.

gRPC hands a request over when all of it is there, and holds what has come until then: a call that stops in the middle
of its request holds up to the largest message. Before a server begins to read a request, flow control lets only its
first 64 KiB come. So few requests are read at a time, and others wait. A request that takes long makes room for those
that wait, the oldest first.

Messages of streams do not count: a stream may be idle, which looks the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from hoop.errors import DeadlineExceeded

MAX_RECEIVING = 4
"""Requests of one server that are read at the same time: at most this many times the largest message is held."""
HURRIED_S = 2.0
"""How long a request may take to arrive while others wait."""
RECEIVE_S = 60.0
"""How long a request may take to arrive."""

Message = TypeVar("Message")


@dataclass(eq=False)
class _Reception:
    began: float
    limit: asyncio.Timeout
    hurried: bool = False
    """It ends ``HURRIED_S`` seconds after it began, because another one waits."""


class Receiving:
    """The requests that arrive at one server."""

    def __init__(self, most: int = MAX_RECEIVING, hurried_s: float = HURRIED_S, receive_s: float = RECEIVE_S) -> None:
        self._slots = asyncio.Semaphore(most)
        self._hurried_s, self._receive_s = hurried_s, receive_s
        self._receptions: list[_Reception] = []
        """The oldest first."""
        self._waiting = 0
        """Requests that wait for a slot."""

    @property
    def count(self) -> int:
        """Requests that are being read."""
        return len(self._receptions)

    async def receive(self, method: str, read: Callable[[], Awaitable[Message]]) -> Message:
        """Reads a request when there is room for it. Raises DeadlineExceeded if it does not arrive in time."""
        loop = asyncio.get_running_loop()
        await self._wait_for_slot()
        try:
            began = loop.time()
            try:
                async with asyncio.timeout(self._receive_s) as limit:
                    reception = _Reception(began, limit)
                    self._receptions.append(reception)
                    self._hurry()
                    try:
                        return await read()
                    finally:
                        self._receptions.remove(reception)
            except TimeoutError:
                waiting = ", and others wait" if reception.hurried else ""
                raise DeadlineExceeded(
                    f"{method}: the request did not arrive within {loop.time() - began:.1f} s{waiting}; "
                    "send it again, or a smaller one"
                ) from None
        finally:
            self._slots.release()

    async def _wait_for_slot(self) -> None:
        waits = self._slots.locked()
        self._waiting += waits
        self._hurry()
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= waits

    def _hurry(self) -> None:
        """Makes as many of the oldest receptions hurry as others wait."""
        now = asyncio.get_running_loop().time()
        for one in self._receptions[: self._waiting]:
            if not one.hurried:
                one.hurried = True
                one.limit.reschedule(max(now, one.began + self._hurried_s))
