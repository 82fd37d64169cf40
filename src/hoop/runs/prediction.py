"""Predicts a run's step by the simulator before the first one, and compares it with the measured steps.

Before the first step the reporting rank measures blocks and machine (``engine/cost_probe.py``) and sends the costs with
the ``Started`` event. The client simulates a step from them while the job already trains. ``runs/calibration.py``
measures the costs of a job that does not run. This module does not load PyTorch, because the dashboard uses it too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median
from typing import Any

from hoop.engine.settings import Settings
from hoop.errors import HoopError
from hoop.job_events import JobEvent, Started, Steps
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.simulate.cluster import Cluster, Host, Link
from hoop.simulate.cost_model import BlockCost, Costs, GpuCosts, LinearCost, Machine
from hoop.simulate.instruction_cost import sum_and_copy_seconds
from hoop.simulate.result import SimulationResult, TracedSpan
from hoop.simulate.simulation import simulate
from hoop.strategies.balancing import NO_CORE_S, better_plan, plan_by_cores
from hoop.strategies.base import Strategy
from hoop.strategies.catalog import parse
from hoop.strategies.data_parallel import DataParallel

WARM_UP = 10
"""Steps at the beginning that are left out, if there are enough."""
SPAN = 8
"""Steps whose mean time counts as one measurement."""
MOST_INSTRUCTIONS = 200_000
MOST_MOVES = 4
"""Changes of the shares of devices that a prediction follows; a run makes the first ones within a hundred steps."""
_COMPUTED = frozenset({InstructionKind.FORWARD, InstructionKind.BACKWARD})
log = logging.getLogger("hoop.runs")
MeasuredCosts = Mapping[str, Any]
"""Costs as ``engine/cost_probe.py`` measures them, from the ``Started`` event."""


class Prediction:
    """The predicted seconds of a step beside the measured ones."""

    def __init__(self, settings: Settings, costs: Costs | None = None) -> None:
        """``costs``: costs to predict from; None: those that are measured before the first step."""
        self._settings, self._costs = settings, costs
        self._expected: float | None = None
        self._seconds: list[float] = []
        self.problem = ""
        """Why there is no prediction, if computing it failed."""

    def note(self, event: JobEvent) -> None:
        """Takes an event of the job. Raises nothing: a failed prediction does not end the run."""
        if isinstance(event, Started) and event.costs:
            try:
                self._expected = predicted_step_seconds(event.costs, self._settings, self._costs)
            except Exception as error:
                log.exception("the prediction failed")
                self.problem = f"no prediction of a step: {type(error).__name__}: {error}"
        elif isinstance(event, Steps):
            self._seconds += event.seconds

    def result(self) -> dict[str, float | None]:
        """For the run's summary; an error of 0.1 means that a step took 10 % longer than predicted."""
        warm = self._seconds[WARM_UP:] if len(self._seconds) > 3 * WARM_UP else self._seconds
        measured = usual_seconds(warm)
        both = self._expected is not None and measured
        return {
            "step_seconds": measured,
            "predicted_step_seconds": self._expected,
            "prediction_error": measured / self._expected - 1 if both and measured and self._expected else None,
        }


def usual_seconds(steps: Sequence[float]) -> float | None:
    """How long a step usually takes: the median over spans of ``SPAN`` steps of their mean; None without steps.

    Single steps mislead where devices share a core: one device may make two steps in the time slice of the other, and
    short steps alternate with long ones.
    """
    spans = [steps[first : first + SPAN] for first in range(0, len(steps), SPAN)]
    whole = [one for one in spans if len(one) == SPAN] or spans
    return median(map(mean, whole)) if whole else None


def predicted_step_seconds(measured: MeasuredCosts, settings: Settings, given: Costs | None = None) -> float | None:
    """Seconds of a step; None where there is nothing to simulate from, or too much.

    ``given``: costs to take instead of those that were measured; where devices are is measured in any case.
    """
    found = predicted_step(measured, settings, given)
    if found is None:
        return None
    if given is None and "gpu" in measured:
        return max(found.step_seconds, _rehearsed_seconds(measured["gpu"]))
    if given is None and "rehearsed_s" in measured:
        return found.step_seconds * _rehearsed_ratio(measured, settings)
    return found.step_seconds


