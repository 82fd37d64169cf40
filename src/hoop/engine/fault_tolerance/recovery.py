"""Recovery after a membership change: ranks agree on a step, and state moves to the ranks that lack it.

Every strategy: ``agree_on_recovery`` gathers all ranks' statuses and computes the same ``RecoveryPlan`` at each of them
(``membership/recovery.py``). What follows depends on whether the model is partitioned.

Partitioned models (``manager.py`` calls ``collect``): the model is partitioned for the ranks there are now, and each
rank receives the slices of the state that it lacks, from the ranks that the plan names.

Data parallel (``trainer.py`` calls ``synchronize_replicas`` and ``plan_rest_of_step``): every rank has the whole state,
so the survivors keep theirs and finish the same step:

    (1) each rank reports how many steps it has done, and which shards of the next step it has computed
    (2) a rank that is one step behind gets the summed gradient that the others updated with, and updates too
    (3) the shards that no rank has any more are assigned to ranks; the same tree is summed, to the same bits

When a failure reaches a rank, it either has not updated, and its computed shards are in their slots; or it has updated
while another rank still waited for the end of the sum. Survivors are never further apart, because a sum needs every
rank. A rank that is further behind was presumed dead or was restarted, and gets the whole state. A rank that returns
with the state of its arena has neither shards nor a total: its state is used if it is at the same step and has the
same hash as the others', and is replaced otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hoop.collectives.communicator import Communicator, all_gather_object
from hoop.collectives.rank_context import RankContext
from hoop.collectives.registry import Operation
from hoop.collectives.shard_tree import MergePlan, merge_plan
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.local_persistence import InPlaceState
from hoop.engine.fault_tolerance.state_slices import Bytes, StateShard
from hoop.engine.stage.state import StageState
from hoop.errors import MembershipChanged, PeerError
from hoop.membership.recovery import NO_STATE, OWN_ARENA, WHOLE, RankStatus, RecoveryPlan, SliceSpec, agree
from hoop.memory.dtypes import dtype
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan, split_evenly
from hoop.strategies.data_parallel import forward_backward

RECOVERABLE = (PeerError, MembershipChanged)
"""Errors after which a rank waits for a new rank assignment: a peer or link failed, or a peer is a generation ahead."""


class UpdateIsSharded(Exception):
    """The ranks of a data parallel job shard the update, and this rank, which has just joined, has not known it."""


def agree_on_recovery(
    communicator: Communicator, status: RankStatus, whole: Mapping[str, int], timeout: float
) -> RecoveryPlan:
    """Collective. Every rank gives its status, and all get the same plan. Raises ``StateLost`` at every rank.

    ``whole``: number of elements of each tensor of the state. ``timeout``: seconds.
    """
    return agree(_all_statuses(communicator, status, timeout), whole)


def _all_statuses(communicator: Communicator, status: RankStatus, timeout: float) -> list[RankStatus]:
    return [RankStatus.from_json(one) for one in all_gather_object(communicator, vars(status), timeout)]


def announce_sharded_update(communicator: Communicator, status: RankStatus, timeout: float) -> None:
    """Collective: the first exchange of ``synchronize_replicas``, by a rank that knows that the update is sharded.

    Ranks that do not know it raise ``UpdateIsSharded`` in theirs. Then all ranks reshard.
    """
    _all_statuses(communicator, replace(status, sharded_update=True), timeout)


# ---- partitioned models


def collect(
    context: RankContext,
    plan: RecoveryPlan,
    shards: Sequence[StateShard],
    targets: Mapping[str, Tensor],
    timeout: float,
) -> tuple[dict[str, Tensor], str]:
    """Collective. Fills tensors like ``targets`` with the state after ``plan.step``; sends only slices that ranks lack.

    ``shards``: the slices that this rank has and offered in its status. Returns new tensors by name, and where they
    come from, for an event: devices, or ``OWN_ARENA`` if this rank lacked no slice.
    """
    rank = context.rank
    mine = {spec: shard[spec] for shard in shards if shard.step == plan.step for spec in shard.slices if spec.bytes}
    found = {name: torch.empty_like(one).contiguous() for name, one in targets.items()}
    specs = [one for one in plan.sources if one.bytes]
    missing = [index for index, one in enumerate(specs) if one.name in found and one not in mine]
    lacking: dict[int, list[int]] = {}
    for one, indices in enumerate(all_gather_object(context.communicator, missing, timeout)):
        for index in indices:
            lacking.setdefault(index, []).append(one)
    for index, spec in enumerate(specs):
        into = _slice_bytes(found[spec.name], spec) if spec.name in found else None
        if spec in mine and into is not None:
            into[:] = mine[spec]
        # A slice goes only to the ranks that lack it; all ranks have the same order of slices.
        members = sorted({plan.sources[spec], *lacking.get(index, ())})
        if index in lacking and rank in members:
            data = mine[spec] if rank == plan.sources[spec] else into
            assert data is not None, "a rank lacks what it has a tensor for"
            operation = Operation("broadcast", data.size, dtype("uint8"), root=members.index(plan.sources[spec]))
            _group(context, members).run(operation, data, data, timeout)
    senders = sorted({plan.devices[plan.sources[specs[index]]] for index in missing})
    source = f"device{'s' if len(senders) > 1 else ''} {', '.join(map(str, senders))}" if senders else OWN_ARENA
    return found, source


def _slice_bytes(tensor: Tensor, spec: SliceSpec) -> Bytes:
    """The bytes of a slice of a tensor, without a copy."""
    elements: Bytes = tensor.view(-1)[spec.low : spec.high].view(torch.uint8).numpy()
    return elements


def _group(context: RankContext, members: Sequence[int]) -> Communicator:
    return context.communicator if len(members) == context.size else context.group(members)


# ---- data parallel


def synchronize_replicas(
    state: InPlaceState,
    context: RankContext,
    status: RankStatus,
    rate: Callable[[int], float],
    timeout: float,
    on_overwrite: Callable[[], None],
) -> RecoveryPlan:
    """Collective. (1) and (2): afterwards all ranks have the state after ``plan.step``, bit for bit.

    Raises ``UpdateIsSharded`` if another rank says so. ``rate(done)``: learning rate of the step after ``done`` steps.
    ``on_overwrite`` is called before this rank's state is overwritten: if that is interrupted, the rank must not offer
    its state again.
    """
    communicator, executor = context.communicator, state.executor
    statuses = _all_statuses(communicator, status, timeout)
    if any(one.sharded_update for one in statuses):
        raise UpdateIsSharded
    plan = agree(statuses, {WHOLE.name: WHOLE.elements})
    context.close_previous_links()
    if plan.behind:
        catch_up(state, communicator, plan, rate(plan.step - 1), timeout)
    plan = verify_returned(executor, communicator, plan, timeout)
    if communicator.rank in plan.new:
        state.invalidate()
        on_overwrite()
    broadcast_state(executor, context, plan, timeout)
    state.commit(plan.step)
    return plan


def catch_up(state: InPlaceState, communicator: Communicator, plan: RecoveryPlan, rate: float, timeout: float) -> None:
    """Collective. (2): broadcasts the last step's clipped total from ``plan.root`` to ranks one step behind."""
    executor = state.executor
    stage = executor.stage_states[0]
    total = stage.total.copy()
    root = plan.root
    operation = Operation("broadcast", total.size, stage.layout.element, root=root)
    communicator.run(operation, total, total, timeout)
    if communicator.rank in plan.behind:
        stage.total = stage.total_buffer
        stage.total_buffer[:] = total
        state.invalidate()
        stage.on_total(plan.step - 1, 1.0)
        stage.apply_update(rate, plan.step - 1)
        executor.steps_updated = plan.step


