"""A member was lost or came, and no rank holds the whole model: the state is put together from what is left of it.

    (1) everybody tells of which steps it has which pieces: its own, and its neighbour's (``mirrors``)
    (2) the newest step of which every piece is there, and that somebody knows to be done, is where all go on from
    (3) the model is cut anew for those who are there now, and the pieces travel to whoever holds them next

The steps after it are run again, on the same samples. A step's result depends neither on the cut nor on who computes
what, so the weights are those of a run to which nothing happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.catalog import Operation
from hoop.collectives.communicator import Communicator
from hoop.engine.survival.parts import Part, Piece, missing
from hoop.engine.survival.standing import OWN_ARENA, StateLost
from hoop.engine.survival.word import gathered
from hoop.memory.dtypes import dtype

_SHOWN = 3


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
    """It has just come; with parts where it was restarted on its arena."""
    device: int = 0

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
    devices: tuple[int, ...] = ()
    """The number of each rank's device."""
    afresh: bool = False
    """Whether nobody has stayed: all have been restarted."""
    source: str = ""
    """Where this rank, which has just come, has its state from; empty: it never lost it."""


def agree(communicator: Communicator, mine: Told, whole: Mapping[str, int], timeout: float) -> Agreed:
    """(1) and (2); raises where a piece is nowhere."""
    told = [Told.heard(said) for said in gathered(communicator, vars(mine), timeout)]
    # Where nobody has stayed, what arenas held counts, and as of when.
    old = [one for one in told if not one.new] or [one for one in told if one.parts]
    if not old:
        raise StateLost("everything")
    known = [one.done for one in old if not one.new]
    had = {step for one in told for step, _ in one.parts}
    steps = sorted((step for step in had if not known or step <= max(known)), reverse=True)
    lost = list(whole)
    for step in steps:
        sources = _sources(told, step)
        gone = missing(whole, sources)
        if not gone:
            devices, afresh = tuple(one.device for one in told), all(one.new for one in told)
            return replace(_agreed(old, step, sources), devices=devices, afresh=afresh)
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
) -> tuple[dict[str, Tensor], str]:
    """(3): the tensors that this rank holds from now on, and whence; pieces travel that somebody needs and has not."""
    mine = {
        piece: part[piece]
        for part in parts
        if part.step == agreed.step
        for piece in part.pieces
        if piece.bytes
    }
    found = {name: torch.empty_like(one).contiguous() for name, one in wanted.items()}
    pieces = [one for one in agreed.sources if one.bytes]
    lacks = [place for place, one in enumerate(pieces) if one.name in found and one not in mine]
    needed = {place for each in gathered(communicator, lacks, timeout) for place in each}
    for place, piece in enumerate(pieces):
        root = agreed.sources[piece]
        data = mine[piece].copy() if piece in mine else np.empty(piece.bytes, np.uint8)
        if place in needed:
            operation = Operation("broadcast", data.size, dtype("uint8"), root=root)
            communicator.run(operation, data, data, timeout)
        if piece.name in found:
            flat = found[piece.name].view(-1)
            elements = torch.from_numpy(data).view(flat.dtype)
            flat[piece.low : piece.high] = elements
    givers = sorted({agreed.devices[agreed.sources[pieces[place]]] for place in lacks})
    whence = f"device{'s' if len(givers) > 1 else ''} {', '.join(map(str, givers))}" if givers else OWN_ARENA
    return found, whence
