"""Executes a rule: passes received messages to it, and executes the instruction that it returns.

    links ──▶ receive ──▶ rule.on_message   (1) stores each message until its receive instruction is executed
              rule.next ──▶ execute         (2)
              None ──▶ wait for a message   (3) idle

Ranks that have finished a rule continue with collectives over the same links. So each rank receives exactly as many
messages from a peer as the peer sends in the rule: those of the plan, times the number of steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from hoop.engine.executor import PlanExecutor
from hoop.engine.profiler import now
from hoop.engine.tensor_channel import TensorReceiver
from hoop.errors import InternalError
from hoop.plan.instructions import RECEIVES, Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.plan.rules import Rule, round_robin

_COMPUTES = frozenset({InstructionKind.FORWARD, InstructionKind.BACKWARD})


def expected_messages(plan: Plan, rank: int, steps: int) -> Counter[int]:
    """Return the number of messages from each peer in ``steps`` steps. A rule changes their order, not their number."""
    each = Counter(one.peer for one in plan.ranks[rank] if one.kind in RECEIVES)
    return Counter({peer: count * steps for peer, count in each.items()})


class RuleExecutor:
    """Runs one rule on one rank, over its links."""

    def __init__(
        self,
        executor: PlanExecutor,
        rule: Rule,
        steps: int,
        execute: Callable[[Instruction], None],
        *,
        receiver: TensorReceiver | None = None,
        renumber: Callable[[Instruction], Instruction] = lambda message: message,
        receive_all: bool = False,
    ) -> None:
        """``executor``: of this rank. ``steps``: how many the rule has. ``receiver``: tensors to receive into.

        ``renumber``: maps a message to the numbering of the rule. ``receive_all``: receive all messages that have
        arrived before each choice of the rule, which depends on them; otherwise one message at a time.
        """
        self._rule, self._channel, self._execute = rule, executor.channel, execute
        self._expected = expected_messages(executor.plan, executor.rank, steps)
        """Number of messages from each peer until the rule is finished."""
        self._profiler, self._timeout_s = executor.profiler, executor.settings.timeout_s
        self._receiver, self._renumber, self._receive_all = receiver, renumber, receive_all
        self._last_peer = -1

    def run(self) -> None:
        """Run the rule until it is finished, then flush the links."""
        rule, profiler = self._rule, self._profiler
        while True:
            instruction = rule.next()  # (2)
            if instruction is None:
                if rule.finished:
                    break
                self._wait()  # (3)
                continue
            started = now()
            self._execute(instruction)
            profiler.record(instruction, started, now())
            if self._receive_all and self._expected and instruction.kind in _COMPUTES:
                self._receive(self._channel.ready_peers(list(self._expected)))
        if self._expected:
            raise InternalError(f"a rule is finished and messages from ranks {sorted(self._expected)} are outstanding")
        self._channel.endpoint.flush(time.monotonic() + self._timeout_s)

    def _wait(self) -> None:
        endpoint, peers = self._channel.endpoint, list(self._expected)
        if not peers:
            raise InternalError(f"rank {endpoint.rank}: a rule waits, and no message is expected")
        self._channel.run_idle_work()
        started, deadline = now(), time.monotonic() + self._timeout_s
        while not (found := endpoint.wait_readable(peers, deadline)):
            if time.monotonic() >= deadline:
                raise endpoint.deadline_exceeded(peers[0], "waiting for")
        self._profiler.record_wait(started, now())
        self._receive(found)

    def _receive(self, peers: list[int]) -> None:  # (1)
        if not self._receive_all and peers:
            self._last_peer = round_robin(peers, self._last_peer)
            peers = [self._last_peer]
        for peer in peers:
            started = now()
            message, tensor = self._channel.receive(peer, time.monotonic() + self._timeout_s, self._receiver)
            self._channel.store_early(message, tensor)
            self._expected[peer] -= 1
            if not self._expected[peer]:
                del self._expected[peer]
            self._profiler.record_receive(message, started, now())
            self._rule.on_message(self._renumber(message))
