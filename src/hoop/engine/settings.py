"""How a job is trained: every setting that a user can choose, with its check and its JSON form."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from hoop.engine.optimizer_settings import OPTIMIZERS, OptimizerSettings
from hoop.errors import InvalidArgument
from hoop.membership.replication import check_replicas
from hoop.plan.faults import Fault, parse_faults
from hoop.strategies.base import MAX_MICROBATCHES
from hoop.strategies.catalog import parse
from hoop.strategies.data_parallel import DataParallel
from hoop.texts import parse_json
from hoop.topology import MAX_DEVICES

PRECISIONS = ("float32", "bfloat16")
ACCELERATORS = ("cpu", "cuda", "auto", "emulated")
SHARDED_UPDATES = ("auto", "on", "off")


@dataclass(frozen=True)
class Settings:
    """The settings of one run: equal at every rank, sent to devices as JSON."""

    job: str = "mnist"
    """Name of a recipe, or ``file.py:name`` or ``package.module:name`` of a ``Job``."""
    strategy: str = "data"
    epochs: int = 10
    batch_size: int = 256
    shards: int = 8
    """Number of shards of a global batch. The result depends on it, not on the number of devices."""
    accumulate: int = 1
    """Number of micro-batches per shard, computed one after the other: less memory, the same batch."""
    seed: int = 0
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    precision: str = "float32"
    """Precision of the forward, one of ``PRECISIONS``; weights, gradients and updates are always float32."""
    accelerator: str = "auto"
    """Where to compute: ``cpu``, ``cuda``, or ``auto``: cuda if all devices have it. (``emulated``, for tests: GPU code
    on the CPU.)"""
    graphs: bool = True
    """GPU: record forward and backward as CUDA graphs and replay them, where that gives the same result."""
    channels_last: bool = False
    """GPU: store images in channels-last format, with which some kernels are faster."""
    tf32: bool = False
    """GPU: compute float32 products and convolutions in TF32 (10 bits of mantissa instead of 23), for speed."""
    recompute: bool = False
    """Activation checkpointing: recompute activations in the backward instead of keeping them."""
    cut: tuple[int, ...] = ()
    """First block of each stage but the first, which begins at block 0; empty: partition by measured cost."""
    threads_per_device: int = 1
    flush_denormals: bool = True
    """Count denormal numbers as zero, with one thread a device: on x86 they slow a step to half its speed."""
    pin: bool = True
    """Bind each device's thread to its own cores."""
    balance: bool = True
    """Data parallel: give faster devices more shards, by measured speed."""
    replicate: bool = True
    """If devices hold parts of a model, replicate each part on another device, in case one is lost."""
    replicas: int = 1
    """Number of replicas of each part, on different devices: as many devices may be lost at once."""
    host_replica_s: float = 5.0
    """Data parallel on GPUs: seconds between copies of the state to host memory, for the case that all devices lose
    their GPU at once and are restarted; 0: none between checkpoints."""
    min_devices: int = 1
    """Minimum number of devices with which the job goes on; with fewer it waits for others (``--min``)."""
    max_devices: int = 0
    """Maximum number of devices that the job takes while it runs (``--devices 4:16``); 0: all that join its cluster."""
    allow_mixed: bool = False
    """Let devices take part that have another version of Hoop or PyTorch; the weights then depend on the devices."""
    require_same_bits: bool = False
    """Refuse devices whose processors round differently. Without it they take part, and an event names them."""
    slowdown: tuple[float, ...] = ()
    """For experiments: factor by which each rank's computation is slowed down, 1 or more; empty: none is."""
    faults: str = ""
    """For tests: faults to inject, such as ``kill@rank=2,step=7,instruction=reduce`` (docs/chaos.md)."""
    sharded_update: str = "auto"
    """Data parallel: each device updates a slice of the weights, of which only it has the optimizer state (ZeRO stage
    1). One of ``SHARDED_UPDATES``; ``auto``: if measured costs say that it is faster, or if the state fits only then.
    """
    bucket_bytes: int = 4 << 20
    """Bytes of a gradient bucket, which is reduced while the backward continues; 0: one bucket, after the backward."""
    evaluate_every: int = 1
    """Number of epochs between evaluations. The final model is always evaluated; 0: only that."""
    checkpoint_every: int = 1
    """Number of epochs between checkpoints. The final model always gets one; 0: only that."""
    keep: int = 3
    """Number of checkpoints to keep, the newest ones."""
    max_steps: int = 0
    """Stop after this many steps; 0: after all epochs."""
    shuffle: bool = True
    """Take the samples of each epoch in another random order; False: in the order of the dataset."""
    drop_last: bool = False
    """Leave out the last batch of an epoch if it is smaller than the others."""
    patience: int = 0
    """Early stopping: end after this many evaluations in a row without a better one; 0: never."""
    monitor: str = "loss"
    """Early stopping and the best checkpoint: ``loss``, ``accuracy`` or another metric of evaluations."""
    monitor_mode: str = ""
    """Whether a smaller (``min``) or a larger (``max``) value of ``monitor`` is better; empty: max for accuracy."""
    min_delta: float = 0.0
    """Early stopping: the least change of ``monitor`` that counts as better."""
    trace_steps: int = 50
    """Number of steps at the start whose instructions are recorded, for the timeline."""
    timeout_s: float = 120.0
    """Seconds that a rank waits for another one within a step."""

    hang_s: float = 60.0
    """Seconds without progress after which a device that lives is replaced, or 20 of its usual steps if that is more;
    ten times as long for first steps, evaluations and the loading of data. 0: never."""

    @property
    def num_microbatches(self) -> int:
        return self.shards * self.accumulate

    @property
    def may_use_cuda(self) -> bool:
        return self.accelerator in ("cuda", "auto")

    @property
    def parsed_faults(self) -> tuple[Fault, ...]:
        """``faults``, parsed."""
        return parse_faults(self.faults)

    def check(self) -> Settings:
        self.optimizer.check()
        check_replicas(self.replicas, replicate=self.replicate)
        for name, (least, most) in _BOUNDS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise InvalidArgument(f"{name}: {value!r} is not a whole number of at least {least}")
            if value > most:
                raise InvalidArgument(f"{name}: {value!r} is more than {most}, the most that is allowed")
        if self.max_devices and self.min_devices > self.max_devices:
            raise InvalidArgument(
                f"min_devices (--min): {self.min_devices} is more than the {self.max_devices} devices that the job "
                "takes (max_devices)"
            )
        if self.require_same_bits and self.allow_mixed:
            raise InvalidArgument("require_same_bits: allow_mixed lets devices differ; leave out one of them")
        if self.num_microbatches > MAX_MICROBATCHES:
            raise InvalidArgument(
                f"accumulate: {self.shards} shards x {self.accumulate} are {self.num_microbatches} micro-batches, more "
                f"than {MAX_MICROBATCHES}, the most that is allowed"
            )
        parse_faults(self.faults)
        if self.precision not in PRECISIONS:
            raise InvalidArgument(f"precision: {self.precision!r} is unknown; known: {', '.join(PRECISIONS)}")
        if self.accelerator not in ACCELERATORS:
            raise InvalidArgument(f"accelerator: {self.accelerator!r} is unknown; known: {', '.join(ACCELERATORS[:3])}")
        self._check_sharded_update()
        if not all(1 <= factor <= _MAX_SLOWDOWN for factor in self.slowdown):
            raise InvalidArgument(f"slowdown: {list(self.slowdown)} is not factors of 1 to {_MAX_SLOWDOWN}")
        if self.monitor_mode not in ("", "min", "max"):
            raise InvalidArgument(f"monitor_mode: {self.monitor_mode!r} is neither 'min' nor 'max'")
        if not 0 <= self.min_delta < math.inf:
            raise InvalidArgument(f"min_delta: {self.min_delta} is not 0 or more")
        if not 0 <= self.host_replica_s <= 86400:
            raise InvalidArgument(f"host_replica_s: {self.host_replica_s} is not in 0..86400")
        if not 0 <= self.hang_s <= 86400:
            raise InvalidArgument(f"hang_s: {self.hang_s} is not in 0..86400")
        if not 0 < self.timeout_s <= 86400:
            raise InvalidArgument(f"timeout_s: {self.timeout_s} is not in 0..86400")
        return self

    def _check_sharded_update(self) -> None:
        value = self.sharded_update
        if value not in SHARDED_UPDATES:
            raise InvalidArgument(f"sharded_update: {value!r} is unknown; known: {', '.join(SHARDED_UPDATES)}")
        strategy = parse(self.strategy) if value != "auto" else None
        if value == "on" and not isinstance(strategy, DataParallel):
            raise InvalidArgument(
                f"sharded_update: 'on' is for data parallel training, and the strategy is {self.strategy}; use "
                "strategy data, or sharded_update=auto"
            )
        if value == "off" and isinstance(strategy, DataParallel) and strategy.sharded:
            raise InvalidArgument(
                f"sharded_update: 'off', and strategy {strategy.spec} shards the update; use strategy data, or "
                "sharded_update=auto"
            )

    def with_sharded_update(self) -> Settings:
        """The settings of a data parallel job whose devices shard the update: its strategy says so."""
        return dataclasses.replace(self, strategy=DataParallel(sharded=True).spec, sharded_update="on")

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
        """A copy with these fields changed; optimizer fields may be given by their own names, at the top level."""
        own = {one.name: one for one in dataclasses.fields(self)}
        inner = {one.name for one in dataclasses.fields(self.optimizer)} - {"name"}
        outer: dict[str, Any] = {}
        deep: dict[str, Any] = {}
        for key, value in changes.items():
            if key == "optimizer":
                deep |= _optimizer_fields(value)
            elif key == "faults":
                outer[key] = _faults_text(value)
            elif key in own:
                outer[key] = _like(key, value, getattr(self, key))
            elif key in inner:
                deep[key] = value
            else:
                raise InvalidArgument(f"{key}: no such setting; {_known(key, [*own, *sorted(inner)])}")
        if unknown := sorted(set(deep) - inner - {"name"}):
            raise InvalidArgument(f"optimizer: no setting {', '.join(unknown)}; it has {', '.join(sorted(inner))}")
        deep = {
            key: _like("optimizer" if key == "name" else key, value, getattr(self.optimizer, key))
            for key, value in deep.items()
        }
        optimizer = dataclasses.replace(self.optimizer, **deep)
        return dataclasses.replace(self, optimizer=optimizer, **outer)


