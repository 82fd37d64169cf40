"""Checks a run's ledger against the order of its samples: every sample of an epoch went into exactly one step.

    sample order   recomputed from (seed, epoch), which the ledger's first line states
    ledger         which device computed which samples of each step
    checkpoints    each stores the hash of its step

The audit stops at the first violation and names it. It imports no PyTorch, which would take longer than the audit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hoop.data.sampler import SampleOrder, shard
from hoop.engine.stage.provenance import sample_fingerprint
from hoop.errors import FailedPrecondition, HoopError, NotFound
from hoop.runs.checkpoint_store import listed, read_metadata
from hoop.runs.ledger import NAME, LedgerLine, hashes, lines

_SAME = ("seed", "samples", "batch_size", "data")
"""Values that must not change when a run resumes, because they define the samples of an epoch."""


@dataclass
class Audit:
    """Findings of an audit."""

    steps: int = 0
    """Number of steps of the history to which the newest checkpoint belongs."""
    epochs: int = 0
    """Number of complete epochs: every sample in exactly one step."""
    samples: int = 0
    """Number of samples of an epoch."""
    shards: dict[int, int] = field(default_factory=dict)
    """Number of shards that each device computed; where the model is cut into stages, the last device of each."""
    strategy: str = ""
    """Strategy with which the run began or resumed last; empty in a ledger that does not say it."""
    resumed: list[int] = field(default_factory=list)
    """Numbers of steps after which the run resumed."""
    repeated: int = 0
    """Number of steps that a resumed run did again; their first time is in no model."""
    taken_over: list[dict[str, Any]] = field(default_factory=list)
    """Each step that was finished after a device was lost: the lost devices, and the device that computed each shard
    again."""
    checkpoints: list[str] = field(default_factory=list)
    """Names of the checkpoints whose checksum holds and whose hash is that of their step."""
    violation: str | None = None

    @property
    def holds(self) -> bool:
        return self.violation is None


def audit(out: Path) -> Audit:
    """Audits a run's folder; NotFound if it has no ledger."""
    path = out / NAME
    if not path.is_file():
        raise NotFound(f"{path}: not there; is {out} a run's folder (what --out named)?")
    found = Audit()
    try:
        history = _History(path, found)
        seen = []
        for line in lines(path):
            seen.append(line)
            history.take(line)
        history.end()
        _checkpoints(out, hashes(seen), found)
    except (HoopError, KeyError, TypeError, ValueError, OverflowError) as error:
        found.violation = str(error) if isinstance(error, HoopError) else f"{path}: not a ledger: {error!r}"
    return found


def _checkpoints(out: Path, after: Mapping[str, int], found: Audit) -> None:
    for path in listed(out):
        metadata = read_metadata(path)
        named, steps = str(metadata.get("ledger")), metadata["steps"]
        if after.get(named) != steps:
            of = f"step {after[named]}" if named in after else "no step"
            raise FailedPrecondition(
                f"{path}: it is of step {steps} and names the hash {named}, which is of {of} of the ledger"
            )
        found.checkpoints.append(path.name)


