"""A member was lost or came, and no rank holds the whole model: the state is put together from what is left of it.

    (1) everybody tells of which steps it has which pieces: its own, and its neighbour's (``mirrors``)
    (2) the newest step of which every piece is there, and that somebody knows to be done, is where all go on from
    (3) the model is cut anew for those who are there now, and the pieces travel to whoever holds them next

The steps after it are run again, on the same samples. A step's result depends neither on the cut nor on who computes
what, so the weights are those of a run to which nothing happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.catalog import Operation
from hoop.collectives.communicator import Communicator
from hoop.engine.survival.parts import Part, Piece, missing
from hoop.engine.survival.word import gathered
from hoop.memory.dtypes import dtype

_SHOWN = 3


class StateLost(Exception):
    """Pieces of the state are nowhere any more."""


@dataclass(frozen=True)
class Told:
    """What one rank has to say, in (1)."""

    done: int
    """Steps after which it has met all others."""
    ended: int
    """The end of an epoch up to which it has come; none, where it is new."""
    stopped: bool
    turn: int
    """How often it has gone on so."""
    begins: bool
    """Whether a run that has done no step begins with the model as it is made: there is nothing to be lost then."""
    parts: list[tuple[int, list[Piece]]]
    new: bool

    @classmethod
    def heard(cls, said: Mapping[str, Any]) -> Told:
        parts = [(step, [Piece(*one) for one in pieces]) for step, pieces in said["parts"]]
        return cls(**{**said, "parts": parts})


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after (1)."""

    step: int
    ended: int
    stopped: bool
    turn: int
    sources: dict[Piece, int]
    """Who gives each piece."""


def agree(communicator: Communicator, mine: Told, whole: Mapping[str, int], timeout: float) -> Agreed:
    """(1) and (2); raises where a piece is nowhere."""
    told = [Told.heard(said) for said in gathered(communicator, vars(mine), timeout)]
    old = [one for one in told if not one.new]
    if not old:
        raise StateLost("everything")
    done = max(one.done for one in old)
    steps = sorted({step for one in told for step, _ in one.parts if step <= done}, reverse=True)
    lost = list(whole)
    for step in steps:
        sources = _sources(told, step)
        gone = missing(whole, sources)
        if not gone:
            return _agreed(old, step, sources)
        lost = min(gone, lost, key=len)
    if all(one.begins for one in old) and (0 in steps or not steps):
        return _agreed(old, 0, {})
    shown = ", ".join(lost[:_SHOWN]) + (f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else "")
    raise StateLost(shown)


def _agreed(old: Sequence[Told], step: int, sources: dict[Piece, int]) -> Agreed:
    ended = min(min(one.ended for one in old), step)
    return Agreed(step, ended, any(one.stopped for one in old), 1 + max(one.turn for one in old), sources)


def _sources(told: Sequence[Told], step: int) -> dict[Piece, int]:
    found: dict[Piece, int] = {}
    for rank, one in enumerate(told):
        for of, pieces in one.parts:
            if of == step:
                for piece in pieces:
                    found.setdefault(piece, rank)
    return found


def collect(
    communicator: Communicator,
    agreed: Agreed,
    parts: Sequence[Part],
    wanted: Mapping[str, Tensor],
    timeout: float,
) -> dict[str, Tensor]:
    """(3): the tensors that this rank holds from now on, piece by piece from whoever has them."""
    mine = [part for part in parts if part.step == agreed.step]
    found = {name: torch.empty_like(one).contiguous() for name, one in wanted.items()}
    for piece, root in agreed.sources.items():
        if not piece.bytes:
            continue
        data = np.empty(piece.bytes, np.uint8)
        if root == communicator.rank:
            data[:] = next(part for part in mine if piece in part)[piece]
        communicator.run(Operation("broadcast", data.size, dtype("uint8"), root=root), data, data, timeout)
        if piece.name in found:
            flat = found[piece.name].view(-1)
            elements = torch.from_numpy(data).view(flat.dtype)
            flat[piece.low : piece.high] = elements
    return found
