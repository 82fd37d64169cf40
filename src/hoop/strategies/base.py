"""The ``Strategy`` protocol, and helpers that all strategies share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from hoop.errors import InvalidArgument
from hoop.plan.plan import Plan, split_by_speed, split_evenly
from hoop.plan.rules import Rule
from hoop.topology import MAX_DEVICES

MAX_MICROBATCHES = 16384
"""Maximum number of micro-batches in a global batch: each is several instructions of a plan."""
MAX_STAGE_MICROBATCHES = 1 << 18
"""Maximum number of stages times micro-batches: each pair is several instructions of a plan."""
MAX_SLICES = 1024
"""Maximum number of slices of the model on one device."""


class Strategy(Protocol):
    """How a model is trained on several devices. A strategy is an immutable value; it runs nothing."""

    name: ClassVar[str]

    @property
    def replicated(self) -> bool:
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


class SynchronousStrategy:
    """Base of strategies in which every rank runs its list of the plan: one version of the weights, and no rule."""

    @property
    def synchronous(self) -> bool:
        return True

    @property
    def versions(self) -> int:
        return 1

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        return None


def check_sizes(
    devices: int,
    num_microbatches: int,
    speeds: Sequence[float] | None = None,
    stages: Callable[[int], int] | None = None,
) -> None:
    """Validates the arguments of ``Strategy.plan``; ``stages``: the strategy's method of this name."""
    if devices < 1:
        raise InvalidArgument(f"devices: {devices}; a strategy needs at least 1")
    if devices > MAX_DEVICES:
        raise InvalidArgument(f"devices: {devices} are more than the {MAX_DEVICES} that are allowed")
    if num_microbatches < 1:
        raise InvalidArgument(f"num_microbatches: {num_microbatches}; a global batch has at least 1 shard")
    if num_microbatches > MAX_MICROBATCHES:
        raise InvalidArgument(
            f"num_microbatches: {num_microbatches}; a global batch has at most {MAX_MICROBATCHES} (shards x accumulate)"
        )
    count = 1 if stages is None else stages(devices)
    if count * num_microbatches > MAX_STAGE_MICROBATCHES:
        raise InvalidArgument(
            f"num_microbatches: {num_microbatches} in {count} stages; the product is at most {MAX_STAGE_MICROBATCHES}"
        )
    if speeds is not None and len(speeds) != devices:
        raise InvalidArgument(f"speeds: {len(speeds)} values for {devices} devices; give one each")


def check_slices(slices: int) -> None:
    """Validates the number of slices of the model on one device."""
    if slices < 1:
        raise InvalidArgument(f"slices: {slices}; a device holds at least 1")
    if slices > MAX_SLICES:
        raise InvalidArgument(f"slices: {slices}; a device holds at most {MAX_SLICES}")


def check_count(name: str, value: int, least: str) -> None:
    """Validates a number of devices in a strategy; ``least``: what is wrong with 0."""
    if value < 1:
        raise InvalidArgument(f"{name}: {value}; {least}")
    if value > MAX_DEVICES:
        raise InvalidArgument(f"{name}: {value} are more than the {MAX_DEVICES} devices that are allowed")


def split_microbatches(num_microbatches: int, parts: int, speeds: Sequence[float] | None) -> list[range]:
    """The micro-batches of each part: contiguous ranges of equal size, or sized by speed.

    Data parallel: a part is a rank, and its micro-batches are the shards that it computes (``data_parallel.py``).
    """
    return split_evenly(num_microbatches, parts) if speeds is None else split_by_speed(num_microbatches, speeds)
