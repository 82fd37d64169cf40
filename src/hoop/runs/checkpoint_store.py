"""The checkpoints in a run's folder: written on a thread of its own, read with their checksums.

    offer      ──▶ [ one waits ] ──▶ thread: write, sync, rename, sync the folder, remove the oldest
    new_events ◀── CheckpointWritten, Warned

Training never waits for the disk. If the disk is slower than the steps, a newer snapshot replaces the one that waits,
with a warning. A full disk costs that checkpoint: older ones stay, and the next one is tried. Reading finds the newest
checkpoint whose checksum holds, and names the damaged ones. PyTorch is imported only where tensors are read or written.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoop.engine.fault_tolerance.checkpoint_header import verified_metadata
from hoop.errors import FailedPrecondition, HoopError
from hoop.files import link_file, write_parts
from hoop.job_events import CheckpointWritten, JobEvent, Warned

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "checkpoints"
BEST = "best.safetensors"
"""Second name of the checkpoint after the best evaluation, which stays when the file of that step is removed."""
DAMAGED = ".damaged"
"""Suffix of a checkpoint that ``set_aside`` renamed."""
_NAME = re.compile(r"step-(\d{8,})\.safetensors")


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest checkpoint whose checksum holds."""

    path: Path
    passed_over: tuple[str, ...] = ()
    """Sentences that say what is wrong with each newer checkpoint."""

    @property
    def warnings(self) -> list[str]:
        """One sentence for each checkpoint that was passed over."""
        return [f"{problem}; {self.path.name} is used instead" for problem in self.passed_over]


def name_of(step: int) -> str:
    return f"step-{step:08}.safetensors"


