"""Parameter server: the last ranks are servers, each with a slice of the weights; the other ranks are workers.

BSP, 2 workers, 1 server, 4 shards. A step begins with sending the weights and ends with the update:

    rank 0 | 0G@2 0L0  0F0  0B0  0L1  0F1  0B1  0P@2
    rank 1 | 0G@2 0L2  0F2  0B2  0L3  0F3  0B3  0P@2
    rank 2 | 0V@0 0V@1 0T@0 0T@1 0A   0U

A worker gets every slice, computes its share of the shards and pushes their gradients slice by slice. The modes differ
in when a server gives the new weights to a worker that has pushed:

    bsp   after all workers have pushed: one update with the sum of all gradients; exactly SGD
    asp   at once: one update per push, to weights that other workers' pushes may have changed since the get
    ssp   like asp, but a worker waits while it is more than ``staleness`` steps ahead of the slowest worker

Under asp and ssp a step is each worker's share of one global batch, each worker at its own time. The trained weights
are on the servers; a worker's copy is as old as its last get.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hoop.errors import InvalidArgument
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.plan.rules import ListRule, Rule
from hoop.plan.unit_clock import run_rules
from hoop.strategies.base import check_count, check_sizes, split_microbatches
from hoop.strategies.data_parallel import forward_backward

MODES = ("bsp", "asp", "ssp")


@dataclass(frozen=True)
class ParameterServer:
    """Servers keep the weights; workers get them, compute, and push gradients."""

    servers: int = 1
    mode: str = "bsp"
    staleness: int = 3
    """Maximum number of steps that a worker may be ahead of the slowest worker, in mode ssp."""

    name: ClassVar[str] = "ps"
    replicated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidArgument(f"mode: {self.mode!r} is unknown; choose {', '.join(MODES)}")
        check_count("servers", self.servers, "a parameter server needs at least 1")
        if self.staleness < 0:
            raise InvalidArgument(f"staleness: {self.staleness}; a worker cannot be fewer than 0 steps ahead")

    @property
    def synchronous(self) -> bool:
        return self.mode == "bsp"

    @property
    def versions(self) -> int:
        return 1

    @property
    def spec(self) -> str:
        stale = f",staleness={self.staleness}" if self.mode == "ssp" else ""
        return f"{self.name}:mode={self.mode},servers={self.servers}{stale}"

    def describe(self) -> str:
        when = {
            "bsp": "one update a step, when all workers have pushed",
            "asp": "an update for each push, no worker waits",
            "ssp": f"an update for each push, no worker more than {self.staleness} steps ahead of the slowest",
        }
        return f"parameter server: {self.servers} of the devices keep the weights; {when[self.mode]}"

    def stages(self, devices: int) -> int:
        return 1

    def plan(self, devices: int, num_microbatches: int, speeds: Sequence[float] | None = None) -> Plan:
        check_sizes(devices, num_microbatches, speeds)
        workers = devices - self.servers
        if workers < 1:
            raise InvalidArgument(
                f"devices: {devices} are too few for {self.servers} servers and at least 1 worker; "
                f"take {self.servers + 1} or more, or strategy data"
            )
        servers = tuple(range(workers, devices))
        worker_speeds = speeds and speeds[:workers]
        lines = [worker_step(share, servers) for share in split_microbatches(num_microbatches, workers, worker_speeds)]
        active = [rank for rank, line in enumerate(lines) if line]
        for number in range(self.servers):
            lines.append(bsp_server_step(number, active))
        plan = Plan(num_microbatches, (tuple(range(workers)),), tuple(map(tuple, lines)), servers)
        if self.synchronous:
            return plan
        rules = [self._rule(plan, rank, 1) for rank in range(devices)]
        return Plan(num_microbatches, plan.holders, run_rules(rules), servers)

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        return None if self.synchronous else self._rule(plan, rank, steps)

    def _rule(self, plan: Plan, rank: int, steps: int) -> Rule:
        if rank in plan.servers:
            active = [other for other in plan.holders[0] if plan.ranks[other]]
            staleness = self.staleness if self.mode == "ssp" else None
            return ServerRule(plan.servers.index(rank), active, steps, staleness)
        share = plan.computed_by(rank, 0)
        by_step = [[step * plan.num_microbatches + micro for micro in share] for step in range(steps)]
        return ListRule([one for microbatches in by_step for one in worker_step(microbatches, plan.servers)])


def worker_step(microbatches: Sequence[int], servers: Sequence[int]) -> list[Instruction]:
    """A worker's instructions for one step; empty if it has no micro-batches."""
    if not microbatches:
        return []
    gets = [Instruction(InstructionKind.GET, number, peer=server) for number, server in enumerate(servers)]
    pushes = [Instruction(InstructionKind.PUSH, number, peer=server) for number, server in enumerate(servers)]
    return [*gets, *forward_backward(microbatches), *pushes]


def bsp_server_step(number: int, workers: Sequence[int]) -> list[Instruction]:
    """A server's instructions for one step under bsp; ``number``: its slice."""
    gives = [Instruction(InstructionKind.GIVE, number, peer=worker) for worker in workers]
    takes = [Instruction(InstructionKind.TAKE, number, peer=worker) for worker in workers]
    return [*gives, *takes, Instruction(InstructionKind.REDUCE, number), Instruction(InstructionKind.UPDATE, number)]


class ServerRule:
    """The rule of a server under asp and ssp: update at each push, then give weights to workers not too far ahead.

    A worker's clock is the number of steps that it has pushed. It gets weights again while its clock is at most the
    slowest worker's clock plus ``staleness``. The slowest worker always qualifies, so the workers never deadlock.
    """

    def __init__(self, number: int, workers: Sequence[int], steps: int, staleness: int | None) -> None:
        """``number``: the server's slice. ``staleness``: None for no limit (asp)."""
        self._number = number
        self._steps = steps
        self._staleness = staleness
        self._clocks = dict.fromkeys(workers, 0)
        self._waiting = list(workers)
        self._queue: deque[Instruction] = deque()
        self._give_weights()

    @property
    def finished(self) -> bool:
        return not self._queue and all(clock == self._steps for clock in self._clocks.values())

    def weight_version(self, micro: int) -> int | None:
        return None

    def on_message(self, message: Instruction) -> None:
        self._queue.append(message)
        self._queue.append(Instruction(InstructionKind.UPDATE, self._number))
        self._clocks[message.peer] += 1
        if self._clocks[message.peer] < self._steps:
            self._waiting.append(message.peer)
        self._give_weights()

    def next(self) -> Instruction | None:
        return self._queue.popleft() if self._queue else None

    def _give_weights(self) -> None:
        limit = min(self._clocks.values()) + (self._steps if self._staleness is None else self._staleness)
        ready = [worker for worker in self._waiting if self._clocks[worker] <= limit]
        self._waiting = [worker for worker in self._waiting if self._clocks[worker] > limit]
        self._queue.extend(Instruction(InstructionKind.GIVE, self._number, peer=worker) for worker in ready)
