"""What a core, its memory and its links cost beyond the arithmetic of a model.

A copy or a sum of small vectors stays in the caches and costs less a byte than one of large vectors. So both may be
curves, points of (bytes of a vector, seconds a byte), between which is interpolated; without points they are flat.

What a job costs: its blocks on one core, and what the machine adds to every instruction and message.

Times that depend on the number of rows are lines: a fixed part, and a part a row. So costs measured at one batch size
serve another; and several shards computed as one (``joint``) pay the fixed part once.

Costs that come with Hoop, for its own recipes: measured once, so that one can simulate without measuring.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from hoop.errors import InvalidArgument, NotFound
from hoop.plan.partition import Block
from hoop.texts import parse_json

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Machine:
    """One machine's costs, in seconds of a core."""

    instruction_s: float = 12e-6
    """Any instruction, beside what it does."""
    message_s: float = 45e-6
    """A message, for who sends it and again for who receives it."""
    copy_s: float = 1 / 6e9
    """A byte copied."""
    add_s: float = 1 / 4e9
    """A byte of a sum of two vectors."""
    meeting_s: float = 6e-6
    """A meeting of devices that share memory, for each of them."""
    step_s: float = 75e-6
    """What a step costs beside its instructions."""
    crowding: float = 1.0
    """How many times slower a core is when all cores of its host are at work: they share caches and memory."""
    byte_s: float | None = None
    """A byte of a message, for who sends it and again for who receives it; None: it is copied, no more."""
    agree_s: float = 180e-6
    """A word that all ranks agree on after a step, where no sum of gradients carries it, for each of them."""
    copy_at: Points = ()
    add_at: Points = ()

    def copy(self, count: float, of: float | None = None) -> float:
        """So many bytes copied, of vectors of ``of`` bytes (if that is more) that are worked through."""
        return count * rate(self.copy_at, of or count, self.copy_s)

    def add(self, count: float, of: float | None = None) -> float:
        """So many bytes of a sum."""
        return count * rate(self.add_at, of or count, self.add_s)

    def message(self, size: float) -> float:
        """A message of so many bytes, at one of its ends."""
        return self.message_s + (self.copy(size) if self.byte_s is None else self.byte_s * size)


USUAL = Machine()
FREE = Machine(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, agree_s=0.0)
"""A machine that adds nothing: what is left is the plan."""


def rate(points: Points, size: float, flat: float) -> float:
    """Seconds a byte of vectors of so many bytes: on straight lines between the points, over the size's logarithm."""
    if not points:
        return flat
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if size <= high:
            return first + (second - first) * math.log(size / low) / math.log(high / low)
    return points[-1][1]


def read_machine(data: Mapping[str, Any]) -> Machine:
    """From JSON; what is no cost is named."""
    known = {field.name for field in fields(Machine)}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"machine: no {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return Machine(**{name: _value(name, value) for name, value in data.items()})


def _value(name: str, value: Any) -> Any:
    if name in ("copy_at", "add_at"):
        return _points(name, value)
    return None if name == "byte_s" and value is None else _number(value, name)


def _points(name: str, value: Sequence[Sequence[Any]]) -> Points:
    found = tuple((_number(size, name), _number(seconds, name)) for size, seconds in value)
    if any(low >= high for (low, _), (high, _) in itertools.pairwise(((0.0, 0.0), *found))):
        raise ValueError(f"{name}: sizes {[size for size, _ in found]} do not go up from above 0")
    return found


def _number(value: Any, name: str) -> float:
    if not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value!r}, not a number of 0 or more")
    return float(value)


__all__ = ["FREE", "BlockCost", "Costs", "LinearCost", "Machine", "read_costs"]

FORMAT = 1


@dataclass(frozen=True)
class LinearCost:
    """Seconds (or bytes) that grow with the rows."""

    fixed: float = 0.0
    row: float = 0.0

    def at(self, rows: float) -> float:
        return self.fixed + self.row * rows

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> LinearCost:
        """The line through two measurements; neither part is negative."""
        (low, first), (high, second) = points[0], points[-1]
        row = max(0.0, (second - first) / (high - low)) if high > low else first / low
        return cls(max(0.0, first - row * low) if high > low else 0.0, row)


@dataclass(frozen=True)
class BlockCost:
    """One block of a model."""

    name: str
    forward: LinearCost
    backward: LinearCost
    weight_bytes: int = 0
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    activation: LinearCost = LinearCost()
    """Bytes kept of a micro-batch from its forward to its backward."""
    output: LinearCost = LinearCost()
    """Bytes handed on."""


@dataclass(frozen=True)
class Costs:
    """A job, priced."""

    blocks: tuple[BlockCost, ...]
    rows: int
    """Samples of a micro-batch."""
    machine: Machine = USUAL
    load: LinearCost = LinearCost()
    loss: LinearCost = LinearCost()
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
            LinearCost(forward),
            LinearCost(backward),
            weight_bytes,
            0,
            weight_bytes,
            LinearCost(activation_bytes),
            LinearCost(output_bytes),
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
            load, loss = LinearCost(**data.pop("load")), LinearCost(**data.pop("loss"))
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
        values[name] = LinearCost(**values[name])
    return BlockCost(**values)


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