class _History:
    """Replays the ledger line by line."""

    def __init__(self, path: Path, found: Audit) -> None:
        self._path, self._found = path, found
        self._about: dict[str, Any] = {}
        self._order = SampleOrder(0, 1)
        self._by: dict[int, list[int]] = {}
        self._lost: list[int] = []
        """Ids of the devices that were lost since the last recovery and are not back. One may be reported after its
        recovery."""
        self._taken: dict[int, tuple[list[int], list[int]]] = {}
        self._counts = np.zeros(0, np.int64)
        """Number of times that each sample of the current epoch was used."""

    def take(self, line: LedgerLine) -> None:
        entry = line.entry
        self._where = f"{self._path}, line {line.number}"
        match next(iter(entry), None):
            case "begin":
                self._begin(entry)
            case "step":
                self._step(int(entry["step"]), list(entry["by"]), str(entry["fed"]))
            case "lost":
                self._lost.append(int(entry["lost"]))
            case "assigned":
                self._lost = [one for one in self._lost if one not in entry["assigned"]]
            case "recovered":
                if entry["missing"]:
                    self._taken[int(entry["recovered"])] = (list(entry["missing"]), self._lost)
                self._lost = []
            case other:
                raise self._wrong(f"{other!r} is unknown")

    def _wrong(self, text: str) -> FailedPrecondition:
        return FailedPrecondition(f"{self._where}: {text}")

    def _begin(self, entry: Mapping[str, Any]) -> None:
        found, step = self._found, int(entry["begin"])
        if not self._about and step:
            raise self._wrong(f"the record begins at step {step}: what went into those before is not known")
        for name in _SAME if self._about else ():
            if entry[name] != self._about[name]:
                raise self._wrong(
                    f"after step {step} {name} is {entry[name]} and was {self._about[name]}: which samples belong "
                    "to an epoch has changed"
                )
        if step > found.steps:
            raise self._wrong(f"the run goes on after step {step}, and step {found.steps} is the last before")
        if self._about:
            found.resumed.append(step)
            found.repeated += found.steps - step
        self._about = dict(entry)
        found.strategy = str(entry.get("strategy", ""))
        self._order = SampleOrder(entry["seed"], entry["samples"])
        found.samples = self._order.length
        self._by = {one: by for one, by in self._by.items() if one <= step}
        found.steps = step
        # Count the samples of the steps of this epoch that were done before.
        epoch, done = divmod(step, self._an_epoch)
        self._counts = np.zeros(self._order.length, np.int64)
        for one in range(done):
            np.add.at(self._counts, self._order.indices(epoch, one, entry["batch_size"]), 1)

    @property
    def _an_epoch(self) -> int:
        return self._order.steps(self._about["batch_size"])

    def _step(self, step: int, by: list[int], fed: str) -> None:
        if step != self._found.steps + 1:
            raise self._wrong(f"step {step} follows step {self._found.steps}")
        epoch, place = divmod(step - 1, self._an_epoch)
        samples = self._order.indices(epoch, place, self._about["batch_size"])
        num_microbatches = int(self._about["micros"])
        if not by:
            raise self._wrong(f"step {step}: no device reported its samples")
        if len(by) != num_microbatches or len(fed) != 6 * num_microbatches:
            raise self._wrong(f"step {step}: {len(by)} shards, where a batch has {num_microbatches}")
        for one in range(num_microbatches):
            self._shard(step, one, by[one], fed[6 * one : 6 * one + 6], shard(samples, one, num_microbatches))
        np.add.at(self._counts, samples, 1)
        self._found.steps, self._by[step] = step, by
        if place == self._an_epoch - 1:
            wrong = np.flatnonzero(self._counts != 1)
            if wrong.size:
                raise self._wrong(f"epoch {epoch + 1}: sample {wrong[0]} was fed {self._counts[wrong[0]]} times")
            self._counts[:] = 0

    def _shard(self, step: int, number: int, by: int, fed: str, samples: np.ndarray[Any, Any]) -> None:
        what = f"step {step}, shard {number}"
        if not len(samples):
            if by:
                raise self._wrong(f"{what}: it has no samples, and device {by} fed some")
            return
        if by <= 0:
            raise self._wrong(f"{what}: its {len(samples)} samples went in {-by} times")
        if fed != f"{sample_fingerprint(samples):06x}":
            raise self._wrong(
                f"{what}: device {by} fed other samples than the order has there (print {fed}, "
                f"of the order {sample_fingerprint(samples):06x})"
            )
        missing, lost = self._taken.get(step, ([], []))
        if number in missing and by in lost:
            raise self._wrong(f"{what}: it is device {by}'s, which was lost before it could be")

    def end(self) -> None:
        """Completes the findings after the last line."""
        found = self._found
        if not self._about:
            raise FailedPrecondition(f"{self._path}: empty")
        found.epochs = found.steps // self._an_epoch
        count = Counter(one for by in self._by.values() for one in by if one)
        found.shards = dict(sorted(count.items()))
        for step, (missing, lost) in self._taken.items():
            if step in self._by:
                by = {str(one): self._by[step][one] for one in missing}
                found.taken_over.append({"step": step, "lost": lost, "by": by})
