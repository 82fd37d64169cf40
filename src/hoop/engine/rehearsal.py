"""Whole steps before the first one, of which nothing remains: how long a step takes where everything happens at once.

``cost_probe.py`` measures the parts of a step one by one. In a step each part finds less in the caches, cores are not
alike, and ranks wait for each other: together the parts take up to a third longer, or less time where the rank that
measured has a slow core. ``runs/prediction.py`` scales its simulation by the ratio of the two.

The steps are those of the run: the same plan, messages and updates, the first samples of the first epoch. Only the
state at the end is put back, and what counts the work. Not for asynchronous strategies, whose ranks are at different
steps, nor for state on a GPU, which ``cost_probe.measure_gpu_step`` rehearses.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Iterator, Sequence
from statistics import mean, median

import numpy as np
import torch

from hoop.collectives.communicator import Communicator
from hoop.collectives.reduction import Array
from hoop.collectives.registry import Operation
from hoop.engine.executor import PlanExecutor
from hoop.engine.profiler import InstructionProfiler
from hoop.engine.roles.base import RankRole
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.sharded_update import ShardedStageState
from hoop.engine.step_schedule import StepSchedule
from hoop.memory.dtypes import dtype

SECONDS = 0.25
"""Seconds that the measured steps may take, about. Where few fit in, none is measured."""
MAX_STEPS, MIN_STEPS = 64, 2
SPAN = 8
"""Steps whose mean counts as one measurement: where devices share a core, short steps alternate with long ones."""
MAX_STATE_BYTES = 256 << 20
"""Bytes of a rank's state above which no step is rehearsed: the copy would take too much memory and time."""


def measure_steps(
    communicator: Communicator, role: RankRole, schedule: StepSchedule, estimate_s: float, timeout: float
) -> float | None:
    """Return the seconds of a step without its commit, of the slowest rank; None: too long, or too much state.

    Collective; the state does not change. ``estimate_s``: about what a step takes at least. ``timeout``: of each
    agreement between the ranks, in seconds.
    """
    if not schedule.total_steps:
        return None
    state_bytes = float(sum(one.nbytes for one in _arrays(role)))
    most_bytes, longest_s = _most(communicator, [state_bytes, estimate_s], timeout)
    if most_bytes > MAX_STATE_BYTES or longest_s > SECONDS / MIN_STEPS:
        return None
    with _rehearsal(role):
        # The first steps touch memory for the first time.
        (longest_s,) = _most(communicator, _seconds(role, schedule, 0, 1), timeout)
        steps = min(MAX_STEPS, int(SECONDS / longest_s))
        if steps < MIN_STEPS:
            return None
        _seconds(role, schedule, 1, 1)
        each = _seconds(role, schedule, 2, steps)
        usual = median(mean(each[low : low + SPAN]) for low in range(0, max(1, steps - SPAN + 1), SPAN))
        (found,) = _most(communicator, [usual], timeout)  # no rank goes on while another one reads its memory
        return found


def _seconds(role: RankRole, schedule: StepSchedule, first: int, count: int) -> list[float]:
    """Runs this many steps; returns how long this rank took for each."""
    times = [time.perf_counter()]
    for number in range(first, first + count):
        role.advance(schedule.next_steps(number % schedule.total_steps, 1), False)
        times.append(time.perf_counter())
    return [end - began for began, end in itertools.pairwise(times)]


def _most(communicator: Communicator, mine: Sequence[float], timeout: float) -> list[float]:
    """Collective. The largest of all ranks' numbers, one by one."""
    found = np.zeros((communicator.size, len(mine)), np.float64)
    gather = Operation("all_gather", len(mine), dtype("float64"))
    communicator.run(gather, np.array(mine, np.float64), found.reshape(-1), timeout)
    largest: list[float] = found.max(axis=0).tolist()
    return largest


def _arrays(role: RankRole) -> list[Array]:
    """The vectors of this rank that a step changes."""
    found: list[Array] = []
    for state in role.executor.stage_states.values():
        found += [state.state_array, *(one.numpy() for one in state.moments)]
    for flat in role.flat_states():
        found += [flat.weights, *(one.numpy() for one in flat.moments)]
    return list({(one.ctypes.data, one.nbytes): one for one in found}.values())  # some roles have them twice


@contextlib.contextmanager
def _rehearsal(role: RankRole) -> Iterator[None]:
    """Steps inside leave no trace: not in the state, nor in what this rank reports of its work."""
    executor, states = role.executor, role.executor.stage_states.values()
    arrays = _arrays(role)
    contents = [one.copy() for one in arrays]
    counters = [(one, one.clone()) for state in states for one in state.layout.counters]
    profiler = copy.deepcopy(executor.profiler)
    kept = {name: getattr(executor, name) for name in ("rate", "steps_updated", "computed", "extra_bytes_sent")}
    bytes_sent = executor.bytes_sent
    role.attach_provenance(Provenance(executor.plan.num_microbatches))
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for array, content in zip(arrays, contents, strict=True):
            array[:] = content
        for counter, before in counters:
            counter.copy_(before)
        for state in states:
            if isinstance(state, ShardedStageState):
                state.stale = False
        kept["extra_bytes_sent"] -= executor.bytes_sent - bytes_sent
        for name, value in kept.items():
            setattr(executor, name, value)
        _restore_profiler(executor, profiler)


def _restore_profiler(executor: PlanExecutor, before: InstructionProfiler) -> None:
    """Sets the executor's profiler, to which others refer, to what it was."""
    for name, value in vars(before).items():
        setattr(executor.profiler, name, value)
