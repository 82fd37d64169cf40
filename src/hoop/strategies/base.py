"""What every strategy answers, and the checks that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from hoop.errors import InvalidArgument
from hoop.plan.plan import Plan, split_by, split_evenly
from hoop.plan.rules import Rule


class Strategy(Protocol):
    """How a model is trained on several devices. Strategies are values: they hold choices, and run nothing."""

    name: ClassVar[str]

    @property
    def synchronous(self) -> bool:
        """Whether every micro-batch of a step is computed with the weights of the step before: exactly SGD."""

    @property
    def versions(self) -> int:
        """How many versions of the weights a device keeps at a time."""

    @property
    def spec(self) -> str:
        """The strategy as it is typed; ``catalog.parse`` gives it back."""

    def describe(self) -> str:
        """One sentence for people."""

    def stages(self, devices: int) -> int:
        """Into how many stages the model is cut."""

    def plan(self, devices: int, micros: int, speeds: Sequence[float] | None = None) -> Plan:
        """What every rank does in one step. Where ranks follow rules, one order that can happen."""

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        """What decides for a rank over that many steps; None: it runs the plan's list, once a step."""


def check_sizes(devices: int, micros: int, speeds: Sequence[float] | None = None) -> None:
    """The part of a question that can be wrong for every strategy alike."""
    if devices < 1:
        raise InvalidArgument(f"devices: {devices}; a strategy needs at least 1")
    if micros < 1:
        raise InvalidArgument(f"micros: {micros}; a global batch has at least 1 shard")
    if speeds is not None and len(speeds) != devices:
        raise InvalidArgument(f"speeds: {len(speeds)} of them for {devices} devices; give one each")


def shares(micros: int, parts: int, speeds: Sequence[float] | None) -> list[range]:
    """Which shards each part computes: contiguous, equally many, or as many as its speed earns."""
    return split_evenly(micros, parts) if speeds is None else split_by(micros, speeds)
