"""The checkpoints of a run's folder: read with their checksums, the newest whole one found, damaged ones named.

Writes checkpoints while the training goes on: whole, synced, one at a time, on a thread of its own.

    offer ──▶ [ waiting: one ] ──▶ thread: pack, write, sync, rename, sync the folder, then the oldest goes
    news  ◀── what was written, what could not be, what gave way

Nobody waits for the disk. If it is slower than the steps, the one that waits gives way to the next, and that is said. A
full disk costs that checkpoint: the ones before stay, and the next is tried again.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hoop.engine.fault_tolerance.checkpoint import packed, unpacked
from hoop.errors import FailedPrecondition, HoopError
from hoop.files import write_bytes

FOLDER = "checkpoints"
DAMAGED = ".damaged"
"""The end of the name of one that was set aside."""
_NAME = re.compile(r"step-(\d{8,})\.safetensors")


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest checkpoint that is whole."""

    path: Path
    passed_over: tuple[str, ...] = ()
    """Newer ones that are not, each with what is wrong with it."""

    @property
    def warnings(self) -> list[str]:
        """What to say of it: a sentence for each that was passed over."""
        return [f"{problem}; {self.path.name} is used instead" for problem in self.passed_over]


def name_of(step: int) -> str:
    return f"step-{step:08}.safetensors"


def step_of(path: Path) -> int:
    """The step that a file's name says; -1: none."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


def listed(out: Path) -> list[Path]:
    """A run's checkpoints, or those in a folder of them, the newest first."""
    folder = out / FOLDER if (out / FOLDER).is_dir() else out
    return sorted(folder.glob("*.safetensors"), key=lambda path: (step_of(path), path.name), reverse=True)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata; whatever is wrong is said with the file's name."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FailedPrecondition(f"{path}: cannot be read: {error.strerror}") from None
    tensors, metadata = unpacked(data, path)
    step, steps = step_of(path), metadata.get("steps")
    if step >= 0 and steps != step:
        raise FailedPrecondition(f"{path}: it is of step {steps}, not of the step that its name says")
    return tensors, metadata


def newest_checkpoint(out: Path) -> FoundCheckpoint:
    """The newest checkpoint that is whole; damaged ones are passed over, and named."""
    problems: list[str] = []
    for path in listed(out):
        try:
            read(path)
            return FoundCheckpoint(path, tuple(problems))
        except HoopError as error:
            problems.append(str(error))
    whole = f" that is whole: {'; '.join(problems)}" if problems else "; a run keeps one after each epoch"
    raise FailedPrecondition(f"no checkpoint in {out}{whole}")


def set_aside(out: Path, after: int) -> None:
    """Those of later steps than a run goes on from: they are damaged, and must not be taken for its own."""
    for path in listed(out):
        if step_of(path) > after:
            path.replace(path.with_name(path.name + DAMAGED))


EventFields = dict[str, Any]
Write = Callable[[Path, bytes], None]


@dataclass(frozen=True)
class Snapshot:
    """A training state on its way to the disk."""

    step: int
    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    before: Callable[[], None] = lambda: None
    """What must be on the disk first."""


class CheckpointWriter:
    """The thread that writes a run's checkpoints, and keeps the last few."""

    def __init__(self, folder: Path, keep: int, write: Write = write_bytes) -> None:
        self._folder, self._keep, self._write = folder, keep, write
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._busy = self._closed = False
        self._thread: threading.Thread | None = None
        self._news: queue.SimpleQueue[EventFields] = queue.SimpleQueue()
        self.last: Path | None = None
        """The newest that is on the disk, of those written here."""

    def offer(self, one: Snapshot) -> None:
        """Hands one over, and returns at once."""
        with self._changed:
            if self._waiting is not None:
                self._news.put(
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

    def news(self) -> list[EventFields]:
        """Events since the last time: ``checkpoint`` for each that is on the disk, ``warning`` for each that is not."""
        found = []
        while not self._news.empty():
            found.append(self._news.get())
        return found

    def flush(self, within: float) -> None:
        """Waits until all that was offered is written, or could not be."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._busy and self._waiting is None, within):
                self._news.put(
                    _warning(self._folder, f"the disk has not taken the last one within {within:g} s")
                )

    def close(self, within: float) -> None:
        """No more; what is being written may be finished, what waits is not begun."""
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
            for told in self._put(one):
                self._news.put(told)

    def _put(self, one: Snapshot) -> Iterator[EventFields]:
        path, started = self._folder / name_of(one.step), time.perf_counter()
        try:
            one.before()
            data = packed(one.tensors, one.metadata)
            self._write(path, data)
        except (HoopError, OSError) as error:  # training goes on without it
            newest = next((other.name for other in listed(self._folder)), "")
            kept = f"the newest is {newest}" if newest else "none is there yet"
            yield _warning(path, f"could not be written ({error}); training goes on, {kept}")
            return
        self.last = path
        seconds = time.perf_counter() - started
        told = {"steps": one.step, "file": str(path), "bytes": len(data), "seconds": seconds}
        yield {"kind": "checkpoint", **told}
        try:
            for old in [path for path in listed(self._folder) if step_of(path) >= 0][self._keep :]:
                old.unlink(missing_ok=True)
        except OSError as error:
            yield _warning(self._folder, f"an old checkpoint cannot be removed: {error}")


def _warning(path: Path, text: str) -> EventFields:
    return {"kind": "warning", "file": str(path), "text": f"{path}: {text}"}