def verify_returned(
    executor: PlanExecutor, communicator: Communicator, plan: RecoveryPlan, timeout: float
) -> RecoveryPlan:
    """Collective. Compares hashes of the state that returned ranks have with ``plan.root``'s.

    Returns the plan in which a rank with another state has no state.
    """
    if not plan.returned:
        return plan
    mine = np.zeros(1, np.int64)
    if communicator.rank in (plan.root, *plan.returned):
        stage = executor.stage_states[0]
        digest = hashlib.sha256(stage.state_array.data)
        for vector in [*(one.numpy() for one in stage.moments), _counters(stage)]:
            digest.update(vector.data)
        mine[:] = np.frombuffer(digest.digest()[:8], np.int64)
    hashes = np.zeros(communicator.size, np.int64)
    communicator.run(Operation("all_gather", 1, dtype("int64")), mine, hashes, timeout)
    wrong = {rank for rank in plan.returned if hashes[rank] != hashes[plan.root]}
    done = tuple(NO_STATE if rank in wrong else one for rank, one in enumerate(plan.done))
    return replace(plan, done=done, returned=tuple(sorted(set(plan.returned) - wrong)))


def _counters(stage: StageState) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.array([float(one) for one in stage.layout.counters], np.float32)


def broadcast_state(executor: PlanExecutor, context: RankContext, plan: RecoveryPlan, timeout: float) -> None:
    """Broadcasts weights, buffers, optimizer state and counters from ``plan.root`` to ``plan.new``.

    Collective over these ranks. The others, which have the state, go on: with a large one, a copy that each of them
    would drop costs as much as the one that is needed.
    """
    members = sorted({plan.root, *plan.new})
    if not plan.new or context.rank not in members:
        return
    stage = executor.stage_states[0]
    counters = _counters(stage)
    for vector in [stage.state_array, *(moment.numpy() for moment in stage.moments), counters]:
        if vector.size:
            operation = Operation("broadcast", vector.size, dtype("float32"), root=members.index(plan.root))
            _group(context, members).run(operation, vector, vector, timeout)
    if context.rank in plan.new:
        for one, value in zip(stage.layout.counters, counters.tolist(), strict=True):
            one.fill_(value)
        executor.steps_updated = plan.step


