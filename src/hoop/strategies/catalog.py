"""Every strategy, and how one is typed: ``data``, ``ps:asp``, ``ring``, ``pipeline:gpipe``, ``hybrid:replicas=2``.

After the name and a colon come fields, ``field=value``, separated by commas. A value that can only mean one field may
stand alone: a schedule, a mode, ``sync`` or ``async``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hoop.errors import InvalidArgument
from hoop.strategies.data_parallel import DataParallel
from hoop.strategies.hybrid import Hybrid
from hoop.strategies.parameter_server import MODES, ParameterServer
from hoop.strategies.pipeline import Pipeline
from hoop.strategies.ring_model import RingModel
from hoop.strategies.schedules import SCHEDULES
from hoop.strategies.strategy import Strategy

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
