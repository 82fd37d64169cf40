"""Waiting for a coordinator to notice that a device is gone."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable

from hoop.client.cluster import Cluster
from hoop.errors import HoopError

LOOK_S = 0.02
"""Between two looks at the events; each carries the time at which it happened, so this delays nothing."""


def since(client: Cluster) -> int:
    """The number of the newest event."""
    return max((event.sequence for event in client.events()), default=0)


def died(
    client: Cluster,
    device: int,
    after: int,
    hurt: Callable[[], None],
    call: Callable[[], None] | None,
    within: float,
) -> tuple[float | None, str]:
    """Hurts a device, calls meanwhile if asked to, and says how long it took until it was dead, and why it was."""
    began, until = time.time(), time.monotonic() + within
    hurt()
    while time.monotonic() < until:
        if call is not None:
            with contextlib.suppress(HoopError):  # what fails is what is counted
                call()
        for event in client.events(after):
            if event.kind == "device_dead" and int(event.fields["device"]) == device:
                reason = event.text.partition(" is dead: ")[2]
                return event.time - began, re.sub(r"[\d.]+:\d+ |( \(Connect|:).*", "", reason)
        time.sleep(LOOK_S)
    return None, ""
