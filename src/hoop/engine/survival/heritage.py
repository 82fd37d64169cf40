"""What a device that is restarted on its arena finds there of the run it took part in, and what of it can be believed.

    claims      the mirrors of the last two steps, or a replica's state as it lies: of the step that the claim names
    snapshots   checkpoints' parts, by their own checksums; the only ones that are believed after a reboot too

All of it is copied out, and the arena's buffers are freed: what is trained from now on needs the room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoop.engine.survival.keepsakes import RUN, SNAPSHOT
from hoop.engine.survival.parts import Part, part_of, size_of
from hoop.engine.survival.snapshot import unpacked
from hoop.errors import FailedPrecondition
from hoop.memory import Arena, Buffer
from hoop.memory.claims import claims
from hoop.plan.recovery import Piece


def inherited(arena: Arena, prefix: str, run: str) -> list[Part]:
    """The parts of this run's state that were whole, the newest first; buffers of these names are gone then."""
    buffers = {one.name: one for one in arena.buffers() if one.name.startswith(prefix)}
    found = [_copied(arena, buffers, step, about) for _, step, about in claims(arena, prefix, run)]
    found += [
        _sealed(arena, one, run) for name, one in buffers.items() if name[len(prefix) :].startswith(SNAPSHOT)
    ]
    for name in buffers:
        arena.free(name)
    parts = [one for one in found if one is not None and one.pieces]
    return sorted(parts, key=lambda one: one.step, reverse=True)


def _copied(arena: Arena, buffers: Mapping[str, Buffer], step: int, about: Mapping[str, Any]) -> Part | None:
    rows = about["rows"]
    pieces = [Piece(*row[:4]) for row in rows]
    part = Part(pieces, np.empty(size_of(pieces), np.uint8), step)
    for piece, (*_, name, offset) in zip(pieces, rows, strict=True):
        if name not in buffers or offset + piece.bytes > buffers[name].size:
            return None
        part[piece][:] = np.frombuffer(arena.view(buffers[name].address + offset, piece.bytes), np.uint8)
    return part


def _sealed(arena: Arena, buffer: Buffer, run: str) -> Part | None:
    try:
        tensors, metadata = unpacked(arena.read(buffer.address, buffer.size), buffer.name)
    except FailedPrecondition:
        return None
    return part_of(tensors, int(metadata["steps"])) if run and metadata.get(RUN) == run else None


def filled(wanted: Mapping[str, Tensor], part: Part, made: Collection[str] = ()) -> dict[str, Tensor] | None:
    """These tensors as they are in a part, or None where it has not all of them, or others.

    ``made``: those that stay as they are where it has none.
    """
    known = {one.name: one for one in part.pieces if not one.low}
    found = {}
    for name, like in wanted.items():
        piece = known.get(name)
        if piece is None and name in made:
            found[name] = like
            continue
        if piece is None or (piece.elements, piece.bytes) != (
            like.numel(),
            like.numel() * like.element_size(),
        ):
            return None
        found[name] = torch.from_numpy(part[piece]).view(like.dtype).view(like.shape)
    return found


def newest(
    wanted: Mapping[str, Tensor], parts: Sequence[Part], made: Collection[str] = ()
) -> tuple[int, dict[str, Tensor]] | None:
    """Of parts in their order, the first that has all of these."""
    tensors = ((one.step, filled(wanted, one, made)) for one in parts)
    return next(((step, one) for step, one in tensors if one is not None), None)
