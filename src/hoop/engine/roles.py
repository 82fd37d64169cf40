"""Which role each rank of a strategy has, and what a role cannot do, said before the first step."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from hoop.data.dataset import Dataset
from hoop.engine.role import Role
from hoop.engine.ruled.ring import AsynchronousRing, Ring
from hoop.engine.ruled.served import SPAN, Served
from hoop.engine.ruled.server import Server
from hoop.engine.settings import Settings
from hoop.engine.stages.weights import Vectors
from hoop.engine.survival.spare import Spare
from hoop.engine.worker import Worker
from hoop.errors import InvalidArgument
from hoop.plan.plan import Plan
from hoop.strategies.strategy import Strategy


def check_role(strategy: Strategy, plan: Plan, settings: Settings) -> None:
    """Raises where these settings ask for something that ranks of this strategy cannot know."""
    clip = settings.optimizer.clip
    if clip and len(plan.servers) > 1:
        raise InvalidArgument(
            f"clip: {clip} needs the norm of the whole gradient, and each of {len(plan.servers)} parameter servers "
            "has a slice of it; use servers=1, strategy data, or clip 0"
        )
    if clip and not plan.servers and not strategy.synchronous:
        raise InvalidArgument(
            f"clip: {clip} needs the norm over all stages, and with {strategy.spec} no moment has all of a step's "
            "gradients; use ring:sync, or clip 0"
        )


def role_of(
    worker: Worker, strategy: Strategy, blocks: Sequence[nn.Module], data: Dataset, vectors: Vectors
) -> Role:
    """This rank's role."""
    plan = worker.plan
    if worker.rank in plan.servers:
        return Server(worker, strategy, blocks, vectors)
    if not worker.held:
        return Spare(worker, 1 if strategy.synchronous else SPAN)
    if plan.servers:
        return Served(worker, strategy)
    if strategy.rule(plan, worker.rank) is None:
        return Role(worker)
    if strategy.synchronous:
        return Ring(worker, strategy)
    return AsynchronousRing(worker, strategy, data, vectors)
