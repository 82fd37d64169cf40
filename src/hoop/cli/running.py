"""Running a server in the foreground until it is told to stop."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from typing import Any


class Stopping:
    """Set by Ctrl-C, SIGTERM, or (where asked for) the end of standard input."""

    def __init__(self, with_stdin: bool = False) -> None:
        self._event = asyncio.Event()
        self._with_stdin = with_stdin
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._event.set)
        if with_stdin:
            loop.add_reader(sys.stdin.fileno(), self._heard)

    def _heard(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self._event.set()

    @property
    def abandoned(self) -> bool:
        """Whether standard input has ended: whoever started this is gone or going, and all of it with them."""
        return self._with_stdin and bool(select.select([sys.stdin], [], [], 0)[0])

    async def wait(self) -> None:
        await self._event.wait()

    async def unless(self, work: asyncio.Future[Any]) -> bool:
        """Waits for ``work``; false, and the work is cancelled, if told to stop before it is done."""
        stop = asyncio.ensure_future(self._event.wait())
        pair: set[asyncio.Future[Any]] = {work, stop}
        await asyncio.wait(pair, return_when="FIRST_COMPLETED")
        stop.cancel()
        if not work.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return False
        work.result()
        return True
