"""The result of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hoop.plan.instructions import COMMUNICATE, COMPUTE, IDLE, Instruction
from hoop.plan.plan import Plan


class TracedSpan(NamedTuple):
    """One span of a rank's timeline: an instruction or a label, its category, start and duration."""

    what: Instruction | str
    category: str
    start: float
    seconds: float


@dataclass
class RankAccount:
    """A rank's time by share (compute, communicate, idle), and its traffic."""

    seconds: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0, COMMUNICATE: 0.0, IDLE: 0.0})
    bytes: float = 0.0
    messages: int = 0
    spans: list[TracedSpan] = field(default_factory=list)
    """Empty unless the simulation kept a trace."""
    steps: list[float] = field(default_factory=list)
    """Times at which the rank's steps ended: its update, or a worker's last push with parameter servers."""
    updates: list[float] = field(default_factory=list)
    """Times at which the rank updated weights."""
    end: float = 0.0
    """Time at which the rank finished."""


@dataclass(frozen=True)
class SimulationResult:
    """Time, traffic and memory of a strategy on a cluster, in virtual time."""

    strategy: str
    plan: Plan
    steps: int
    seconds: float
    """From the first instruction to the last."""
    accounts: Sequence[RankAccount]
    memory: Sequence[int]
    """Peak memory of each device in bytes."""
    cuts: Sequence[int]
    """The block at which each stage begins."""
    single_device_seconds: float
    """Time of a step on one device of speed 1 that holds the whole model."""

    @property
    def devices(self) -> int:
        return len(self.accounts)

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def speedup(self) -> float:
        """Relative to one device that holds the whole model."""
        return self.single_device_seconds / self.step_seconds if self.step_seconds else 0.0

    @property
    def efficiency(self) -> float:
        return self.speedup / self.devices

    @property
    def idle(self) -> list[float]:
        """Fraction of the time that each device waited."""
        return [one.seconds[IDLE] / self.seconds if self.seconds else 0.0 for one in self.accounts]

    @property
    def idle_fraction(self) -> float:
        return sum(self.idle) / self.devices

    @property
    def bytes(self) -> float:
        """Bytes sent per step, over all devices."""
        return sum(one.bytes for one in self.accounts) / self.steps

    @property
    def messages(self) -> float:
        return sum(one.messages for one in self.accounts) / self.steps

    @property
    def peak_memory(self) -> int:
        """Of the device with the most."""
        return max(self.memory)

    @property
    def updates(self) -> list[float]:
        """Times of all weight updates, over all ranks: the progress of asynchronous strategies."""
        return sorted(moment for one in self.accounts for moment in one.updates)

    def to_dict(self) -> dict[str, Any]:
        """The numbers, for JSON."""
        return {
            "strategy": self.strategy,
            "devices": self.devices,
            "micros": self.plan.num_microbatches,
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