def _faults_text(value: Any) -> str:
    """The setting ``faults``, from a text or a list of one text a fault."""
    faults = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(fault, str) for fault in faults):
        raise InvalidArgument(
            f"faults: {value!r:.200} is neither text, such as 'kill@rank=1,step=7', nor a list of such texts"
        )
    return "; ".join(faults)


def _optimizer_fields(value: Any) -> Mapping[str, Any]:
    """Fields of ``OptimizerSettings``, from the setting ``optimizer``: a name, a mapping of fields, or all of them."""
    if isinstance(value, OptimizerSettings):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return value
    if isinstance(value, str):
        return {"name": value}
    kind = value if isinstance(value, type) else type(value)
    given = f"the class {kind.__name__}" if value is kind else f"an object of the class {kind.__name__}"
    known = kind.__name__.lower() if kind.__name__.lower() in OPTIMIZERS else "adam"
    raise InvalidArgument(
        f"optimizer: {given} is not the name of an optimizer; known: {', '.join(OPTIMIZERS)}. Each device makes its "
        f"own from the name and the settings, e.g. optimizer={known!r}, lr=0.001, or by a function of the parameters: "
        f"optimizer=functools.partial({_torch_name(kind)}, lr=0.001)"
    )


def _torch_name(kind: type) -> str:
    """The name under which a class of an optimizer is imported."""
    return f"torch.optim.{kind.__name__}" if kind.__module__.startswith("torch.optim.") else kind.__name__


