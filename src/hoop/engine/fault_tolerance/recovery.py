"""The state travels to the ranks that hold it next: pieces of it, from the ranks that an agreement names.

A member was lost in the middle of a step: those who are left keep what they have, and finish the same step.

    (1) everybody tells how many steps it has done, and which shards of the next one it has computed
    (2) whoever is a step behind gets the total that the others updated with, and updates with it too
    (3) the shards that nobody has any more are dealt out; the same tree is summed: the same bits

Where a rank can be when the news reaches it: it computes or waits for the others with all its shards in their slots
(nothing is lost), or it has updated while somebody else was still waiting to hear that all were done. Ranks are never
further apart than that, because a sum needs everybody; one who is was thought dead, or restarted, and comes back
with nothing that is worth keeping. One who returns with what its arena held has the state of a step and nothing else,
no shards and no total: if that is where the others are, by a hash of all of it, it is used, else it is fetched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.communicator import Communicator
from hoop.collectives.object_collectives import all_gather_object
from hoop.collectives.registry import Operation
from hoop.collectives.shard_tree import MergePlan, merge_plan
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.local_persistence import InPlaceState
from hoop.engine.fault_tolerance.state_slices import StateShard
from hoop.engine.rank_context import RankContext
from hoop.engine.stage.state import StageState
from hoop.errors import MembershipChanged, PeerError
from hoop.memory.dtypes import dtype
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan, split_evenly
from hoop.plan.recovery import NO_STATE, OWN_ARENA, WHOLE, RankStatus, RecoveryPlan, agree
from hoop.strategies.data_parallel import whole_model


def agree_on_recovery(
    communicator: Communicator, mine: RankStatus, whole: Mapping[str, int], timeout: float
) -> RecoveryPlan:
    """What all ranks conclude from everybody's status; every rank must call it."""
    statuses = [RankStatus.parsed(one) for one in all_gather_object(communicator, vars(mine), timeout)]
    return agree(statuses, whole)


def collect(
    communicator: Communicator,
    plan: RecoveryPlan,
    parts: Sequence[StateShard],
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
    needed = {place for each in all_gather_object(communicator, lacks, timeout) for place in each}
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


RECOVERABLE = (PeerError, MembershipChanged)
"""What makes a rank look for another seat: a peer or a link failed; or a peer has one of a later generation."""


def level(
    own: InPlaceState,
    world: RankContext,
    mine: RankStatus,
    rate: Callable[[int], float],
    timeout: float,
    lose: Callable[[], None],
) -> RecoveryPlan:
    """(1) and (2): all ranks have the same weights then. ``rate``: of the step after so many; ``lose``: what this rank
    has is about to be overwritten, and must not be taken for anything should that be cut short."""
    communicator, worker = world.communicator, own.worker
    plan = agree_on_recovery(communicator, mine, {WHOLE.name: WHOLE.elements}, timeout)
    world.settled()
    if plan.behind:
        catch_up(own, communicator, plan, rate(plan.step - 1), timeout)
    plan = doubted(worker, communicator, plan, timeout)
    if communicator.rank in plan.new:
        own.torn()
        lose()
    hand_over(worker, communicator, plan, timeout)
    own.whole(plan.step)
    return plan


def doubted(
    worker: PlanExecutor, communicator: Communicator, plan: RecoveryPlan, timeout: float
) -> RecoveryPlan:
    """Those who return must have what the others have, to the bit; whoever has not is new."""
    if not plan.returned:
        return plan
    mine = np.zeros(1, np.int64)
    if communicator.rank in (plan.root, *plan.returned):
        held = worker.held[0]
        digest = hashlib.sha256(held.state_array.data)
        for vector in [*(one.numpy() for one in held.moments), _counted(held)]:
            digest.update(vector.data)
        mine[:] = np.frombuffer(digest.digest()[:8], np.int64)
    seen = np.zeros(communicator.size, np.int64)
    communicator.run(Operation("all_gather", 1, dtype("int64")), mine, seen, timeout)
    wrong = {rank for rank in plan.returned if seen[rank] != seen[plan.root]}
    done = tuple(NO_STATE if rank in wrong else one for rank, one in enumerate(plan.done))
    return replace(plan, done=done, returned=tuple(sorted(set(plan.returned) - wrong)))


def _counted(held: StageState) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array([float(one) for one in held.layout.counters], np.float32)


def catch_up(
    own: InPlaceState, communicator: Communicator, plan: RecoveryPlan, rate: float, timeout: float
) -> None:
    """(2): the total of the last step, as it was shortened, from one who has it to all who have not."""
    worker = own.worker
    held = worker.held[0]
    given = held.total.copy()
    root = plan.root
    operation = Operation("broadcast", given.size, dtype("float32"), root=root)
    communicator.run(operation, given, given, timeout)
    if communicator.rank in plan.behind:
        held.total = held.room
        held.room[:] = given
        own.torn()
        held.summed(plan.step - 1, 1.0)
        held.finish(rate, plan.step - 1)
        worker.updated = plan.step


def hand_over(worker: PlanExecutor, communicator: Communicator, plan: RecoveryPlan, timeout: float) -> None:
    """Weights, buffers, optimizer state and counters, from one who has them to those who have just come."""
    if not plan.new:
        return
    held = worker.held[0]
    root = plan.root
    vectors = [held.state_array, *(moment.numpy() for moment in held.moments)]
    counters = _counted(held)
    for vector in [*vectors, counters]:
        if vector.size:
            given = vector if communicator.rank == root or communicator.rank in plan.new else vector.copy()
            operation = Operation("broadcast", given.size, dtype("float32"), root=root)
            communicator.run(operation, given, given, timeout)
    if communicator.rank in plan.new:
        for one, value in zip(held.layout.counters, counters.tolist(), strict=True):
            one.fill_(value)
        worker.updated = plan.step


def rest_of_step(
    plan: RecoveryPlan, shards: int, room: int
) -> tuple[Plan, list[MergePlan], list[tuple[int, ...]]]:
    """(3): what everybody does in addition, what everybody holds then, and what of it it has already.

    Where a rank has no room for what that leaves it with, all begin the step anew.
    """
    size = len(plan.done)
    kept = list(plan.computed)
    more = _dealt(kept, shards)
    holdings = [merge_plan([*old, *new], shards) for old, new in zip(kept, more, strict=True)]
    if max(one.slots for one in holdings) > room:
        kept = [()] * size
        more = [tuple(part) for part in split_evenly(shards, size)]
        holdings = [merge_plan(new, shards) for new in more]
    end = (Instruction(InstructionKind.REDUCE, 0), Instruction(InstructionKind.UPDATE, 0))
    ranks = tuple((*whole_model(new), *end) for new in more)
    return Plan(shards, (tuple(range(size)),), ranks), holdings, kept


def _dealt(kept: Sequence[tuple[int, ...]], shards: int) -> list[tuple[int, ...]]:
    """Shards that nobody has, to those who have least first."""
    held = {shard for one in kept for shard in one}
    missing = [shard for shard in range(shards) if shard not in held]
    more: list[tuple[int, ...]] = [()] * len(kept)
    order = sorted(range(len(kept)), key=lambda rank: (len(kept[rank]), rank))
    for rank, part in zip(order, split_evenly(len(missing), len(kept)), strict=True):
        more[rank] = tuple(missing[index] for index in part)
    return more
