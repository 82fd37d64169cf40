"""What a simulation found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hoop.plan.instructions import COMMUNICATE, COMPUTE, IDLE, Instruction
from hoop.plan.plan import Plan


class TracedSpan(NamedTuple):
    """One thing a rank did: an instruction or a word, what kind of thing it is, and when."""

    what: Instruction | str
    category: str
    start: float
    seconds: float


@dataclass
class RankAccount:
    """Where a rank's time went, and what it sent."""

    seconds: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0, COMMUNICATE: 0.0, IDLE: 0.0})
    bytes: float = 0.0
    messages: int = 0
    spans: list[TracedSpan] = field(default_factory=list)
    """Empty where they were not asked for."""
    steps: list[float] = field(default_factory=list)
    """When each of its steps was over: its update, or with a parameter server a worker's last push."""
    updates: list[float] = field(default_factory=list)
    """When it updated the weights it keeps."""
    end: float = 0.0


@dataclass(frozen=True)
class SimulationResult:
    """A strategy on a cluster, in virtual time."""

    strategy: str
    plan: Plan
    steps: int
    seconds: float
    """From the first instruction to the last."""
    accounts: Sequence[RankAccount]
    memory: Sequence[int]
    """What each device holds at most."""
    cuts: Sequence[int]
    """Where stages begin, by block."""
    alone_seconds: float
    """A step on one device of speed 1 that holds the whole model, without any link."""

    @property
    def devices(self) -> int:
        return len(self.accounts)

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def speedup(self) -> float:
        """Against one device that holds everything."""
        return self.alone_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def efficiency(self) -> float:
        return self.speedup / self.devices

    @property
    def idle(self) -> list[float]:
        """Each device's share of the time in which it waited."""
        return [one.seconds[IDLE] / self.seconds if self.seconds else 0.0 for one in self.accounts]

    @property
    def idle_fraction(self) -> float:
        return sum(self.idle) / self.devices

    @property
    def bytes(self) -> float:
        """A step, over all devices."""
        return sum(one.bytes for one in self.accounts) / self.steps

    @property
    def messages(self) -> float:
        return sum(one.messages for one in self.accounts) / self.steps

    @property
    def peak_memory(self) -> int:
        """Of the device that holds most."""
        return max(self.memory)

    @property
    def updates(self) -> list[float]:
        """When each update of the weights was made, over all ranks: the progress of asynchronous strategies."""
        return sorted(moment for one in self.accounts for moment in one.updates)

    def to_dict(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {
            "strategy": self.strategy,
            "devices": self.devices,
            "micros": self.plan.micros,
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "speedup": self.speedup,
            "efficiency": self.efficiency,
            "idle_fraction": self.idle_fraction,
            "idle": self.idle,
            "bytes_a_step": self.bytes,
            "messages_a_step": self.messages,
            "peak_memory": self.peak_memory,
            "memory": list(self.memory),
            "cuts": list(self.cuts),
        }
