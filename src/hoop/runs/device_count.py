"""How many devices a run gets: if the user states no number, and if the user states a range.

Without a number a job on this machine gets no more devices than can compute at once. The weights do not depend on the
number, so it may differ between machines:

    a GPU                   one device for each GPU
    data parallel           one for each core, at most one for each shard
    any other strategy      ``DEFAULT_DEVICES``: each holds a part of the model, so memory decides

With a range, ``--devices 4:16``:

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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoop.client.cluster import Cluster
from hoop.errors import DeadlineExceeded, InvalidArgument, PeerLost
from hoop.job_events import Observed, WaitingForDevice
from hoop.launch.mps import count_gpus
from hoop.resources import Request, admit, available_cores, largest_number
from hoop.strategies.catalog import parse
from hoop.texts import counted

if TYPE_CHECKING:
    from hoop.engine.settings import Settings

DEFAULT_DEVICES = 4
"""Number of devices of a strategy that partitions the model, and on Ray, if none is stated."""
MOST = 64
"""Maximum number of devices that are used without being asked for."""
LOOK_S = 1.0
"""Seconds between two checks, while devices are awaited, whether the run is to stop."""


@dataclass(frozen=True)
class DeviceCount:
    """A number of devices, and why it was chosen."""

    devices: int
    reason: str


def default_device_count(settings: Settings) -> DeviceCount:
    """The number of devices for a job, and why.

    A rule, not a measurement: for a small model on many cores fewer devices may be as fast. More devices than cores
    would share them, and each of them updates all weights.
    """
    # A fault names a rank, which must be there. So must the devices that keep replicas.
    least = max([one.rank + 1 for one in settings.parsed_faults], default=1)
    if not parse(settings.strategy).replicated:
        return _at_least(max(least, settings.replicas + 1), DEFAULT_DEVICES, f"the default of {settings.strategy}")
    gpus = count_gpus() if settings.may_use_cuda else 0
    if gpus:
        return _at_least(least, gpus, "one for each GPU")
    cores = available_cores()
    most = max(1, min(cores, settings.num_microbatches, MOST))
    return _at_least(least, most, "one for each core" if most == cores else f"one for each shard, on {cores} cores")


def _at_least(least: int, devices: int, reason: str) -> DeviceCount:
    return DeviceCount(devices, reason) if devices >= least else DeviceCount(least, "as faults or replicas need them")


# ---- a range of devices


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
            f"min_devices (--min): {settings.min_devices} is more than the {counted(devices, 'device')} that the job "
            "begins with (--devices)"
        )
    shards = settings.num_microbatches
    if settings.max_devices <= max(shards, devices or 0) or not parse(settings.strategy).replicated:
        return ""
    return (
        f"devices: up to {settings.max_devices} may take part, and a batch has {counted(shards, 'shard')}: at most "
        f"{counted(shards, 'device')} have work at a time. --shards {settings.max_devices} gives all of them "
        "work, and another result"
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
            raise PeerLost(f"stopped while it waited for {counted(count, 'device')}; {alive} are there")
        start = f"start more with: hoop device --join {cluster.address}"
        if waited >= timeout_s:
            raise DeadlineExceeded(
                f"devices: {alive} of the {count} that the job begins with were there within {timeout_s:g} s "
                f"(--meet-timeout); {start}"
            )
        if alive != said:
            said = alive
            yield Observed(
                WaitingForDevice([], waited, f"waits for {counted(count, 'device')}, {alive} are there; {start}")
            )
        with contextlib.suppress(DeadlineExceeded):
            cluster.wait_for_devices(max(count, len(there) + 1), min(LOOK_S, timeout_s - waited))
