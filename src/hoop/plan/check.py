"""Whether a plan can be executed, seen without executing it.

``check`` returns sentences, each with the rank and the instruction it is about. A plan without any is one in which

- every instruction names stages, ranks and micro-batches that are there, and a rank computes only what it holds;
- every forward comes after its input, every backward after its forward and after its gradient;
- every micro-batch goes forward and backward through every stage exactly once, over all replicas;
- a stage is updated after its gradients are added up, which comes after all its backwards;
- every message that is sent is received, in the order in which it was sent;
- nobody waits for ever, if sends do not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from hoop.plan.instructions import BACKWARD_KINDS, PER_MICRO, RECEIVES, SENDS, WITH_PEER, Instruction, Kind
from hoop.plan.plan import Plan
from hoop.plan.progress import Progress
from hoop.plan.timing import timeline

_SLICED = frozenset({Kind.PUSH, Kind.GET, Kind.TAKE, Kind.GIVE})
_SERVED = frozenset({Kind.TAKE, Kind.GIVE, Kind.REDUCE, Kind.UPDATE})


def check(plan: Plan) -> list[str]:
    """What is wrong with a plan, as sentences; empty where it is fine."""
    wrong = [*_shape(plan)]
    if wrong:
        return wrong
    for rank, instructions in enumerate(plan.ranks):
        progress = Progress(plan, rank)
        for one in instructions:
            wrong += [f"rank {rank}: {one} {complaint}" for complaint in progress.step(one)]
        wrong += [f"rank {rank}: {complaint}" for complaint in progress.end()]
    return [*wrong, *_coverage(plan), *_messages(plan), *_waits(plan)]


def _shape(plan: Plan) -> Iterator[str]:
    """Numbers that are not there; later checks take for granted that they are."""
    for what, groups in (("stage", plan.holders), ("slice", [(rank,) for rank in plan.servers])):
        for number, ranks in enumerate(groups):
            if not ranks or not set(ranks) <= set(range(plan.size)) or len(set(ranks)) < len(ranks):
                yield f"{what} {number} is held by ranks {list(ranks)}, of {plan.size} ranks"
    held = [set(plan.held_by(rank)) for rank in range(plan.size)]
    for rank, one in plan:
        kept = [number for number, server in enumerate(plan.servers) if server == rank]
        if one.kind in _SLICED or kept:
            mine = range(len(plan.servers)) if one.kind in {Kind.PUSH, Kind.GET} else kept
            if kept and one.kind not in _SERVED:
                yield f"rank {rank}: {one} is nothing that a server does"
            elif one.stage not in mine:
                yield f"rank {rank}: {one} is of slice {one.stage}, not one of {list(mine)}"
        elif one.stage not in held[rank]:
            yield f"rank {rank}: {one} is of a stage that it does not hold; it holds {sorted(held[rank])}"
        if one.kind in PER_MICRO and not 0 <= one.micro < plan.micros:
            yield f"rank {rank}: {one} is of a micro-batch that is not there; there are {plan.micros}"
        if one.kind in WITH_PEER and (not 0 <= one.peer < plan.size or one.peer == rank):
            yield f"rank {rank}: {one} has no such peer; there are {plan.size} ranks"


def _coverage(plan: Plan) -> Iterator[str]:
    """Each stage of each micro-batch, once forward and once backward."""
    computed = Counter(
        (one.kind in BACKWARD_KINDS, one.stage, one.micro)
        for _, one in plan
        if one.kind in BACKWARD_KINDS or one.kind is Kind.FORWARD
    )
    for stage in range(plan.stages):
        for micro in range(plan.micros):
            for backward in (False, True):
                times = computed[backward, stage, micro]
                if times != 1:
                    name = Instruction(Kind.BACKWARD if backward else Kind.FORWARD, stage, micro)
                    yield f"{name} happens {times} times over all ranks, not once"


def _messages(plan: Plan) -> Iterator[str]:
    """Sends and receives of each pair of ranks, side by side."""
    sent: dict[tuple[int, int], list[Instruction]] = {}
    received: dict[tuple[int, int], list[Instruction]] = {}
    for rank, one in plan:
        if one.kind in SENDS:
            sent.setdefault((rank, one.peer), []).append(one.mirrored(rank))
        elif one.kind in RECEIVES:
            received.setdefault((one.peer, rank), []).append(one)
    for pair in sorted(sent.keys() | received.keys()):
        source, target = pair
        out, back = sent.get(pair, []), received.get(pair, [])
        for place, (message, expected) in enumerate(zip(out, back, strict=False)):
            if message != expected:
                yield (
                    f"rank {target}: {expected} is message {place} from rank {source}, "
                    f"which sends {message.mirrored(target)} there: order or kind differ"
                )
                break
        else:
            for message in out[len(back) :]:
                yield f"rank {source}: {message.mirrored(target)} is never received"
            for expected in back[len(out) :]:
                yield f"rank {target}: {expected} is never sent"


def _waits(plan: Plan) -> Iterator[str]:
    for rank, one in timeline(plan).stuck:
        yield f"rank {rank}: waits for ever at {one}"
