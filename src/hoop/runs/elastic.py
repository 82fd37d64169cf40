"""The number of devices of a run that is stated as a range: ``--devices 4:16``.

    here                 16 processes are started, or as many as this machine has room for (``local_processes``)
    --coordinator        waits until 4 devices are alive (``wait_for_devices``)
    under a scheduler    waits until 4 ranks have come (``runs/meeting.py``)

The job then begins on 4 devices, and the coordinator invites the others, now and as they come
(``membership/job_membership.py``). The weights are the same whenever they come.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hoop.client.cluster import Cluster
from hoop.errors import DeadlineExceeded, InvalidArgument, PeerLost
from hoop.job_events import Observed, WaitingForDevice
from hoop.resources import Request, admit, largest_number
from hoop.strategies.catalog import parse

if TYPE_CHECKING:
    from hoop.engine.settings import Settings

LOOK_S = 1.0
"""How often the wait looks whether the run is to stop."""


def local_processes(first: int, most: int, memory: int) -> tuple[int, str]:
    """How many devices to start on this machine, and a warning if they are fewer than ``most``.

    Raises ResourceExhausted if not even ``first`` fit. ``memory``: bytes of each device's arena.
    """
    if most <= first:
        return first, ""  # ``ForkedCluster`` admits them
    fitting = largest_number(Request(most, memory))
    if fitting >= most:
        return most, ""
    if fitting < first:
        admit(Request(first, memory, options=("--devices", "--memory")))
        fitting = first
    return fitting, (
        f"devices: {fitting} of up to {most} are started: this machine has room for no more of {memory >> 20} MiB; a "
        "smaller --memory leaves room for more"
    )


def check_range(devices: int | None, settings: Settings) -> str:
    """Raises InvalidArgument if a job cannot begin with this number of devices; None: with all that are there.

    Returns a warning if not all of the devices that it may take can have work, else an empty text.
    """
    if devices is not None and settings.max_devices and devices > settings.max_devices:
        raise InvalidArgument(
            f"devices: {devices} to begin with are more than the {settings.max_devices} that it takes (max_devices)"
        )
    if devices is not None and settings.min_devices > devices:
        raise InvalidArgument(
            f"min_devices (--min): {settings.min_devices} is more than the {devices} devices that the job begins with "
            "(--devices)"
        )
    shards = settings.num_microbatches
    if settings.max_devices <= max(shards, devices or 0) or not parse(settings.strategy).replicated:
        return ""
    return (
        f"devices: up to {settings.max_devices} may take part, and a batch has {shards} shards: at most {shards} "
        f"devices have work at a time. --shards {settings.max_devices} gives all of them work, and another result"
    )


def wait_for_devices(
    cluster: Cluster, count: int, timeout_s: float, stopping: Callable[[], bool]
) -> Iterator[Observed]:
    """Returns when ``count`` devices can take part; yields how many are there whenever that changes.

    Raises DeadlineExceeded after ``timeout_s`` seconds, and PeerLost if the run is to stop.
    """
    began, said = time.monotonic(), -1
    while True:
        there = [one for one in cluster.status().devices if one.state == "alive"]
        alive = sum(not one.left_out for one in there)  # others can connect to it
        if alive >= count:
            return
        waited = time.monotonic() - began
        if stopping():
            raise PeerLost(f"stopped while it waited for {count} devices; {alive} are there")
        start = f"start more with: hoop device --join {cluster.address}"
        if waited >= timeout_s:
            raise DeadlineExceeded(
                f"devices: {alive} of the {count} that the job begins with were there within {timeout_s:g} s "
                f"(--meet-timeout); {start}"
            )
        if alive != said:
            said = alive
            yield Observed(WaitingForDevice([], waited, f"waits for {count} devices, {alive} are there; {start}"))
        with contextlib.suppress(DeadlineExceeded):
            cluster.wait_for_devices(max(count, len(there) + 1), min(LOOK_S, timeout_s - waited))
