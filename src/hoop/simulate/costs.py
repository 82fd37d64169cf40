"""What a job costs: its blocks on one core, and what the machine adds to every instruction and message.

Times that depend on the number of rows are lines: a fixed part, and a part a row. So costs measured at one batch size
serve another; and several shards computed as one (``joint``) pay the fixed part once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hoop.errors import InvalidArgument, NotFound
from hoop.plan.partition import Block
from hoop.simulate.machine import FREE, USUAL, Machine, read_machine
from hoop.texts import parse_json

__all__ = ["FREE", "BlockCost", "Costs", "Line", "Machine", "read_costs"]

FORMAT = 1


@dataclass(frozen=True)
class Line:
    """Seconds (or bytes) that grow with the rows."""

    fixed: float = 0.0
    row: float = 0.0

    def at(self, rows: float) -> float:
        return self.fixed + self.row * rows

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Line:
        """The line through two measurements; neither part is negative."""
        (low, first), (high, second) = points[0], points[-1]
        row = max(0.0, (second - first) / (high - low)) if high > low else first / low
        return cls(max(0.0, first - row * low) if high > low else 0.0, row)


@dataclass(frozen=True)
class BlockCost:
    """One block of a model."""

    name: str
    forward: Line
    backward: Line
    weight_bytes: int = 0
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    activation: Line = Line()
    """Bytes kept of a micro-batch from its forward to its backward."""
    output: Line = Line()
    """Bytes handed on."""


@dataclass(frozen=True)
class Costs:
    """A job, priced."""

    blocks: tuple[BlockCost, ...]
    rows: int
    """Samples of a micro-batch."""
    machine: Machine = USUAL
    load: Line = Line()
    loss: Line = Line()
    update_s: float = 0.0
    """A byte of weights, updated."""
    update_fixed_s: float = 0.0
    joint: int = 1
    """Shards that a device computes as one, where it holds the whole model."""
    source: str = "given"
    """Where the figures come from, for people."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else is worth knowing: job, batch size, shards, optimizer, when and where it was measured."""

    @classmethod
    def uniform(
        cls,
        blocks: int,
        forward: float = 1.0,
        backward: float = 2.0,
        *,
        weight_bytes: int = 0,
        output_bytes: int = 0,
        activation_bytes: int = 0,
        update_s: float = 0.0,
        machine: Machine | None = None,
    ) -> Costs:
        """A model of equal blocks; seconds and bytes a micro-batch. Without a machine nothing else costs anything."""
        one = BlockCost(
            "block",
            Line(forward),
            Line(backward),
            weight_bytes,
            0,
            weight_bytes,
            Line(activation_bytes),
            Line(output_bytes),
        )
        return cls((one,) * blocks, 1, machine or FREE, update_s=update_s)

    def of(self, rows: int) -> Costs:
        """The same with micro-batches of so many samples."""
        return dataclasses.replace(self, rows=rows)

    @property
    def weight_bytes(self) -> int:
        return sum(block.weight_bytes for block in self.blocks)

    def partition_blocks(self) -> list[Block]:
        """As the cut into stages wants them."""
        return [
            Block(
                f"{index} ({one.name})",
                one.forward.at(self.rows) + one.backward.at(self.rows),
                one.weight_bytes,
                one.optimizer_bytes,
                round(one.activation.at(self.rows)),
                round(one.output.at(self.rows)),
                one.gradient_bytes,
            )
            for index, one in enumerate(self.blocks)
        ]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "costs") -> Costs:
        """The inverse of ``to_json``; what is missing or malformed is named."""
        try:
            data = parse_json(text)
            if data.pop("format", None) != FORMAT:
                raise InvalidArgument(f"{where}: not of format {FORMAT}; make it anew with: hoop calibrate")
            blocks = tuple(_block(one) for one in data.pop("blocks"))
            machine = read_machine(data.pop("machine"))
            load, loss = Line(**data.pop("load")), Line(**data.pop("loss"))
            return cls(blocks, machine=machine, load=load, loss=loss, **data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidArgument(f"{where}: no costs in JSON: {error}") from None


def read_costs(path: Path) -> Costs:
    """What ``hoop calibrate`` wrote."""
    try:
        return Costs.from_json(path.read_text("utf-8"), str(path))
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file; make it with: hoop calibrate --out {path}") from None


def _block(data: Mapping[str, Any]) -> BlockCost:
    values = dict(data)
    for name in ("forward", "backward", "activation", "output"):
        values[name] = Line(**values[name])
    return BlockCost(**values)
