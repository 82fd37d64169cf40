"""A job's costs on this machine, for the simulator: every block at two sizes of micro-batch, and the rest."""

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

from hoop.engine.job import Job, blocks_of
from hoop.engine.pricing import SIZES, cores, priced
from hoop.engine.profile import profile
from hoop.engine.rehearsal import rehearsed
from hoop.engine.settings import Settings
from hoop.launch.predicting import Told, costs_told
from hoop.launch.user_code import blaming
from hoop.simulate.costs import Costs, Line, Machine

JOINT = 4
REPEATS = 5
between = partial(rehearsed, shards=8, timeout=30.0)
"""What ranks cost each other: for whoever has two of them."""


def machine_of(links: Mapping[str, float]) -> Machine:
    """What was measured of links, and the rest as usual."""
    known = ("message_s", "byte_s", "agree_s", "meeting_s")
    found: dict[str, Any] = {name: links[name] for name in known if name in links}
    return dataclasses.replace(Machine(), **found)


def calibrated(
    job: Job,
    settings: Settings,
    machine: Machine,
    crowding: Callable[[Callable[[], float], int], float] | None = None,
) -> Costs:
    """Measured in this process, on one thread; ``crowding`` measures what cores at work cost each other."""
    torch.set_num_threads(1)
    rows = -(-settings.batch_size // settings.micros)
    with blaming(f"measuring {settings.job}"):
        low = _told(job, settings, max(1, rows // 4))
        high = _told(job, settings, rows, (*SIZES, 1 << 24))
    costs = costs_told(high, machine)
    if crowding is not None:
        machine = dataclasses.replace(
            costs.machine,
            crowding=crowding(
                lambda: sum(one["forward_s"] for one in _told(job, settings, rows)["blocks"]), cores()
            ),
        )
        costs = dataclasses.replace(costs, machine=machine)
    if low["rows"] < high["rows"]:
        costs = dataclasses.replace(
            costs,
            blocks=tuple(
                dataclasses.replace(
                    cost,
                    forward=_through(low, high, index, "forward_s"),
                    backward=_through(low, high, index, "backward_s"),
                )
                for index, cost in enumerate(costs.blocks)
            ),
        )
    return dataclasses.replace(costs, source="measured", about=_about(settings))


def _told(job: Job, settings: Settings, rows: int, sizes: Sequence[int] = SIZES) -> Told:
    data = job.data().train
    blocks = blocks_of(job.model(settings.seed))
    rows = min(rows, len(data))
    batch = data.batch(np.arange(rows, dtype=np.int64), epoch=0, seed=settings.seed)
    found = profile(blocks, batch, settings.optimizer, settings.micros, REPEATS)
    return priced(found, blocks, data, job.loss_function, settings.optimizer, rows, JOINT, sizes)


def _through(low: Told, high: Told, index: int, name: str) -> Line:
    points = [(one["rows"], one["blocks"][index][name]) for one in (low, high)]
    return Line.through(points)


def _about(settings: Settings) -> dict[str, object]:
    return {
        "job": settings.job,
        "batch_size": settings.batch_size,
        "shards": settings.micros,
        "optimizer": settings.optimizer.name,
        "cores": cores(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
