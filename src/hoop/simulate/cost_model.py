"""The cost model of a simulation: ``Costs`` of a job's blocks on one core, and the ``Machine`` that runs them.

Times that depend on the number of rows are linear: a fixed part and a part per row. So costs measured at one batch size
apply to another, and several shards computed in one batch (``joint``) pay the fixed part once.

A copy or a sum of small vectors stays in the caches and costs less per byte than one of large vectors. So both costs
may be curves: points of (bytes of a vector, seconds per byte) with interpolation between them. Without points they are
flat.

Hoop ships measured costs of its own recipes (``shipped_costs``), so that they can be simulated without a measurement.
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
"""Points of (bytes of a vector, seconds per byte), by rising size."""


@dataclass(frozen=True)
class Machine:
    """One machine's overheads, in seconds of core time."""

    instruction_s: float = 12e-6
    """Overhead of any instruction."""
    message_s: float = 45e-6
    """Overhead of a message, on the sender and again on the receiver."""
    copy_s: float = 1 / 6e9
    """Copying, per byte."""
    add_s: float = 1 / 4e9
    """Adding two vectors, per byte."""
    meeting_s: float = 6e-6
    """A barrier among devices that share memory, on each device."""
    step_s: float = 75e-6
    """Overhead of a step beside its instructions."""
    crowding: float = 1.0
    """How many times slower a core is while all cores of its host compute: they share caches and memory bandwidth."""
    slice_s: float = 1.4e-3
    """For how long a rank keeps its core while another one wants it: the time slice of the kernel's scheduler. 0: until
    it waits."""
    byte_s: float | None = None
    """Sending or receiving, per byte; None: the cost of a copy."""
    shard_s: float = 10e-6
    """What a shard's gradient costs beside its computation."""
    reduce_s: float = 40e-6
    """Overhead of a gradient sum in shared memory beside its barriers, additions and copies, on each device."""
    agree_s: float = 180e-6
    """The vote on stopping after a step, on each rank, where no gradient sum carries it."""
    copy_at: Points = ()
    """Curve in place of ``copy_s``."""
    add_at: Points = ()
    """Curve in place of ``add_s``."""

    def copy(self, size: float, vector_size: float | None = None) -> float:
        """Seconds to copy ``size`` bytes; ``vector_size``: size of the whole vector, where these are a part of it."""
        return size * interpolate(self.copy_at, vector_size or size, self.copy_s)

    def add(self, size: float, vector_size: float | None = None) -> float:
        """Seconds to add ``size`` bytes to as many; ``vector_size`` as in ``copy``."""
        return size * interpolate(self.add_at, vector_size or size, self.add_s)

    def message(self, size: float) -> float:
        """Seconds for a message of ``size`` bytes, on the sender or the receiver."""
        return self.message_s + (self.copy(size) if self.byte_s is None else self.byte_s * size)


DEFAULT_MACHINE = Machine()
FREE_MACHINE = Machine(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, slice_s=0.0, shard_s=0.0, reduce_s=0.0, agree_s=0.0)
"""A machine without overheads: only the plan's computation costs time."""


def interpolate(points: Points, size: float, flat: float) -> float:
    """Seconds per byte for vectors of ``size`` bytes: linear in log(size) between points; ``flat`` without points."""
    if not points:
        return flat
    if size <= points[0][0]:
        return points[0][1]
    for (low, first), (high, second) in itertools.pairwise(points):
        if size <= high:
            return first + (second - first) * math.log(size / low) / math.log(high / low)
    return points[-1][1]


def read_machine(data: Any) -> Machine:
    """A machine from its JSON object; errors name the bad field."""
    _check_object(data, "machine", Machine)
    return Machine(**{name: _value(name, value) for name, value in data.items()})


def _check_object(data: Any, name: str, kind: type[Machine | LinearCost | BlockCost | GpuCosts | Costs]) -> None:
    """Raises ValueError unless ``data`` is a JSON object with the fields that ``kind`` has."""
    if not isinstance(data, dict):
        raise ValueError(f"{name} is {data!r}, not an object")
    known = {field.name for field in fields(kind)}
    if unknown := sorted(set(data) - known):
        raise ValueError(f"{name}: no {', '.join(unknown)}; there are {', '.join(sorted(known))}")


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
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_NUMBER:
        raise ValueError(f"{name} is {value!r}, not a number of 0 to {_MAX_NUMBER:g}")
    return float(value)


