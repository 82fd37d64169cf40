"""A rank's parts of checkpoints: files' bytes in the arena, which a client reads while training goes on."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from hoop.engine.progress_reporter import Emit
from hoop.engine.survival.snapshot import packed, put
from hoop.errors import PeerLost
from hoop.memory import Arena

SNAPSHOT = "snapshot"
RUN = "run"
"""Under this name the run is in a snapshot's metadata."""


class Keepsakes:
    """The snapshots that one rank makes."""

    def __init__(self, arena: Arena, prefix: str, emit: Emit, run: str = "", came: bool = False) -> None:
        """``run``: whose they are, for who is restarted on the arena; ``came``: there may be others of before."""
        self._came = came
        self._arena, self._prefix, self._emit, self._run = arena, prefix, emit, run
        self._made = 0
        self._newest: int | None = None

    def add(
        self,
        tensors: Mapping[str, Tensor] | None,
        done: int,
        per_epoch: int,
        final: bool,
        parts: int,
        turn: int,
    ) -> None:
        """This rank's part of one of ``parts``, if it has one; ``turn``: how often the model had been cut anew."""
        self._newest = done
        if tensors is None:
            return
        epoch, step = divmod(done, per_epoch)
        data = packed(tensors, {"steps": done, "epoch": epoch, "step": step, RUN: self._run})
        # Two in turn: one may be read while the next is written.
        where = put(self._arena, f"{self._prefix}{SNAPSHOT}{self._made % 2}", data)
        self._made += 1
        told = {"kind": "snapshot", "steps": done, "final": final, "parts": parts, "turn": turn}
        self._emit({**told, **where})

    def over(self, what: str) -> PeerLost:
        """The run cannot go on, for this was lost."""
        return PeerLost(f"{what} was lost: {self.remedy}")

    @property
    def remedy(self) -> str:
        """What to do when a run cannot go on."""
        if self._newest is None and self._came:
            return "go on from its newest checkpoint, if it has one: hoop train --resume --out DIR"
        if self._newest is None:
            return "there is no checkpoint yet, start it again (checkpoint_every says how often one is made)"
        return f"go on from the checkpoint of step {self._newest}: hoop train --resume --out DIR"
