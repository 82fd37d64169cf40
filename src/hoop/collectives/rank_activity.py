"""What one rank does while it trains: sums that the training thread makes, and that other threads read.

``engine/live_activity.py`` implements ``ActivitySource``; a device's heartbeats and its trace call use it
(``servers/tasks.py``). Nothing here is done per step: a reader copies sums that exist anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class RankActivity:
    """Sums since the rank's task began. Readers take differences of two of them."""

    steps: int = 0
    load_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    communicate_s: float = 0.0
    update_s: float = 0.0
    idle_s: float = 0.0
    """Waiting for other ranks."""
    bytes_sent: int = 0
    """To other ranks, over links and through shared memory."""
    shards: tuple[int, ...] = ()
    """Shards that the rank computes in a step."""
    stages: tuple[int, ...] = ()
    """Stages of the model that the rank holds."""


@dataclass(frozen=True)
class InstructionSpan:
    """One instruction of a trace."""

    instruction: str
    category: str
    start: float
    """Seconds since 1970, by this machine's clock."""
    seconds: float


@dataclass(frozen=True)
class StepTrace:
    """The instructions of a few steps of one rank."""

    rank: int
    first_step: int
    """Steps done in the job when the trace began."""
    steps: int
    spans: tuple[InstructionSpan, ...]


class ActivitySource(Protocol):
    """The trainer of one rank, as other threads see it."""

    def read(self) -> RankActivity:
        """The newest sums. Any thread may call it; it does not wait."""

    def trace(self, steps: int, timeout_s: float) -> StepTrace:
        """Records the next ``steps`` steps; returns fewer if ``timeout_s`` is over before."""
