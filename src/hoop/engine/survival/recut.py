"""The state travels to the ranks that hold it next: pieces of it, from the ranks that an agreement names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.catalog import Operation
from hoop.collectives.communicator import Communicator
from hoop.engine.survival.parts import Part
from hoop.engine.survival.word import gathered
from hoop.memory.dtypes import dtype
from hoop.plan.recovery import OWN_ARENA, RankStatus, RecoveryPlan, agree


def agreed(
    communicator: Communicator, mine: RankStatus, whole: Mapping[str, int], timeout: float
) -> RecoveryPlan:
    """What all ranks conclude from everybody's status; every rank must call it."""
    statuses = [RankStatus.parsed(one) for one in gathered(communicator, vars(mine), timeout)]
    return agree(statuses, whole)


def collect(
    communicator: Communicator,
    plan: RecoveryPlan,
    parts: Sequence[Part],
    wanted: Mapping[str, Tensor],
    timeout: float,
) -> tuple[dict[str, Tensor], str]:
    """The tensors that this rank holds from now on, and where they come from; only pieces that a rank lacks travel."""
    mine = {
        piece: part[piece] for part in parts if part.step == plan.step for piece in part.pieces if piece.bytes
    }
    found = {name: torch.empty_like(one).contiguous() for name, one in wanted.items()}
    pieces = [one for one in plan.sources if one.bytes]
    lacks = [place for place, one in enumerate(pieces) if one.name in found and one not in mine]
    needed = {place for each in gathered(communicator, lacks, timeout) for place in each}
    for place, piece in enumerate(pieces):
        root = plan.sources[piece]
        data = mine[piece].copy() if piece in mine else np.empty(piece.bytes, np.uint8)
        if place in needed:
            operation = Operation("broadcast", data.size, dtype("uint8"), root=root)
            communicator.run(operation, data, data, timeout)
        if piece.name in found:
            flat = found[piece.name].view(-1)
            elements = torch.from_numpy(data).view(flat.dtype)
            flat[piece.low : piece.high] = elements
    givers = sorted({plan.devices[plan.sources[pieces[place]]] for place in lacks})
    whence = f"device{'s' if len(givers) > 1 else ''} {', '.join(map(str, givers))}" if givers else OWN_ARENA
    return found, whence
