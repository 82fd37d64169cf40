"""A disk that is full when a checkpoint is written, because a test asked for it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from hoop import files
from hoop.plan.faults import OF_FILES, Fault


class FullDisk:
    """Each fault makes the first checkpoint at its step or later find no room, once."""

    def __init__(self, faults: Sequence[Fault], done: Callable[[], int], tell: Callable[[str], None]) -> None:
        self._due = [fault for fault in faults if fault.kind == OF_FILES]
        self._done, self._tell = done, tell
        if self._due:
            files.BEFORE_WRITING.append(self._look)

    def _look(self, path: Path) -> None:
        for fault in self._due:
            if path.suffix == ".safetensors" and self._done() >= fault.step:
                self._due.remove(fault)
                self._tell(str(fault))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def close(self) -> None:
        if self._look in files.BEFORE_WRITING:
            files.BEFORE_WRITING.remove(self._look)
