"""A strategy on another number of devices than it was chosen for: some were lost, or came.

hybrid   as many of its replicas as divide the devices
ps       as many of its servers as leave a worker

Every strategy, and how one is typed: ``data``, ``ps:asp``, ``ring``, ``pipeline:gpipe``, ``hybrid:replicas=2``.

After the name and a colon come fields, ``field=value``, separated by commas. A value that can only mean one field may
stand alone: a schedule, a mode, ``sync`` or ``async``.
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


STRATEGIES: dict[str, type[DataParallel | ParameterServer | RingModel | Pipeline | Hybrid]] = {
    kind.name: kind for kind in (DataParallel, ParameterServer, RingModel, Pipeline, Hybrid)
}
"""Every strategy by the name it is typed with."""

_SCHEDULE: dict[str, tuple[str, object]] = {schedule: ("schedule", schedule) for schedule in SCHEDULES}
_WORDS: dict[str, dict[str, tuple[str, object]]] = {
    "data": {},
    "ps": {mode: ("mode", mode) for mode in MODES},
    "ring": {"sync": ("asynchronous", False), "async": ("asynchronous", True)},
    "pipeline": _SCHEDULE,
    "hybrid": _SCHEDULE,
}
_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse(text: str) -> Strategy:
    """The strategy that was typed."""
    name, _, rest = text.strip().partition(":")
    if name not in STRATEGIES:
        raise InvalidArgument(f"strategy: {name[:40]!r} is none; choose {', '.join(STRATEGIES)}")
    fields = {field.name: field for field in dataclasses.fields(STRATEGIES[name])}
    choices: dict[str, object] = {}
    for item in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = item.partition("=")
        if not equals:
            if item not in _WORDS[name]:
                words = [*_WORDS[name], *(f"{field}=…" for field in fields)]
                raise InvalidArgument(
                    f"strategy: {name} knows no {item[:40]!r}; it takes {', '.join(words) or 'nothing'}"
                )
            key, meant = _WORDS[name][item]
        elif key not in fields:
            raise InvalidArgument(
                f"strategy: {name} has no field {key[:40]!r}; it has {', '.join(fields) or 'none'}"
            )
        else:
            meant = _value(fields[key], value)
        if key in choices:
            raise InvalidArgument(f"strategy: {key} of {name} is given twice, in {text[:80]!r}")
        choices[key] = meant
    made: Any = STRATEGIES[name](**choices)  # type: ignore[arg-type]
    strategy: Strategy = made
    return strategy


def every(devices: int) -> list[Strategy]:
    """One of each kind that can run on so many devices, hybrids with every number of replicas that divides them."""
    found: list[Strategy] = [DataParallel()]
    if devices > 1:
        found += [ParameterServer(mode=mode) for mode in MODES]
    found += [RingModel(), RingModel(asynchronous=True)]
    found += [Pipeline(schedule) for schedule in SCHEDULES]
    found += [Hybrid(replicas) for replicas in range(2, devices) if devices % replicas == 0]
    return found


def _value(field: dataclasses.Field[Any], text: str) -> object:
    """A field's value from text, by the type the field has."""
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