def _whole(value: Any, name: str, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MAX_NUMBER:
        raise ValueError(f"{name} is {value!r}, not a whole number of {least} to {_MAX_NUMBER:g}")
    return value


_MAX_NUMBER = 1e18
"""Of seconds, bytes and samples in a file."""


FORMAT = 1
"""Version of the JSON form of ``Costs``."""


@dataclass(frozen=True)
class LinearCost:
    """Seconds (or bytes) that grow linearly with the number of rows."""

    fixed: float = 0.0
    row: float = 0.0
    """Per row."""

    def at(self, rows: float) -> float:
        return self.fixed + self.row * rows

    @classmethod
    def through_points(cls, points: Sequence[tuple[int, float]]) -> LinearCost:
        """The line through the first and the last (rows, value); both parts are at least 0."""
        (low, first), (high, second) = points[0], points[-1]
        row = max(0.0, (second - first) / (high - low)) if high > low else first / low
        return cls(max(0.0, first - row * low) if high > low else 0.0, row)


@dataclass(frozen=True)
class BlockCost:
    """Costs of one block of a model."""

    name: str
    forward: LinearCost
    backward: LinearCost
    weight_bytes: int = 0
    optimizer_bytes: int = 0
    gradient_bytes: int = 0
    activation: LinearCost = LinearCost()
    """Bytes of activations of a micro-batch, kept from its forward to its backward."""
    output: LinearCost = LinearCost()
    """Bytes of the output for a micro-batch."""
    start_s: float = 0.0
    """By how much its forward, or its backward, takes longer if other work than its neighbours ran before it."""


@dataclass(frozen=True)
class GpuCosts:
    """Costs of a data parallel step whose state stays on a GPU, as graphs that are launched there.

    compute (its shards, all at once) ── meet the other ranks ── finish (read their sums, add, update)
    """

    compute: LinearCost
    """By samples of the rank."""
    finish_s: float = 0.0
    """Sum and update, without what is read from other ranks."""
    read_s: float = 0.0
    """Reading the memory of another device of the GPU, per byte."""
    step_s: float = 0.0
    """The rest of a step, on the host: launches, loading that takes longer than computing, the ends of strides."""
    memory: int | None = None
    """Bytes of the GPU on which this was measured."""


@dataclass(frozen=True)
class Costs:
    """Costs of a job."""

    blocks: tuple[BlockCost, ...]
    rows: int
    """Samples per micro-batch."""
    machine: Machine = DEFAULT_MACHINE
    load: LinearCost = LinearCost()
    loss: LinearCost = LinearCost()
    update_s: float = 0.0
    """Optimizer update, per byte of weights."""
    update_fixed_s: float = 0.0
    """Optimizer update, fixed part."""
    joint: int = 1
    """Shards that a device with the whole model computes in one batch."""
    gpu: GpuCosts | None = None
    """Costs of a step on a GPU; None: devices compute on cores."""
    source: str = "given"
    """Where the numbers come from, for users."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Metadata: job, batch size, shards, optimizer, time and place of the measurement."""

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
        """A model of equal blocks; seconds and bytes are per micro-batch. ``machine`` None: no overheads."""
        one = BlockCost(
            "block",
            forward=LinearCost(forward),
            backward=LinearCost(backward),
            weight_bytes=weight_bytes,
            optimizer_bytes=0,
            gradient_bytes=weight_bytes,
            activation=LinearCost(activation_bytes),
            output=LinearCost(output_bytes),
        )
        return cls((one,) * blocks, 1, machine or FREE_MACHINE, update_s=update_s)

    def with_rows(self, rows: int) -> Costs:
        """The same costs with micro-batches of ``rows`` samples."""
        return dataclasses.replace(self, rows=rows)

    @property
    def weight_bytes(self) -> int:
        return sum(block.weight_bytes for block in self.blocks)

    def partition_blocks(self) -> list[Block]:
        """The blocks as input for ``plan.partition``."""
        return [
            Block(
                f"{index} ({one.name})",
                seconds=one.forward.at(self.rows) + one.backward.at(self.rows),
                weight_bytes=one.weight_bytes,
                optimizer_bytes=one.optimizer_bytes,
                activation_bytes=round(one.activation.at(self.rows)),
                output_bytes=round(one.output.at(self.rows)),
                gradient_bytes=one.gradient_bytes,
            )
            for index, one in enumerate(self.blocks)
        ]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str = "costs") -> Costs:
        """The inverse of ``to_json``; errors name the missing or malformed field. ``where``: the source, for errors."""
        try:
            data = parse_json(text)
            if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
                raise InvalidArgument(f"{where}: not of format {FORMAT}; make it again with: hoop calibrate")
            _check_object(data, "costs", cls)
            return cls(**{name: _cost_field(name, value) for name, value in data.items()})
        except (ValueError, TypeError, LookupError) as error:
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(f"{where}: no costs in JSON: {error}") from None


