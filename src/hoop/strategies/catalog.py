"""All strategies, their text form, and their adaptation to another number of devices.

Text form: ``data``, ``data:sharded``, ``ps:asp``, ``ring``, ``pipeline:gpipe``, ``hybrid:replicas=2``. A name, then
after a colon fields ``field=value`` separated by commas. A value that belongs to only one field may omit the field
name: a schedule, a mode, ``sharded``, ``sync`` or ``async``.

When devices are lost or join, a strategy is adapted: ``hybrid`` uses the largest number of replicas, up to its own,
that divides the devices; ``ps`` uses as many of its servers as leave at least one worker.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hoop.errors import FailedPrecondition, InvalidArgument, UserError
from hoop.plan.plan import Plan
from hoop.strategies.base import Strategy
from hoop.strategies.data_parallel import DataParallel
from hoop.strategies.hybrid import Hybrid
from hoop.strategies.parameter_server import MODES, ParameterServer
from hoop.strategies.pipeline import SCHEDULES, Pipeline
from hoop.strategies.ring import RingModel


def adapt_to_devices(strategy: Strategy, devices: int) -> Strategy:
    """The strategy with its replicas or servers reduced to what ``devices`` allow."""
    if isinstance(strategy, Hybrid):
        replicas = max(one for one in range(1, strategy.replicas + 1) if devices % one == 0)
        return dataclasses.replace(strategy, replicas=replicas)
    if isinstance(strategy, ParameterServer):
        return dataclasses.replace(strategy, servers=max(1, min(strategy.servers, devices - 1)))
    return strategy


def min_devices(strategy: Strategy) -> int:
    """The fewest devices to which the strategy can be adapted."""
    return 2 if isinstance(strategy, ParameterServer) else 1


def plan_for_devices(strategy: Strategy, devices: int, num_microbatches: int, blocks: int) -> tuple[Strategy, Plan]:
    """The adapted strategy and its plan on as many devices as it can use; the remaining ranks are standby ranks.

    A standby rank has no instructions and holds no stage. ``blocks``: number of the model's blocks, which limits the
    number of stages. The engine calls it at the start and after each change of membership.
    """
    reason = ""
    for count in range(devices, 0, -1):
        one = adapt_to_devices(strategy, count)
        try:
            if one.stages(count) <= blocks:
                plan = one.plan(count, num_microbatches)
                standby: tuple[tuple[()], ...] = ((),) * (devices - count)
                return one, dataclasses.replace(plan, ranks=(*plan.ranks, *standby))
            reason = reason or f"{one.stages(count)} stages are more than the model's {blocks} blocks"
        except UserError as error:
            reason = reason or str(error)
    raise FailedPrecondition(f"strategy: {strategy.spec} cannot go on with {devices} of its devices: {reason}")


STRATEGIES: dict[str, type[DataParallel | ParameterServer | RingModel | Pipeline | Hybrid]] = {
    kind.name: kind for kind in (DataParallel, ParameterServer, RingModel, Pipeline, Hybrid)
}
"""Strategy classes by name."""

_SCHEDULE: dict[str, tuple[str, object]] = {schedule: ("schedule", schedule) for schedule in SCHEDULES}
_BARE_VALUES: dict[str, dict[str, tuple[str, object]]] = {
    "data": {"sharded": ("sharded", True)},
    "ps": {mode: ("mode", mode) for mode in MODES},
    "ring": {"sync": ("asynchronous", False), "async": ("asynchronous", True)},
    "pipeline": _SCHEDULE,
    "hybrid": _SCHEDULE,
}
"""Values of each strategy that may omit their field name: value as text to (field, value)."""
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse(text: str) -> Strategy:
    """Parses the text form of a strategy."""
    name, _, rest = text.strip().partition(":")
    if name not in STRATEGIES:
        raise InvalidArgument(f"strategy: {name[:40]!r} is unknown; choose {', '.join(STRATEGIES)}")
    fields = {field.name: field for field in dataclasses.fields(STRATEGIES[name])}
    values: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            if item not in _BARE_VALUES[name]:
                known = [*_BARE_VALUES[name], *(f"{field}=…" for field in fields)]
                raise InvalidArgument(
                    f"strategy: {name} knows no {item[:40]!r}; it takes {', '.join(known) or 'nothing'}"
                )
            key, parsed = _BARE_VALUES[name][item]
        elif key not in fields:
            raise InvalidArgument(f"strategy: {name} has no field {key[:40]!r}; it has {', '.join(fields) or 'none'}")
        else:
            parsed = _value(fields[key], value)
        if key in values:
            raise InvalidArgument(f"strategy: {key} of {name} is given twice, in {text[:80]!r}")
        values[key] = parsed
    built: Any = STRATEGIES[name](**values)  # type: ignore[arg-type]
    strategy: Strategy = built
    return strategy


def all_strategies(devices: int) -> list[Strategy]:
    """One strategy of each kind that can run on ``devices``; hybrids for each number of replicas that divides it."""
    found: list[Strategy] = [DataParallel()]
    if devices > 1:
        found.append(DataParallel(sharded=True))
        found += [ParameterServer(mode=mode) for mode in MODES]
    found += [RingModel(), RingModel(asynchronous=True)]
    found += [Pipeline(schedule) for schedule in SCHEDULES]
    found += [Hybrid(replicas) for replicas in range(2, devices) if devices % replicas == 0]
    return found


def _value(field: dataclasses.Field[Any], text: str) -> object:
    """Parses a field's value by the field's type."""
    kind = str(field.type)
    if kind == "str":
        return text
    if kind == "bool":
        if text.lower() not in _FLAGS:
            raise InvalidArgument(f"{field.name}: {text[:40]!r} is neither true nor false")
        return _FLAGS[text.lower()]
    if text == "none" and "None" in kind:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise InvalidArgument(f"{field.name}: {text[:40]!r} is not a whole number")
    return int(text)
