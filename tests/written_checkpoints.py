"""Lets a rank go on from a checkpoint only when its file is in the folder of the run.

The client reads a checkpoint from the device beside the training. In a test whose steps take milliseconds the device
may have died before, or written a later checkpoint over it, or the run may be over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hoop.engine.fault_tolerance.snapshots import SnapshotPublisher
from hoop.runs.checkpoint_store import listed, step_of

WRITTEN_WITHIN_S = 300.0


def wait_for_files(out: Path) -> None:
    """From now on, in this process and in those that are forked from it. ``out``: the folder of the run."""
    for name in ("publish", "publish_later"):
        setattr(SnapshotPublisher, name, _waiting(getattr(SnapshotPublisher, name), out))


def _waiting(publish: Callable[..., None], out: Path) -> Callable[..., None]:
    def published(self: SnapshotPublisher, tensors: Any, done: int, *rest: Any) -> None:
        publish(self, tensors, done, *rest)
        deadline = time.monotonic() + WRITTEN_WITHIN_S
        while tensors is not None and not any(step_of(path) >= done for path in listed(out)):
            assert time.monotonic() < deadline, f"no checkpoint of step {done}"
            time.sleep(0.002)

    return published
