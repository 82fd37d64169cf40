"""Costs that come with Hoop, for its own recipes: measured once, so that one can simulate without measuring."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources

from hoop.errors import NotFound
from hoop.simulate.costs import Costs

_FILE = "shipped.json"


def names() -> list[str]:
    """The recipes there are costs of."""
    return sorted(_read())


def shipped(name: str) -> Costs:
    """The costs of a recipe, as they were measured on the machine that ``about`` names."""
    known = _read()
    if name not in known:
        raise NotFound(
            f"costs: none come with Hoop for {name!r} (there are {', '.join(sorted(known))}); "
            f"measure them with: hoop calibrate {name} --out costs.json, and give --costs costs.json"
        )
    costs = Costs.from_json(json.dumps(known[name]), f"shipped costs of {name}")
    where, date = costs.about.get("machine", "?"), costs.about.get("date", "?")
    return dataclasses.replace(costs, source=f"shipped with Hoop, measured on {where}, {date}")


def _read() -> dict[str, object]:
    found: dict[str, object] = json.loads(resources.files("hoop.simulate").joinpath(_FILE).read_text("utf-8"))
    return found
