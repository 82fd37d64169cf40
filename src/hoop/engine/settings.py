"""How a job is trained: every choice a user can make, checked, and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hoop.engine.stage.optimizer import OptimizerSettings
from hoop.errors import InvalidArgument
from hoop.plan.faults import Fault, parse_faults
from hoop.texts import parse_json

PRECISIONS = ("float32", "bfloat16")
ACCELERATORS = ("cpu", "cuda", "auto", "mirror")


@dataclass(frozen=True)
class Settings:
    """How a job is trained."""

    job: str = "mnist"
    """A recipe's name, or ``file.py:name`` or ``package.module:name`` of a ``Job``."""
    strategy: str = "data"
    epochs: int = 10
    batch_size: int = 256
    shards: int = 8
    """Into how many shards a global batch is cut: the result depends on it, not on the number of devices."""
    accumulate: int = 1
    """Each shard is computed in so many pieces, one after the other: less memory, the same batch."""
    seed: int = 0
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    precision: str = "float32"
    """What the forward computes in; weights, gradients and updates are float32 always."""
    accelerator: str = "cpu"
    """What devices compute on: ``cpu``, ``cuda``, or ``auto``: cuda where all of them have it."""
    graphs: bool = True
    """On a GPU: forward and backward are recorded once and played back, where that is the same."""
    channels_last: bool = False
    """On a GPU: images with their channels next to each other, which some of its kernels are faster with."""
    tf32: bool = False
    """On a GPU: float32 products and convolutions with 10 bits of mantissa instead of 23, for speed."""
    recompute: bool = False
    """Activations are computed again in the backward instead of being kept."""
    cut: tuple[int, ...] = ()
    """Where stages begin, by block number (the first stage begins at 0); empty: measured."""
    threads_per_device: int = 1
    pin: bool = True
    """Each device's thread is bound to its own cores."""
    balance: bool = True
    """Shards follow the devices' measured speed."""
    mirror: bool = True
    """Where devices hold parts of a model, another device has a mirror of each part, in case one is lost."""
    slowdown: tuple[float, ...] = ()
    """For experiments: how many times slower than it is each rank computes."""
    faults: str = ""
    """For tests: what is to go wrong where, such as ``kill@rank=2,step=7,instruction=reduce`` (docs/chaos.md)."""
    bucket_bytes: int = 4 << 20
    """Gradients of about so many bytes are added up together, while the backward goes on; 0: all at its end."""
    evaluate_every: int = 1
    """Epochs between evaluations; the end is always evaluated. 0: only the end."""
    checkpoint_every: int = 1
    """Epochs between checkpoints; the end always is one. 0: only the end."""
    keep: int = 3
    """Checkpoints that stay, the newest; with one alone there would be none before it."""
    max_steps: int = 0
    """Stop after so many steps; 0: when the epochs are over."""
    trace_steps: int = 50
    """Of so many steps at the start every instruction is recorded."""
    timeout_s: float = 120.0
    """How long a device waits for another within a step."""

    @property
    def micros(self) -> int:
        return self.shards * self.accumulate

    @property
    def placed(self) -> tuple[Fault, ...]:
        """The faults, one by one."""
        return parse_faults(self.faults)

    def check(self) -> Settings:
        self.optimizer.check()
        for name, least in {
            "epochs": 0,
            "batch_size": 1,
            "shards": 1,
            "accumulate": 1,
            "seed": 0,
            "threads_per_device": 1,
            "evaluate_every": 0,
            "checkpoint_every": 0,
            "keep": 1,
            "max_steps": 0,
            "trace_steps": 0,
            "bucket_bytes": 0,
        }.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InvalidArgument(f"{name}: {value!r} is not a whole number of at least {least}")
        parse_faults(self.faults)
        if self.precision not in PRECISIONS:
            raise InvalidArgument(f"precision: {self.precision!r} is unknown; known: {', '.join(PRECISIONS)}")
        if self.accelerator not in ACCELERATORS:
            raise InvalidArgument(
                f"accelerator: {self.accelerator!r} is unknown; known: {', '.join(ACCELERATORS[:3])}"
            )
        if any(factor < 1 for factor in self.slowdown):
            raise InvalidArgument(f"slowdown: {list(self.slowdown)} is not factors of 1 or more")
        if not 0 < self.timeout_s <= 86400:
            raise InvalidArgument(f"timeout_s: {self.timeout_s} is not in 0..86400")
        return self

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        try:
            data = parse_json(text)
            if not isinstance(data, dict):
                raise TypeError("not an object")
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"settings: not JSON of an object: {error}") from None
        return cls().replaced(data)

    def replaced(self, changes: Mapping[str, Any]) -> Settings:
        """With these fields changed; those of the optimizer may be given by their own names."""
        own = {one.name: one for one in dataclasses.fields(self)}
        inner = {one.name for one in dataclasses.fields(self.optimizer)} - {"name"}
        outer: dict[str, Any] = {}
        deep: dict[str, Any] = {}
        for key, value in changes.items():
            if key == "optimizer" and isinstance(value, Mapping):
                deep |= value
            elif key == "optimizer":
                deep["name"] = value.name if isinstance(value, OptimizerSettings) else value
                if isinstance(value, OptimizerSettings):
                    deep |= dataclasses.asdict(value)
            elif key in own:
                outer[key] = _like(key, value, getattr(self, key))
            elif key in inner:
                deep[key] = value
            else:
                raise InvalidArgument(
                    f"{key}: no such setting; there are {', '.join([*own, *sorted(inner)])}"
                )
        if unknown := sorted(set(deep) - inner - {"name"}):
            raise InvalidArgument(
                f"optimizer: no setting {', '.join(unknown)}; it has {', '.join(sorted(inner))}"
            )
        deep = {key: _like(key, value, getattr(self.optimizer, key)) for key, value in deep.items()}
        optimizer = dataclasses.replace(self.optimizer, **deep)
        return dataclasses.replace(self, optimizer=optimizer, **outer)


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list of whole numbers, such as [1, 2]",
}


def _like(field: str, value: Any, example: Any) -> Any:
    """The value in the type of what it replaces."""
    if isinstance(example, bool):
        fits = isinstance(value, bool)
    elif isinstance(example, tuple):
        kinds = (int, float) if field == "slowdown" else (int,)
        fits = isinstance(value, list | tuple) and all(type(one) in kinds for one in value)
        value = tuple(value) if fits else value
    elif isinstance(example, float):
        fits = isinstance(value, int | float) and not isinstance(value, bool)
        value = float(value) if fits else value
    else:
        fits = type(value) is type(example)
    if not fits:
        raise InvalidArgument(f"{field}: {value!r} is not {_KINDS.get(type(example), 'of its kind')}")
    return value
