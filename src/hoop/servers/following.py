"""An event log as an async stream: what is there, then what comes, in order and without a gap."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from hoop.events import Event, EventLog


async def following(
    log: EventLog, after: int, ends: Callable[[Event], bool] = lambda event: False
) -> AsyncIterator[Event]:
    """Events with a higher sequence, from now on as they come; stops after one that ends it.

    The log may be published to from any thread.
    """
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def wake(_: Event) -> None:
        loop.call_soon_threadsafe(changed.set)

    unsubscribe = log.subscribe(wake)
    try:
        while True:
            changed.clear()
            for event in log.after(after):
                after = event.sequence
                yield event
                if ends(event):
                    return
            await changed.wait()
    finally:
        unsubscribe()