def _rehearsed_ratio(measured: MeasuredCosts, settings: Settings) -> float:
    """Ratio of a step that the ranks have rehearsed to its simulation: what the measured parts of it do not show.

    The rehearsed steps had no commit, no training loop around them, and the shards of equal devices.
    """
    program = {**measured, "step_s": 0.0, "agree_s": 0.0}
    simulated = predicted_step(program, settings.replaced({"replicate": False, "balance": False}))
    return float(measured["rehearsed_s"]) / simulated.step_seconds if simulated and simulated.step_seconds else 1.0


def predicted_step(
    measured: MeasuredCosts, settings: Settings, given: Costs | None = None, trace: bool = False
) -> SimulationResult | None:
    """The simulation of a step, by the parameters of ``predicted_step_seconds``. ``trace``: it keeps the spans."""
    strategy = parse(measured.get("strategy", settings.strategy))
    costs = measured_job_costs(measured) if given is None else given.with_rows(measured["rows"])
    cluster = measured_cluster(measured, settings)
    size = 6 * settings.num_microbatches * strategy.stages(cluster.size) * (1 if strategy.synchronous else 32)
    if size > MOST_INSTRUCTIONS:
        return None
    how: dict[str, Any] = {"num_microbatches": settings.num_microbatches, "cuts": settings.cut or None, "trace": trace}
    how |= {"replicate": settings.replicate, "replicas": settings.replicas}
    on_gpu = given is None and costs.gpu is not None
    moves = isinstance(strategy, DataParallel) and settings.balance and not settings.slowdown and not on_gpu
    try:
        if moves and cluster.size > 1:
            return _balanced(
                strategy,
                _computing_devices(cluster),
                lambda plan: simulate(strategy, costs, cluster, **{**how, "trace": True}, plan=plan),
            )
        return simulate(strategy, costs, cluster, **how)
    except HoopError:
        return None  # a prediction that cannot be made is no reason to fail


def _computing_devices(cluster: Cluster) -> int:
    """Devices that the run's load balancer gives shards: on one host, one for each core."""
    (host, *others) = cluster.hosts
    return cluster.size if others else min(cluster.size, host.cores or cluster.size)


def _balanced(
    strategy: Strategy, computing: int, simulated: Callable[[Plan | None], SimulationResult]
) -> SimulationResult:
    """The simulation of a step after shards have moved as the run's load balancer will move them.

    ``computing``: devices that get shards, the first ones. ``simulated(plan)`` simulates a step of a plan (None: that
    for equal devices), with its spans. The balancer sees for how long each device computes a shard.
    """
    even = simulated(None)
    if computing < even.devices:
        even = simulated(plan_by_cores(strategy, even.devices, even.plan.num_microbatches, computing))
    result, seconds = even, [0.0] * computing + [NO_CORE_S] * (even.devices - computing)
    for _ in range(MOST_MOVES):
        for rank, account in enumerate(result.accounts):
            if share := result.plan.computed_by(rank, 0):
                busy = (span.seconds for span in account.spans if _computes(span))
                seconds[rank] = sum(busy) / len(share)
        if not all(seconds):
            return result  # a device without shards is not measured
        plan = better_plan(strategy, result.plan, even.plan, seconds)
        if plan is None:
            return result
        result = simulated(plan)
    return result


def _computes(span: TracedSpan) -> bool:
    return isinstance(span.what, Instruction) and span.what.kind in _COMPUTED


def _rehearsed_seconds(gpu: Mapping[str, Any]) -> float:
    """Seconds of a step on a GPU, as ranks measured it before the first one."""
    return float(gpu["step_s"] + gpu["stride_s"] / gpu["stride"])


def measured_gpu_costs(gpu: Mapping[str, Any]) -> GpuCosts:
    """The simulator's costs of a step on a GPU from measured ones.

    Devices that share a GPU were measured while all of them computed. The simulator lets them share it too, so it needs
    the costs of one that computes alone: the GPU's time is divided by the number of devices.
    """
    share = 1 / gpu["sharing"]
    read_s = share * gpu["copy_s"]
    compute, finish = share * gpu["compute_s"], max(0.0, share * gpu["finish_s"] - gpu["bytes_read"] * read_s)
    rest = _rehearsed_seconds(gpu) - gpu["compute_s"] - gpu["finish_s"]
    row = compute / gpu["rows"] if gpu["rows"] else 0.0
    return GpuCosts(LinearCost(0.0, row), finish, read_s, max(0.0, rest), int(gpu["total"]) or None)


