"""Virtual time: processes of ranks that compute on shared cores and wait for what others deliver.

A process is a generator, one a rank. It yields

    seconds   to compute so long on its core; longer, where others compute on the same one
    None      to wait until something is delivered to it

and calls ``deliver`` for what it sends. Whatever happens at the same moment is seen before anybody goes on, and then
they go on in the order of their ranks: there is no chance in it.

When a message arrives: links that carry one message after the other, and take a while to be crossed.

    sender's NIC    ▇▇▇▇▇▇▇▇                bytes / bandwidth, after what was sent before
                        ╲  latency
    receiver's NIC       ▇▇▇▇▇▇▇▇           likewise, after what else arrives there

Inside a host without a link of its own, a message is a copy in memory: there at once, and paid for in cores' time by
who sends and who receives.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hoop.plan.instructions import Instruction
from hoop.simulate.cluster import Cluster, Host

Process = Iterator[float | None]
_CALL = -(1 << 60)
_SAME = 1e-12
"""Seconds between two ends of computing that are one."""


class Group:
    """Ranks that meet; compared by identity, since there may be thousands of them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.here: list[int] = []


class Clock:
    """The moments of a simulation, one after the other."""

    def __init__(self, cluster: Cluster, crowding: float = 1.0) -> None:
        self.now = 0.0
        self.inbox: list[deque[Instruction]] = [deque() for _ in range(cluster.size)]
        """Messages of plans and rules that came and were not taken in yet."""
        self.counted: list[Counter[Any]] = [Counter() for _ in range(cluster.size)]
        """Of everything else how many came: chunks by their sender, meetings by their group."""
        self._queue: list[tuple[float, int, int, Any]] = []
        self._events = 0
        self._processes: list[Process] = []
        self._waiting = [False] * cluster.size
        self.speeds = cluster.speeds
        self._processors: list[Processor] = []
        self._processor_of: list[Processor | None] = []
        """None: the device has a core for itself, whatever the others do."""
        rank = 0
        for number, host in enumerate(cluster.hosts):
            processor = Processor(self, number, host, rank, crowding)
            self._processors.append(processor)
            alone = host.devices == 1 or (crowding == 1 and (host.cores or host.devices) >= host.devices)
            self._processor_of += [None if alone else processor] * host.devices
            rank += host.devices

    def alone(self, rank: int) -> bool:
        """Whether a rank's core is its own, and as fast whatever the others do."""
        return self._processor_of[rank] is None

    def deliver(self, at: float, rank: int, what: Any) -> None:
        """Something arrives at a rank at a moment from now on: an instruction, or what is only counted."""
        self._events += 1
        heapq.heappush(self._queue, (at, self._events, rank, what))

    def later(self, at: float, call: Callable[[], None]) -> None:
        """Something that happens to no rank."""
        self.deliver(at, _CALL, call)

    def meet(self, rank: int, group: Group) -> None:
        """This rank has come; the last one to come lets all go on."""
        group.here.append(rank)
        if len(group.here) == len(group.ranks):
            for one in group.here:
                self.deliver(self.now, one, group)
            group.here = []

    def run(self, processes: list[Process]) -> list[int]:
        """Until nobody has anything to do any more; returns the ranks that then still wait."""
        self._processes = processes
        for rank in range(len(processes)):
            self._go_on(rank)
        queue, waiting, inbox, counted = self._queue, self._waiting, self.inbox, self.counted
        pop, go_on = heapq.heappop, self._go_on
        while queue:
            now = self.now = queue[0][0]
            awake: list[int] = []
            while queue and queue[0][0] == now:
                _, _, rank, what = pop(queue)
                if what is None:
                    awake.append(rank)
                elif rank == _CALL:
                    what()
                elif rank < 0:
                    awake += self._processors[-rank - 1].ended(what)
                else:
                    if type(what) is Instruction:
                        inbox[rank].append(what)
                    else:
                        counted[rank][what] += 1
                    if waiting[rank]:
                        awake.append(rank)
            for rank in awake if len(awake) < 2 else sorted(set(awake)):
                go_on(rank)
        return [rank for rank, one in enumerate(self._waiting) if one]

    def _go_on(self, rank: int) -> None:
        self._waiting[rank] = False
        for want in self._processes[rank]:
            if want is None:
                self._waiting[rank] = True
            elif want > 0:
                seconds = want / self.speeds[rank]
                processor = self._processor_of[rank]
                if processor is None:
                    self.deliver(self.now + seconds, rank, None)
                else:
                    processor.begin(rank, seconds)
            else:
                continue
            return


class Processor:
    """The cores of one host: devices that have a core in common take turns on it, as small as one likes."""

    def __init__(self, clock: Clock, number: int, host: Host, first: int, crowding: float) -> None:
        self._clock, self._number, self._first = clock, number, first
        self._cores = min(host.cores or host.devices, host.devices)
        self._slower = (crowding - 1) / (self._cores - 1) if self._cores > 1 else 0.0
        self._left: dict[int, float] = {}
        self._rates: dict[int, float] = {}
        self._since = 0.0
        self._version = 0

    def begin(self, rank: int, seconds: float) -> None:
        self._advance()
        self._left[rank] = seconds
        self._arrange()

    def ended(self, version: int) -> set[int]:
        """Who has finished now; nobody, if something has begun or ended since this was foreseen."""
        if version != self._version:
            return set()
        self._advance()
        done = {rank for rank, left in self._left.items() if left <= _SAME}
        for rank in done:
            del self._left[rank]
        self._arrange()
        return done

    def _advance(self) -> None:
        elapsed, self._since = self._clock.now - self._since, self._clock.now
        if elapsed:
            for rank in self._left:
                self._left[rank] -= elapsed * self._rates[rank]

    def _arrange(self) -> None:
        """New rates, and the next moment at which somebody ends."""
        self._version += 1
        if not self._left:
            return
        busy = Counter((rank - self._first) % self._cores for rank in self._left)
        pace = 1 / (1 + self._slower * (len(busy) - 1))
        self._rates = {rank: pace / busy[(rank - self._first) % self._cores] for rank in self._left}
        wait = max(0.0, min(left / self._rates[rank] for rank, left in self._left.items()))
        self._clock.deliver(self._clock.now + wait, -self._number - 1, self._version)


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
