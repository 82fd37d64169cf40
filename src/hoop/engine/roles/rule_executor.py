"""Executes a rule: what comes in is told to it, and what it says next is done.

    links ──▶ receive ──▶ rule.arrived      (1) as messages come, each kept until its receive is executed
              rule.next ──▶ execute         (2)
              None ──▶ wait for a message   (3) idle

Ranks that are done with a rule go on with collectives over the same links. So from each peer exactly as many messages
are taken as it has for this rank: the plan's, times the steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from hoop.engine.profiler import InstructionProfiler, now
from hoop.engine.tensor_channel import TensorChannel, TensorReceiver
from hoop.errors import InternalError
from hoop.plan.instructions import RECEIVES, Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.plan.rules import Rule, in_turn

_COMPUTES = frozenset({InstructionKind.FORWARD, InstructionKind.BACKWARD})


def due(plan: Plan, rank: int, steps: int) -> Counter[int]:
    """How many messages come from each peer in so many steps: a rule changes their order, not their number."""
    each = Counter(one.peer for one in plan.ranks[rank] if one.kind in RECEIVES)
    return Counter({peer: count * steps for peer, count in each.items()})


class RuleExecutor:
    """A rule, the links it listens to, and what executes it."""

    def __init__(
        self,
        rule: Rule,
        post: TensorChannel,
        coming: Counter[int],
        execute: Callable[[Instruction], None],
        clock: InstructionProfiler,
        timeout_s: float,
        *,
        landing: TensorReceiver | None = None,
        named: Callable[[Instruction], Instruction] = lambda message: message,
        chooses: bool = False,
    ) -> None:
        """``chooses``: what the rule does next depends on all that has come, so it is told before each choice.

        Otherwise one message is taken in at a time. ``landing`` is where it goes; ``named`` gives it its number in the
        rule.
        """
        self._rule, self._post, self._coming = rule, post, coming
        self._execute, self._clock, self._timeout_s = execute, clock, timeout_s
        self._landing, self._named, self._chooses = landing, named, chooses
        self._served = -1

    def run(self) -> None:
        """Until the rule is finished and the links have taken all that it sent."""
        rule, clock = self._rule, self._clock
        while True:
            one = rule.next()  # (2)
            if one is None:
                if rule.finished:
                    break
                self._wait()  # (3)
                continue
            started = now()
            self._execute(one)
            clock.note(one, started, now())
            if self._chooses and self._coming and one.kind in _COMPUTES:
                self._receive(self._post.ready(list(self._coming)))
        if self._coming:
            raise InternalError(f"a rule is finished and messages of ranks {sorted(self._coming)} are not in")
        self._post.endpoint.flush(time.monotonic() + self._timeout_s)

    def _wait(self) -> None:
        endpoint, peers = self._post.endpoint, list(self._coming)
        if not peers:
            raise InternalError(f"rank {endpoint.rank}: a rule waits and nobody has anything to send")
        self._post.idle()
        started, deadline = now(), time.monotonic() + self._timeout_s
        while not (found := endpoint.senders(peers, deadline)):
            if time.monotonic() >= deadline:
                raise endpoint.overdue(peers[0], "waiting for")
        self._clock.waited(started, now())
        self._receive(found)

    def _receive(self, peers: list[int]) -> None:  # (1)
        if not self._chooses and peers:
            self._served = in_turn(peers, self._served)
            peers = [self._served]
        for peer in peers:
            started = now()
            message, tensor = self._post.receive(peer, time.monotonic() + self._timeout_s, self._landing)
            self._post.keep(message, tensor)
            self._coming[peer] -= 1
            if not self._coming[peer]:
                del self._coming[peer]
            self._clock.received(message, started, now())
            self._rule.arrived(self._named(message))
