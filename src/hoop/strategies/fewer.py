"""A strategy on another number of devices than it was chosen for: some were lost, or came.

hybrid   as many of its replicas as divide the devices
ps       as many of its servers as leave a worker
"""

from __future__ import annotations

import dataclasses

from hoop.errors import FailedPrecondition, UserError
from hoop.plan.plan import Plan
from hoop.strategies.hybrid import Hybrid
from hoop.strategies.parameter_server import ParameterServer
from hoop.strategies.strategy import Strategy


def adapted(strategy: Strategy, devices: int) -> Strategy:
    """The same strategy for so many devices, if it can be."""
    if isinstance(strategy, Hybrid):
        replicas = max(one for one in range(1, strategy.replicas + 1) if devices % one == 0)
        return dataclasses.replace(strategy, replicas=replicas)
    if isinstance(strategy, ParameterServer):
        return dataclasses.replace(strategy, servers=max(1, min(strategy.servers, devices - 1)))
    return strategy


def usable(strategy: Strategy, devices: int, micros: int, blocks: int) -> tuple[Strategy, Plan]:
    """The strategy and its plan for as many of the devices as it can use; the others hold nothing, and are spare."""
    why = ""
    for count in range(devices, 0, -1):
        one = adapted(strategy, count)
        try:
            if one.stages(count) <= blocks:
                plan = one.plan(count, micros)
                spare: tuple[tuple[()], ...] = ((),) * (devices - count)
                return one, Plan(plan.micros, plan.holders, (*plan.ranks, *spare), plan.servers)
            why = why or f"{one.stages(count)} stages are more than the model's {blocks} blocks"
        except UserError as error:
            why = why or str(error)
    raise FailedPrecondition(f"strategy: {strategy.spec} cannot go on with {devices} of its devices: {why}")
