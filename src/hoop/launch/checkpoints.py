"""The checkpoints of a run's folder: read with their checksums, the newest whole one found, damaged ones named."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from hoop.engine.survival.snapshot import unpacked
from hoop.errors import FailedPrecondition, HoopError

FOLDER = "checkpoints"
DAMAGED = ".damaged"
"""The end of the name of one that was set aside."""
_NAME = re.compile(r"step-(\d{8,})\.safetensors")


@dataclass(frozen=True)
class Found:
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


def newest_checkpoint(out: Path) -> Found:
    """The newest checkpoint that is whole; damaged ones are passed over, and named."""
    problems: list[str] = []
    for path in listed(out):
        try:
            read(path)
            return Found(path, tuple(problems))
        except HoopError as error:
            problems.append(str(error))
    whole = f" that is whole: {'; '.join(problems)}" if problems else "; a run keeps one after each epoch"
    raise FailedPrecondition(f"no checkpoint in {out}{whole}")


def set_aside(out: Path, after: int) -> None:
    """Those of later steps than a run goes on from: they are damaged, and must not be taken for its own."""
    for path in listed(out):
        if step_of(path) > after:
            path.replace(path.with_name(path.name + DAMAGED))
