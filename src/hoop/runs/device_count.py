"""How many devices a job on this machine gets if the user states no number: no more than can compute at once.

The weights do not depend on the number, so it may differ between machines:

    a GPU                   one device for each GPU
    data parallel           one for each core, at most one for each shard
    any other strategy      ``DEFAULT_DEVICES``: each holds a part of the model, so memory decides
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoop.launch.mps import count_gpus
from hoop.resources import available_cores
from hoop.strategies.catalog import parse

if TYPE_CHECKING:
    from hoop.engine.settings import Settings

DEFAULT_DEVICES = 4
"""Devices of a strategy that partitions the model, and on Ray, if no number is stated."""
MOST = 64
"""More devices are used only if they are asked for."""


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
