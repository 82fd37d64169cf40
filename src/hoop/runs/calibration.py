"""Measures a job's costs on this machine, for the simulator: every block at two micro-batch sizes, and the machine."""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from hoop.engine.cost_probe import VECTOR_BYTES, ShardComputation, measure_communication, measure_costs, profile_blocks
from hoop.engine.job import Job, blocks_of, build_model
from hoop.engine.settings import Settings
from hoop.engine.user_code import attribute_exceptions
from hoop.resources import available_cores
from hoop.runs.prediction import MeasuredCosts, measured_job_costs
from hoop.simulate.cost_model import BlockCost, Costs, LinearCost, Machine

HOW = ShardComputation(batched=4)
REPEATS = 5
between = partial(measure_communication, shards=8, timeout=30.0)
"""Measures what two ranks cost each other."""


def machine_of(links: Mapping[str, float]) -> Machine:
    """A machine with the measured link costs and usual values otherwise."""
    known = ("message_s", "byte_s", "agree_s", "meeting_s")
    found: dict[str, Any] = {name: links[name] for name in known if name in links}
    return dataclasses.replace(Machine(), **found)


def calibrated(
    job: Job, settings: Settings, machine: Machine, crowding: Callable[[Callable[[], float], int], float] | None = None
) -> Costs:
    """Measures a job in this process, on one thread; ``crowding`` measures how busy cores slow each other down."""
    torch.set_num_threads(1)
    rows = -(-settings.batch_size // settings.num_microbatches)
    with attribute_exceptions(f"measuring {settings.job}"):
        low = _measure(job, settings, max(1, rows // 4))
        high = _measure(job, settings, rows, (*VECTOR_BYTES, 1 << 24))
    costs = measured_job_costs(high, machine)
    if crowding is not None:
        machine = dataclasses.replace(
            costs.machine,
            crowding=crowding(
                lambda: sum(one["forward_s"] for one in _measure(job, settings, rows)["blocks"]), available_cores()
            ),
        )
        costs = dataclasses.replace(costs, machine=machine)
    if low["rows"] < high["rows"]:
        costs = dataclasses.replace(costs, blocks=lines_through(low, high, costs.blocks))
    return dataclasses.replace(costs, source="measured", about=describe_measurement(settings))


def _measure(job: Job, settings: Settings, rows: int, sizes: Sequence[int] = VECTOR_BYTES) -> MeasuredCosts:
    data = job.data().train
    blocks = blocks_of(build_model(job, settings.seed))
    rows = min(rows, len(data))
    batch = data.batch(np.arange(rows, dtype=np.int64), epoch=0, seed=settings.seed)
    found = profile_blocks(blocks, batch, settings.optimizer, settings.num_microbatches, REPEATS)
    return measure_costs(found, blocks, data, job.loss_function, settings.optimizer, rows, HOW, sizes)


def lines_through(low: MeasuredCosts, high: MeasuredCosts, blocks: Sequence[BlockCost]) -> tuple[BlockCost, ...]:
    """The blocks, with the seconds of forward and backward from measurements of smaller and of larger shards."""

    def line(index: int, name: str) -> LinearCost:
        return LinearCost.through_points([(one["rows"], one["blocks"][index][name]) for one in (low, high)])

    return tuple(
        dataclasses.replace(block, forward=line(index, "forward_s"), backward=line(index, "backward_s"))
        for index, block in enumerate(blocks)
    )


def describe_measurement(settings: Settings) -> dict[str, object]:
    """Metadata of costs that are measured here and now."""
    return {
        "job": settings.job,
        "batch_size": settings.batch_size,
        "shards": settings.num_microbatches,
        "optimizer": settings.optimizer.name,
        "cores": available_cores(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