def plan_rest_of_step(
    plan: RecoveryPlan, shards: int, slots: int
) -> tuple[Plan, list[MergePlan], list[tuple[int, ...]]]:
    """(3): how the ranks finish the step under way, of ``shards`` shards.

    Returns the plan of the additional shards, the merge plan of each rank's old and additional shards, and the shards
    that each rank keeps. If these need more than ``slots`` gradient slots at a rank, all ranks begin the step again.
    """
    size = len(plan.done)
    kept = list(plan.computed)
    additional = _assign_missing(kept, shards)
    holdings = [merge_plan([*old, *new], shards) for old, new in zip(kept, additional, strict=True)]
    if max(one.slots for one in holdings) > slots:
        kept = [()] * size
        additional = [tuple(part) for part in split_evenly(shards, size)]
        holdings = [merge_plan(new, shards) for new in additional]
    end = (Instruction(InstructionKind.REDUCE, 0), Instruction(InstructionKind.UPDATE, 0))
    ranks = tuple((*forward_backward(new), *end) for new in additional)
    return Plan(shards, (tuple(range(size)),), ranks), holdings, kept


def _assign_missing(kept: Sequence[tuple[int, ...]], shards: int) -> list[tuple[int, ...]]:
    """Assigns the shards that no rank has; ranks with the fewest shards get the larger parts."""
    held = {shard for one in kept for shard in one}
    missing = [shard for shard in range(shards) if shard not in held]
    assigned: list[tuple[int, ...]] = [()] * len(kept)
    order = sorted(range(len(kept)), key=lambda rank: (len(kept[rank]), rank))
    for rank, part in zip(order, split_evenly(len(missing), len(kept)), strict=True):
        assigned[rank] = tuple(missing[index] for index in part)
    return assigned