def measured_job_costs(measured: MeasuredCosts, machine: Machine | None = None) -> Costs:
    """The simulator's costs from measured ones."""
    rows, blocks = measured["rows"], measured["blocks"]
    fixed = fixed_share(blocks, measured)
    return Costs(
        tuple(
            BlockCost(
                one["name"],
                _line(one["forward_s"], fixed, rows),
                _line(one["backward_s"], fixed, rows),
                one["weight_bytes"],
                one["optimizer_bytes"],
                one["gradient_bytes"],
                LinearCost(0.0, one["activation_bytes"] / rows),
                LinearCost(0.0, one["output_bytes"] / rows),
                one.get("start_s", 0.0),
            )
            for one in blocks
        ),
        rows,
        measured_machine(measured, machine or Machine()),
        LinearCost.through_points(measured["load"]),
        LinearCost.through_points(measured["loss"]),
        measured["update_s"],
        measured["update_fixed_s"],
        joint=max(1, measured["joint"]) if measured["joint_s"] else 1,
        gpu=measured_gpu_costs(measured["gpu"]) if "gpu" in measured else None,
        source="profiled before the first step",
    )


def measured_machine(measured: MeasuredCosts, usual: Machine) -> Machine:
    """``usual`` with the measured values."""
    names = ("copy_s", "add_s", "message_s", "byte_s", "agree_s", "meeting_s", "step_s", "shard_s")
    changes: dict[str, Any] = {name: measured[name] for name in names if name in measured}
    for name in ("copy_at", "add_at"):
        changes[name] = tuple((float(size), float(seconds)) for size, seconds in measured[name])
    machine = replace(usual, **changes)
    return replace(machine, reduce_s=_reduce_overhead(measured, machine)) if "reduce_s" in measured else machine


def _reduce_overhead(measured: MeasuredCosts, machine: Machine) -> float:
    """What a measured sum of gradients took beside its barriers, and the additions and copies that are modelled."""
    ranks, size = len(measured["hosts"]), sum(one["gradient_bytes"] for one in measured["blocks"])
    modelled = sum_and_copy_seconds(machine, ranks, measured["partial_sums"], size) + 2 * machine.meeting_s
    return max(0.0, float(measured["reduce_s"]) - modelled)


def _line(seconds: float, fixed: float, rows: int) -> LinearCost:
    return LinearCost(fixed * seconds, (1 - fixed) * seconds / rows)


def fixed_share(blocks: Sequence[MeasuredCosts], measured: MeasuredCosts) -> float:
    """Share of a shard's time that a further shard of the same batched computation does not cost again."""
    alone = float(sum(one["forward_s"] + one["backward_s"] for one in blocks))
    joint, together = int(measured["joint"]), float(measured["joint_s"])
    if joint < 2 or not together or not alone:
        return 0.0
    return min(1.0, max(0.0, 1 - (together - alone) / (joint - 1) / alone))


def measured_cluster(measured: MeasuredCosts, settings: Settings) -> Cluster:
    """The job's hosts: devices and cores of each. All devices are as late as the slowest of a step usually is."""
    ranks: Sequence[int] = measured["hosts"]
    late = 0.0 if "gpu" in measured else float(measured.get("late_share", 0.0))
    slow = [1 / one for one in settings.slowdown]
    speeds = [one / (1 + late) for one in [*slow, *[1.0] * len(ranks)][: len(ranks)]]
    cores = max(1, measured["cores"] // settings.threads_per_device)
    hosts = []
    for host in dict.fromkeys(ranks):
        mine = tuple(speed for speed, number in zip(speeds, ranks, strict=True) if number == host)
        gpus = measured["gpu"]["gpus"] if "gpu" in measured else None
        hosts.append(Host(len(mine), cores, speeds=mine if slow or late else (), gpus=gpus))
    return Cluster(tuple(hosts), Link(1e9, 20e-6))