def step_of(path: Path) -> int:
    """The step in a file's name, or -1."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


def listed(out: Path) -> list[Path]:
    """The checkpoints of a run's folder, or of a folder of checkpoints, the newest first."""
    folder = out / FOLDER if (out / FOLDER).is_dir() else out
    return sorted(folder.glob("*.safetensors"), key=lambda path: (step_of(path), path.name), reverse=True)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata; FailedPrecondition, with the file's name, if it is damaged or misnamed."""
    from hoop.engine.fault_tolerance.checkpoint_format import deserialize

    tensors, metadata = deserialize(_bytes_of(path), path)
    return tensors, _of_its_name(path, metadata)


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata, after all bytes were compared with their checksums; raises what ``read`` raises."""
    return _of_its_name(path, verified_metadata(_bytes_of(path), path))


def _bytes_of(path: Path) -> bytearray:
    try:
        data = bytearray(path.stat().st_size)
        with path.open("rb") as file:
            del data[file.readinto(data) :]
    except OSError as error:
        raise FailedPrecondition(f"{path}: cannot be read: {error.strerror}") from None
    return data


def _of_its_name(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    step, steps = step_of(path), metadata.get("steps")
    if step >= 0 and steps != step:
        raise FailedPrecondition(f"{path}: it is of step {steps}, not of the step that its name says")
    return metadata


def newest_checkpoint(out: Path) -> FoundCheckpoint:
    """The newest checkpoint whose checksum holds; FailedPrecondition if there is none."""
    return read_newest(out)[0]


def read_newest(out: Path) -> tuple[FoundCheckpoint, dict[str, Tensor], dict[str, Any]]:
    """``newest_checkpoint``, with the tensors and metadata that were verified: the file is read and hashed once."""
    problems: list[str] = []
    for path in listed(out):
        try:
            return FoundCheckpoint(path, tuple(problems)), *read(path)
        except HoopError as error:
            problems.append(str(error))
    whole = f" that is whole: {'; '.join(problems)}" if problems else "; a run keeps one after each epoch"
    raise FailedPrecondition(f"no checkpoint in {out}{whole}")


def set_aside(out: Path, after: int) -> None:
    """Renames checkpoints of steps after ``after``: they are damaged, and the resumed run writes those steps again."""
    for path in listed(out):
        if step_of(path) > after:
            path.replace(path.with_name(path.name + DAMAGED))


Write = Callable[[Path, Sequence[bytes | memoryview]], None]
"""Function ``write(path, parts)`` that writes the content of a file, given in parts."""


@dataclass(frozen=True)
class Snapshot:
    """A training state to be written."""

    step: int
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    checksums: Mapping[str, str] = field(default_factory=dict)
    """Known checksums of tensors by name (from ``checkpoint_format.verified``); the writer thread computes the
    others."""
    before: Callable[[], None] = lambda: None
    """Function that is called before writing; it makes durable what the checkpoint refers to."""


class CheckpointWriter:
    """Writes a run's checkpoints on a thread, and removes all but the last ``keep``."""

    def __init__(self, folder: Path, keep: int, write: Write = write_parts) -> None:
        self._folder, self._keep, self._write = folder, keep, write
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None
        self._events: queue.SimpleQueue[JobEvent] = queue.SimpleQueue()
        self._best_step = -1
        """Step of the best evaluation that has no checkpoint yet."""
        self.last: Path | None = None
        """Path of the newest checkpoint that this object has written."""

    def offer(self, one: Snapshot) -> None:
        """Queues a snapshot and returns at once."""
        with self._changed:
            if self._waiting is not None:
                self._events.put(
                    _warning(
                        self._folder / name_of(self._waiting.step),
                        f"is not written: the disk is slower than the steps, and that of step {one.step} is there",
                    )
                )
            self._waiting = one
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="hoop-checkpoints", daemon=True)
                self._thread.start()

    def mark_best(self, step: int) -> None:
        """The evaluation after this step was the best so far: its checkpoint, now or when it comes, is the best one."""
        with self._changed:
            self._best_step = step
            if self.last is not None and step_of(self.last) == step:
                self._link_best(self.last)

    def _link_best(self, path: Path) -> None:
        try:
            link_file(path, self._folder / BEST)
        except OSError as error:
            self._events.put(_warning(self._folder / BEST, f"could not be written ({error}); training goes on"))

    def new_events(self) -> list[JobEvent]:
        """Events since the last call: ``CheckpointWritten`` or ``Warned`` for each snapshot."""
        found = []
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def flush(self, within: float) -> None:
        """Waits until every snapshot is written or has failed; a timeout is a warning."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy and self._waiting is None, within):
                self._events.put(_warning(self._folder, f"the disk has not taken the last one within {within:g} s"))

    def close(self, within: float) -> None:
        """Drops the waiting snapshot and waits for the one that is being written."""
        with self._changed:
            self._waiting, self._closed = None, True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(within)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                one, self._waiting = self._waiting, None
                if one is None:
                    return
                self._busy = True
            for event in self._store(one):
                self._events.put(event)

    def _store(self, one: Snapshot) -> Iterator[JobEvent]:
        from hoop.engine.fault_tolerance.checkpoint_format import serialized_parts

        path, started = self._folder / name_of(one.step), time.perf_counter()
        try:
            one.before()
            parts = serialized_parts(one.tensors, one.metadata, one.checksums)
            self._write(path, parts)
        except (HoopError, OSError) as error:  # training goes on without it
            newest = next((other.name for other in listed(self._folder)), "")
            kept = f"the newest is {newest}" if newest else "none is there yet"
            yield _warning(path, f"could not be written ({error}); training goes on, {kept}")
            return
        with self._changed:
            self.last = path
            if one.step == self._best_step:
                self._link_best(path)
        seconds = time.perf_counter() - started
        yield CheckpointWritten(one.step, str(path), sum(len(part) for part in parts), seconds)
        try:
            for old in [path for path in listed(self._folder) if step_of(path) >= 0][self._keep :]:
                old.unlink(missing_ok=True)
        except OSError as error:
            yield _warning(self._folder, f"an old checkpoint cannot be removed: {error}")


def _warning(path: Path, text: str) -> Warned:
    return Warned(f"{path}: {text}", file=str(path))
