"""The ``Strategy`` protocol, and helpers that all strategies share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from hoop.errors import InvalidArgument
from hoop.plan.plan import Plan, split_by_speed, split_evenly
from hoop.plan.rules import Rule


class Strategy(Protocol):
    """How a model is trained on several devices. A strategy is an immutable value; it runs nothing."""

    name: ClassVar[str]
    replicated: ClassVar[bool]
    """Whether every rank has the whole model and optimizer state, so that the loss of a rank loses no state."""

    @property
    def synchronous(self) -> bool:
        """Whether every micro-batch of a step uses the weights after the previous step: exactly SGD."""

    @property
    def versions(self) -> int:
        """Number of weight versions that a device keeps at a time."""

    @property
    def spec(self) -> str:
        """The strategy as text; ``catalog.parse`` is the inverse."""

    def describe(self) -> str:
        """One sentence for users."""

    def stages(self, devices: int) -> int:
        """Number of stages into which the model is cut."""

    def plan(self, devices: int, num_microbatches: int, speeds: Sequence[float] | None = None) -> Plan:
        """The plan of one step. If ranks follow rules, the plan shows one possible order.

        speeds: relative speed of each device; None: all equal.
        """

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        """The rule that a rank follows for ``steps`` steps; None: it runs its list of the plan once per step."""


def check_sizes(devices: int, num_microbatches: int, speeds: Sequence[float] | None = None) -> None:
    """Validates the arguments of ``Strategy.plan``."""
    if devices < 1:
        raise InvalidArgument(f"devices: {devices}; a strategy needs at least 1")
    if num_microbatches < 1:
        raise InvalidArgument(f"num_microbatches: {num_microbatches}; a global batch has at least 1 shard")
    if speeds is not None and len(speeds) != devices:
        raise InvalidArgument(f"speeds: {len(speeds)} values for {devices} devices; give one each")


def split_microbatches(num_microbatches: int, parts: int, speeds: Sequence[float] | None) -> list[range]:
    """The micro-batches of each part: contiguous ranges of equal size, or sized by speed."""
    return split_evenly(num_microbatches, parts) if speeds is None else split_by_speed(num_microbatches, speeds)