def read_costs(path: Path) -> Costs:
    """Reads a file that ``hoop calibrate`` wrote."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file; make it with: hoop calibrate --out {path}") from None
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: no costs in JSON: {error}") from None
    return Costs.from_json(text, str(path))


def _cost_field(name: str, value: Any) -> Any:
    """A field of ``Costs`` from its JSON value."""
    match name:
        case "blocks":
            if not isinstance(value, list) or not value:
                raise ValueError(f"blocks is {value!r}, not a list of at least one")
            return tuple(_block(one, f"block {number}") for number, one in enumerate(value))
        case "machine":
            return read_machine(value)
        case "load" | "loss":
            return _linear(value, name)
        case "gpu":
            return None if value is None else _gpu(value)
        case "rows" | "joint":
            return _whole(value, name, least=1)
        case "source":
            return str(value)
        case "about":
            if not isinstance(value, dict):
                raise ValueError(f"about is {value!r}, not an object")
            for key in ("batch_size", "shards"):
                if key in value:
                    _whole(value[key], f"about: {key}", least=1)
            return value
        case _:
            return _number(value, name)


def _block(data: Any, where: str) -> BlockCost:
    _check_object(data, where, BlockCost)
    values = dict(data)
    for name, value in data.items():
        if name == "start_s":
            values[name] = _number(value, f"{where}: {name}")
        elif name.endswith("_bytes"):
            values[name] = _whole(value, f"{where}: {name}")
        elif name != "name":
            values[name] = _linear(value, f"{where}: {name}")
    return BlockCost(**{**values, "name": str(data["name"])})


def _gpu(data: Any) -> GpuCosts:
    _check_object(data, "gpu", GpuCosts)
    values = dict(data)
    values["compute"] = _linear(data["compute"], "gpu: compute")
    for name in ("finish_s", "read_s", "step_s"):
        values[name] = _number(data.get(name, 0.0), f"gpu: {name}")
    if data.get("memory") is not None:
        values["memory"] = _whole(data["memory"], "gpu: memory", least=1)
    return GpuCosts(**values)


def _linear(data: Any, where: str) -> LinearCost:
    _check_object(data, where, LinearCost)
    return LinearCost(**{name: _number(value, f"{where}: {name}") for name, value in data.items()})


_SHIPPED_FILE = "shipped.json"


def shipped_recipes() -> list[str]:
    """The recipes whose costs ship with Hoop."""
    return sorted(_read_shipped())


def shipped_costs(name: str) -> Costs:
    """The shipped costs of a recipe; ``about`` names the machine on which they were measured."""
    known = _read_shipped()
    if name not in known:
        raise NotFound(
            f"costs: none come with Hoop for {name!r} (there are {', '.join(sorted(known))}); "
            f"measure them with: hoop calibrate {name} --out costs.json, and give --costs costs.json"
        )
    costs = Costs.from_json(json.dumps(known[name]), f"shipped costs of {name}")
    where, date = costs.about.get("machine", "?"), costs.about.get("date", "?")
    return dataclasses.replace(costs, source=f"shipped with Hoop, measured on {where}, {date}")


def _read_shipped() -> dict[str, object]:
    found: dict[str, object] = json.loads(resources.files("hoop.simulate").joinpath(_SHIPPED_FILE).read_text("utf-8"))
    return found
