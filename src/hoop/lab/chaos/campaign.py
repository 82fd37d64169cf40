"""Many scenarios one after the other, and the summary of their outcomes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from hoop.lab.chaos.scenario import FAULTS, STRATEGIES, check_names, draw_scenario
from hoop.lab.chaos.scenario_run import (
    FAILED,
    MISSED,
    NOT_RUN,
    REFUSED,
    RESUMED,
    SAME,
    VERDICTS,
    Outcome,
    run_scenario,
    train_reference,
)
from hoop.report.tables import Column, Table

STEPS = 200


@dataclass(frozen=True)
class CampaignConfig:
    """Which scenarios to run."""

    runs: int
    seed: int = 0
    """Seed of the first run; the next ones have the following numbers."""
    faults: Sequence[str] = ()
    strategies: Sequence[str] = ()
    devices: int = 4
    steps: int = STEPS
    keep: Path | None = None
    """Folder for the files of runs that fail."""


@dataclass
class Campaign:
    """The outcomes so far."""

    config: CampaignConfig
    outcomes: list[Outcome] = field(default_factory=list)
    reference: str = ""
    """SHA-256 of the weights of the undisturbed run."""

    @property
    def failures(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.verdict == FAILED]

    def count(self, verdict: str) -> int:
        return sum(one.verdict == verdict for one in self.outcomes)

    def as_dict(self) -> dict[str, Any]:
        loads = [one.load for one in self.outcomes] or [0.0]
        return {
            "seed": self.config.seed,
            "runs": len(self.outcomes),
            "devices": self.config.devices,
            "steps": self.config.steps,
            "undisturbed_sha256": self.reference,
            "verdicts": {verdict: self.count(verdict) for verdict in VERDICTS},
            "load_average": {"least": min(loads), "median": median(loads), "most": max(loads)},
            "outcomes": [one.as_dict() for one in self.outcomes],
        }


def run_campaign(config: CampaignConfig, log: Callable[[str], None], found: Campaign | None = None) -> Campaign:
    """Run the scenarios; ``log`` is called with a line for each. ``found`` is filled while they run."""
    check_names(config.faults, config.strategies)
    found = Campaign(config) if found is None else found
    with tempfile.TemporaryDirectory(prefix="hoop-chaos-") as folder:
        log(f"{config.steps} steps, undisturbed …")
        reference = train_reference(Path(folder), config.steps)
        found.reference = reference.weights
        for number in range(config.runs):
            scenario = draw_scenario(
                config.seed + number, config.devices, config.steps, config.faults, config.strategies
            )
            outcome = run_scenario(scenario, reference, config.keep)
            found.outcomes.append(outcome)
            log(f"{number + 1}/{config.runs} {outcome.sentence()}")
    return found


def tables(found: Campaign) -> list[Table]:
    """The verdicts by fault, and by strategy."""
    return [
        _table(found, "fault", list(FAULTS), lambda one: one.scenario.fault),
        _table(
            found,
            "strategy",
            list(dict.fromkeys([*STRATEGIES, *(one.scenario.strategy for one in found.outcomes)])),
            lambda one: one.scenario.strategy,
        ),
    ]


def _table(found: Campaign, title: str, names: Sequence[str], key: Callable[[Outcome], str]) -> Table:
    rows = []
    for name in names:
        outcomes = [one for one in found.outcomes if key(one) == name]
        if outcomes:
            counts = [sum(one.verdict == verdict for one in outcomes) for verdict in VERDICTS]
            rows.append([name, len(outcomes), *counts])
    headings = ("runs", "same weights", "code 3, resumed", "code 3, no checkpoint", "missed", "not run", "failed")
    return Table([Column(title), *(Column(one, digits=0) for one in headings)], rows, f"Outcomes by {title}")


def summary(found: Campaign) -> str:
    """The result in sentences: the counts, and the command that repeats each failure."""
    loads = [one.load for one in found.outcomes] or [0.0]
    disturbed = len(found.outcomes) - found.count(NOT_RUN) - found.count(MISSED)
    lines = [
        f"{disturbed} disturbed runs, load average {min(loads):.1f} to {max(loads):.1f}: "
        f"{found.count(SAME)} with the same weights, {found.count(RESUMED)} with the same weights after code 3 and "
        f"--resume, {found.count(REFUSED)} ended with code 3 before their first checkpoint, "
        f"{found.count(FAILED)} failed; {found.count(MISSED)} were over before their fault, "
        f"{found.count(NOT_RUN)} were not run"
    ]
    not_run = {one.scenario.fault: one.reason for one in found.outcomes if one.verdict == NOT_RUN}
    lines += [f"not run: {fault}: {reason}" for fault, reason in sorted(not_run.items())]
    for one in found.failures:
        lines += [f"failed: {one.reason}", f"  again: {one.scenario.command()}"]
    return "\n".join(lines)
