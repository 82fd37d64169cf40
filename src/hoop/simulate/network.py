"""When a message arrives: links that carry one message after the other, and take a while to be crossed.

    sender's NIC    ▇▇▇▇▇▇▇▇                bytes / bandwidth, after what was sent before
                        ╲  latency
    receiver's NIC       ▇▇▇▇▇▇▇▇           likewise, after what else arrives there

Inside a host without a link of its own, a message is a copy in memory: there at once, and paid for in cores' time by
who sends and who receives.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from hoop.simulate.clock import Clock
from hoop.simulate.cluster import Cluster


class Network:
    """The links of a cluster, and until when each is taken."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._clock = clock
        self._host = cluster.host_of
        self._between, self._inside = cluster.link, cluster.inside
        self._sending: dict[tuple[bool, int], float] = {}
        self._receiving: dict[tuple[bool, int], float] = {}

    def in_memory(self, source: int, target: int) -> bool:
        """Whether messages between these are copies in memory that they share."""
        return self._inside is None and self._host[source] == self._host[target]

    def send(self, source: int, target: int, size: float, what: Any) -> None:
        """A message leaves now; it is delivered when its last byte is there."""
        clock = self._clock
        inside = self._host[source] == self._host[target]
        link = self._inside if inside else self._between
        if link is None:
            clock.deliver(clock.now, target, what)
            return
        out = (inside, self._host[source] if link.shared else source)
        into = (inside, self._host[target] if link.shared else target)
        takes = size / link.bandwidth
        begins = max(clock.now, self._sending.get(out, 0.0))
        self._sending[out] = begins + takes
        clock.later(begins + link.latency, partial(self._received, into, takes, target, what))

    def _received(self, into: tuple[bool, int], takes: float, target: int, what: Any) -> None:
        """Its first byte is at the receiver's NIC, where it waits for what came before."""
        here = max(self._clock.now, self._receiving.get(into, 0.0)) + takes
        self._receiving[into] = here
        self._clock.deliver(here, target, what)
