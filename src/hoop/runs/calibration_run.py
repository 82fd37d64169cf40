"""Measures a job's costs in runs of one step: every device measures, all at once, as it does before a training run.

``hoop calibrate`` calls it. ``runs/calibration.py`` measures in one process instead, where no devices can be started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.job_events import Started
from hoop.runs.calibration import describe_measurement, lines_through
from hoop.runs.prediction import MeasuredCosts, measured_job_costs
from hoop.runs.training import HeadStarter, Launch, Training
from hoop.simulate.cost_model import Costs

SHARDS_PER_DEVICE = 4
"""In the run with small shards; a device computes several of them in one batch, if the model allows it."""


def calibrated_on_devices(settings: Settings, devices: int, memory: int, clean: HeadStarter | None) -> Costs:
    """The costs of a job on this many devices of this machine: of a shard for each of them, and of smaller shards.

    Cores share caches, memory bandwidth and clocks, so the costs hold where as many devices compute as have measured
    here. ``crowding`` is by how much the slowest device of a step was later than a usual one. ``memory``: bytes of a
    device. ``clean``: as in ``Training``.
    """
    if devices > settings.batch_size:
        raise InvalidArgument(f"--devices: {devices} are more than the {settings.batch_size} samples of a batch")
    few = _measured(settings, devices, memory, min(SHARDS_PER_DEVICE * devices, settings.batch_size), clean)
    many = _measured(settings, devices, memory, devices, clean)
    costs, small = measured_job_costs(many), measured_job_costs(few)
    machine = replace(costs.machine, crowding=1 + float(many.get("late_share", 0.0)))
    about = {**describe_measurement(settings), "devices": devices}
    blocks = costs.blocks if few["rows"] == many["rows"] else lines_through(few, many, costs.blocks)
    return replace(costs, blocks=blocks, machine=machine, joint=small.joint, source="measured", about=about)


def calibrated_on_gpu(settings: Settings, memory: int, clean: HeadStarter | None) -> Costs:
    """Measures a data parallel step of a job on this machine's GPU: the costs of a run of one step on one device.

    ``memory``: bytes of the device's memory. ``clean``: as in ``Training``.
    """
    measured = _measured(settings, 1, memory, settings.num_microbatches, clean)
    if "gpu" not in measured:
        raise FailedPrecondition("--accelerator: no GPU was used; look at nvidia-smi, or leave the option out")
    about = {**describe_measurement(settings), "gpu": measured["gpu"]["name"]}
    return replace(measured_job_costs(measured), source=f"measured on {about['gpu']}", about=about)


def _measured(settings: Settings, devices: int, memory: int, shards: int, clean: HeadStarter | None) -> MeasuredCosts:
    """What the devices of a run measure before its only step, in data parallel training."""
    changes = {"strategy": "data", "sharded_update": "off", "shards": shards, "max_steps": 1, "checkpoint_every": 0}
    measured: Mapping[str, Any] = {}
    launch = Launch(settings.replaced(changes), devices=devices, memory=memory)
    for observed in Training(launch, clean=clean).events():
        if isinstance(observed.event, Started):
            measured = observed.event.costs or {}
    if not measured:
        raise FailedPrecondition(f"{settings.job}: its blocks cannot be measured; it has its own training step")
    return measured
