"""Whether the devices of a data parallel job shard the update (``Settings.sharded_update``), by measured costs.

    unsharded   every device updates all weights
    sharded     a device updates 1/N of the weights, and the replicas that it holds, each 1/N more; it copies the
                gradients of those replicas, and all devices agree once more before they update; a device whose arena
                survives it copies its part of the state there

Both send the same bytes between devices: an all-reduce of the gradients, or their reduce-scatter and an all-gather of
the weights. The all-reduce of a model of several buckets overlaps with the backward, the reduce-scatter does not.
``setup.py`` calls this module once, when a run begins; all ranks decide alike.
"""

from __future__ import annotations

from typing import NamedTuple

from hoop.collectives.communicator import all_gather_object
from hoop.collectives.rank_context import RankContext
from hoop.engine.cost_probe import measure_communication, measure_memory, measure_update
from hoop.engine.settings import Settings
from hoop.errors import InvalidArgument
from hoop.strategies.base import Strategy
from hoop.strategies.data_parallel import DataParallel
from hoop.transport.base import SharedEndpoint, SpanningEndpoint

MIN_WEIGHT_BYTES = 4 << 20
"""Minimum bytes of weights for a sharded update. A smaller one takes about as long as the agreement; nothing is
measured."""
MIN_GAIN = 0.2
"""Minimum share of the update's time that must be saved. Measured costs are that uncertain."""
_PROBE_BYTES = (1 << 22,)


class UpdateCosts(NamedTuple):
    """Measured seconds, the most of all ranks."""

    update: float
    """Seconds of the update of all weights."""
    agree: float
    """Seconds of the agreement of all ranks, and of a message to the holder of a replica."""
    copy: float
    """Seconds of the transfer of all gradients to the holder of a replica."""
    keep: float
    """Seconds of the copy of the whole state to the arena, if that survives the process; else 0."""
    add: float
    """Seconds of the addition of two gradients."""


def saved_seconds(costs: UpdateCosts, devices: int, replicas: int, overlaps: bool) -> float:
    """Seconds of a step that a sharded update saves; negative if it costs more.

    ``replicas``: of each slice. ``overlaps``: without it, gradients are summed during the backward.
    """
    share = min(devices, 1 + replicas) / devices
    extra = costs.agree + (replicas * costs.copy + costs.keep) / devices + (costs.add if overlaps else 0.0)
    return (1 - share) * costs.update - extra


def may_choose(context: RankContext, settings: Settings, strategy: Strategy) -> bool:
    """Whether ranks may choose between a sharded and an unsharded update: data parallel, several devices, ``auto``.

    False for an elastic run without replicas: with a sharded update it could not survive the loss of a device. The same
    at all ranks.
    """
    survives = settings.replicate or context.wait_reassignment is None
    plain = isinstance(strategy, DataParallel) and not strategy.sharded
    return plain and settings.sharded_update == "auto" and context.size > 1 and survives


def is_faster_sharded(context: RankContext, settings: Settings, weight_bytes: int, chain: bool) -> bool:
    """Collective. Whether a sharded update is worth it, by what ranks measure now. The same at all ranks.

    ``chain``: the model is computed without autograd, and its gradients have one bucket. Ranks that share some hosts
    add the gradients of a host first, which a reduce-scatter does not: they do not shard the update.
    """
    endpoint = context.communicator.endpoint
    replicas = settings.replicas if settings.replicate and context.wait_reassignment is not None else 0
    if weight_bytes < MIN_WEIGHT_BYTES or isinstance(endpoint, SpanningEndpoint) or 1 + replicas >= context.size:
        return False
    found = measure_communication(context.communicator, settings.num_microbatches, settings.timeout_s)
    memory = measure_memory(_PROBE_BYTES)
    transfer = memory["copy_s"] if isinstance(endpoint, SharedEndpoint) else 2 * found["byte_s"]
    fixed, each = measure_update(settings.optimizer, weight_bytes)
    kept = 1 + settings.optimizer.num_moments if context.persistent_memory else 0
    mine = UpdateCosts(
        fixed + each * weight_bytes,
        found["agree_s"] + 2 * found["message_s"],
        transfer * weight_bytes,
        kept * memory["copy_s"] * weight_bytes,
        memory["add_s"] * weight_bytes,
    )
    ranks = all_gather_object(context.communicator, list(mine), settings.timeout_s)
    costs = UpdateCosts(*(max(column) for column in zip(*ranks, strict=True)))
    overlaps = not chain and 0 < settings.bucket_bytes < weight_bytes
    return saved_seconds(costs, context.size, replicas, overlaps) > MIN_GAIN * costs.update


def check_can_shard(strategy: Strategy, custom: bool = False, accelerator: bool = False) -> None:
    """Raises ``InvalidArgument`` if a data parallel job is to shard an update that the device makes as a whole.

    ``custom``: batches, losses or optimizers of the user's own (``engine/custom``). ``accelerator``: the state is on a
    GPU.
    """
    if not isinstance(strategy, DataParallel) or not strategy.sharded or not (custom or accelerator):
        return
    what = "a loss, an optimizer or batches of your own" if custom else "the state on a GPU"
    remedy = "use sharded_update=off" + ("" if custom else ", or accelerator=cpu")
    raise InvalidArgument(
        f"sharded_update: 'on' (strategy {strategy.spec}) cannot be used with {what}, which each device updates as a "
        f"whole; {remedy}"
    )