_MAX_SLOWDOWN = 1_000_000
_BOUNDS: Mapping[str, tuple[int, int]] = {
    "epochs": (0, 10**9),
    "batch_size": (1, 1 << 24),
    "shards": (1, MAX_MICROBATCHES),
    "accumulate": (1, MAX_MICROBATCHES),
    "seed": (0, 2**64 - 1),
    "replicas": (1, 1024),
    "threads_per_device": (1, 1024),
    "min_devices": (1, MAX_DEVICES),
    "max_devices": (0, MAX_DEVICES),
    "evaluate_every": (0, 10**9),
    "checkpoint_every": (0, 10**9),
    "keep": (1, 10**6),
    "max_steps": (0, 10**12),
    "patience": (0, 10**9),
    "trace_steps": (0, 100_000),
    "bucket_bytes": (0, 1 << 40),
}
"""Minimum and maximum of each whole number. Larger values would use up a machine's memory or threads."""
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    tuple: "a list of whole numbers, such as [1, 2]",
}


_ELSEWHERE = {
    "accumulate_grad_batches": "accumulate",
    "early_stopping": "patience",
    "gradient_accumulation_steps": "accumulate",
    "gradient_clip_val": "clip",
    "learning_rate": "lr",
    "max_epochs": "epochs",
    "max_grad_norm": "clip",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
}
"""Names that Keras, Lightning and Hugging Face have for settings of Hoop, each with Hoop's."""


def _known(key: str, names: list[str]) -> str:
    """The end of an error about an unknown setting: the one that is probably meant, and all that there are."""
    meant = [_ELSEWHERE[key]] if key in _ELSEWHERE else difflib.get_close_matches(key, names, n=1)
    return f"{f'do you mean {meant[0]}? There' if meant else 'there'} are {', '.join(names)}"


def _like(field: str, value: Any, example: Any) -> Any:
    """Converts ``value`` to the type of ``example``; raises ``InvalidArgument`` if it does not fit."""
    if isinstance(example, bool):
        fits = isinstance(value, bool)
    elif isinstance(example, tuple):
        kinds = (int, float) if field == "slowdown" else (int,)
        fits = isinstance(value, list | tuple) and all(type(one) in kinds for one in value)
        value = tuple(value) if fits else value
    elif isinstance(example, int):
        fits = isinstance(value, Integral) and not isinstance(value, bool)  # NumPy's integers too
        value = int(value) if fits else value
    elif isinstance(example, float):
        fits = isinstance(value, Real) and not isinstance(value, bool)
        try:
            value = float(value) if fits else value
        except OverflowError:  # a whole number beyond all floats
            fits = False
    else:
        fits = type(value) is type(example)
    if not fits:
        raise InvalidArgument(f"{field}: {value!r} is not {_KINDS.get(type(example), 'of its kind')}")
    return value
