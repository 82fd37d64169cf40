"""Parameter server: the last ranks keep the weights, a slice each; the others are workers that hold a copy of all.

BSP, 2 workers, 1 server, 4 shards; a step begins with the weights and ends with the update:

    rank 0 | 0G@2 0L0  0F0  0B0  0L1  0F1  0B1  0P@2
    rank 1 | 0G@2 0L2  0F2  0B2  0L3  0F3  0B3  0P@2
    rank 2 | 0V@0 0V@1 0T@0 0T@1 0A   0U

A worker gets every slice, computes its share of the shards and pushes their gradient, slice by slice. What differs is
when the server gives the weights to a worker again:

    bsp   when everybody has pushed: one update of all gradients together; exactly SGD
    asp   at once: one update for each worker's gradients, of weights that others have changed in the meantime
    ssp   at once, unless the worker would be more than ``staleness`` steps ahead of the slowest

A step of asp and ssp is every worker's share of one global batch, each at its own time. The trained weights are at the
servers: a worker's are as old as its last get.
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
from hoop.strategies.base import check_sizes, shares
from hoop.strategies.data_parallel import whole_model

MODES = ("bsp", "asp", "ssp")


@dataclass(frozen=True)
class ParameterServer:
    """Servers keep the weights; workers get them, compute, and push gradients."""

    servers: int = 1
    mode: str = "bsp"
    staleness: int = 3
    """How many steps a worker may be ahead of the slowest, in mode ssp."""

    name: ClassVar[str] = "ps"

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidArgument(f"mode: {self.mode!r} is none; choose {', '.join(MODES)}")
        if self.servers < 1:
            raise InvalidArgument(f"servers: {self.servers}; a parameter server needs at least 1")
        if self.staleness < 0:
            raise InvalidArgument(f"staleness: {self.staleness}; nobody can be fewer than 0 steps ahead")

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
            "asp": "an update for each push, nobody waits",
            "ssp": f"an update for each push, no worker more than {self.staleness} steps ahead of the slowest",
        }
        return f"parameter server: {self.servers} of the devices keep the weights; {when[self.mode]}"

    def stages(self, devices: int) -> int:
        return 1

    def plan(self, devices: int, micros: int, speeds: Sequence[float] | None = None) -> Plan:
        check_sizes(devices, micros, speeds)
        workers = devices - self.servers
        if workers < 1:
            raise InvalidArgument(
                f"devices: {devices} are too few for {self.servers} servers and at least 1 worker; "
                f"take {self.servers + 1} or more, or strategy data"
            )
        servers = tuple(range(workers, devices))
        paces = speeds and speeds[:workers]
        lines = [worker(share, servers) for share in shares(micros, workers, paces)]
        busy = [rank for rank, line in enumerate(lines) if line]
        for number in range(self.servers):
            lines.append(barrier(number, busy))
        plan = Plan(micros, (tuple(range(workers)),), tuple(map(tuple, lines)), servers)
        if self.synchronous:
            return plan
        rules = [self._rule(plan, rank, 1) for rank in range(devices)]
        return Plan(micros, plan.holders, run_rules(rules), servers)

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        return None if self.synchronous else self._rule(plan, rank, steps)

    def _rule(self, plan: Plan, rank: int, steps: int) -> Rule:
        if rank in plan.servers:
            busy = [other for other in plan.holders[0] if plan.ranks[other]]
            bound = self.staleness if self.mode == "ssp" else None
            return ServerRule(plan.servers.index(rank), busy, steps, bound)
        share = plan.computed_by(rank, 0)
        later = [[step * plan.micros + micro for micro in share] for step in range(steps)]
        return ListRule([one for micros in later for one in worker(micros, plan.servers)])


def worker(micros: Sequence[int], servers: Sequence[int]) -> list[Instruction]:
    """A worker's step; nothing, where it has no shard."""
    if not micros:
        return []
    gets = [Instruction(InstructionKind.GET, number, peer=server) for number, server in enumerate(servers)]
    pushes = [Instruction(InstructionKind.PUSH, number, peer=server) for number, server in enumerate(servers)]
    return [*gets, *whole_model(micros), *pushes]


def barrier(number: int, workers: Sequence[int]) -> list[Instruction]:
    """A server's step under bsp."""
    gives = [Instruction(InstructionKind.GIVE, number, peer=worker) for worker in workers]
    takes = [Instruction(InstructionKind.TAKE, number, peer=worker) for worker in workers]
    return [
        *gives,
        *takes,
        Instruction(InstructionKind.REDUCE, number),
        Instruction(InstructionKind.UPDATE, number),
    ]


class ServerRule:
    """A server that updates at each push, and gives the weights to whoever is not too far ahead.

    A worker's clock is how many steps it has pushed. It gets weights again while its clock is at most the slowest's
    plus the bound; the slowest always does, so somebody always goes on.
    """

    def __init__(self, number: int, workers: Sequence[int], steps: int, bound: int | None) -> None:
        self._number = number
        self._steps = steps
        self._bound = bound
        self._clocks = dict.fromkeys(workers, 0)
        self._waiting = list(workers)
        self._queue: deque[Instruction] = deque()
        self._give()

    @property
    def finished(self) -> bool:
        return not self._queue and all(clock == self._steps for clock in self._clocks.values())

    def version(self, micro: int) -> int | None:
        return None

    def arrived(self, message: Instruction) -> None:
        self._queue.append(message)
        self._queue.append(Instruction(InstructionKind.UPDATE, self._number))
        self._clocks[message.peer] += 1
        if self._clocks[message.peer] < self._steps:
            self._waiting.append(message.peer)
        self._give()

    def next(self) -> Instruction | None:
        return self._queue.popleft() if self._queue else None

    def _give(self) -> None:
        most = min(self._clocks.values()) + (self._steps if self._bound is None else self._bound)
        ready = [worker for worker in self._waiting if self._clocks[worker] <= most]
        self._waiting = [worker for worker in self._waiting if self._clocks[worker] > most]
        self._queue.extend(Instruction(InstructionKind.GIVE, self._number, peer=worker) for worker in ready)
