"""Virtual time: an event queue, the cores that ranks share, and the links between hosts.

``Clock`` runs one process per rank. A process is a generator that yields

    seconds   to compute for that long on its core; it takes longer where other ranks have the same core
    None      to wait until something is delivered to the rank

and calls ``deliver`` (through ``Network``) for its messages. All events of one moment are processed before any rank
resumes, and ranks resume in rank order: the simulation is deterministic.

Of Hoop's four schedulers of instruction lists this one prices them: ``collectives.plan.verify`` checks one collective
without times, ``plan.unit_clock`` (``timeline``, ``run_rules``) counts abstract units; only here do links and cores
exist.

A message occupies the NIC of its sender and then that of its receiver, one message after the other:

    sender's NIC    ▇▇▇▇▇▇▇▇                bytes / bandwidth, after earlier messages
                        ╲  latency
    receiver's NIC       ▇▇▇▇▇▇▇▇           likewise, after other messages that arrive there

Inside a host without a link of its own a message is a copy in shared memory: delivered at once, and paid for in core
time by the sender and the receiver.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hoop.plan.instructions import Instruction
from hoop.simulate.cluster import Cluster, Host
from hoop.simulate.cost_model import Machine

Process = Iterator[float | None]
_CALLBACK = -(1 << 60)
"""In place of a rank: the event is a function to call. Other negative numbers are processors (-1 - host)."""
_TOLERANCE_S = 1e-12
"""Computations that end within this many seconds of each other end together."""


class Group:
    """Ranks that synchronise with each other; hashed by identity, because simulations may have thousands of groups."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.arrived: list[int] = []


class Clock:
    """The event loop of a simulation."""

    def __init__(self, cluster: Cluster, machine: Machine) -> None:
        self.now = 0.0
        self.inbox: list[deque[Instruction]] = [deque() for _ in range(cluster.size)]
        """For each rank, delivered messages of plans and rules that the rank has not taken yet."""
        self.signals: list[Counter[Any]] = [Counter() for _ in range(cluster.size)]
        """For each rank, the number of other deliveries by key: chunks of a reduction by sender, barriers by group."""
        self._queue: list[tuple[float, int, int, Any]] = []
        self._num_events = 0
        self._processes: list[Process] = []
        self._waiting = [False] * cluster.size
        self.speeds = cluster.speeds
        self._processors: list[Processor] = []
        self._processor_of: list[Processor | None] = []
        """For each rank, its host's processor; None: other ranks never slow its core down."""
        rank = 0
        for number, host in enumerate(cluster.hosts):
            processor = Processor(self, number, host, rank, machine)
            self._processors.append(processor)
            alone = host.devices == 1 or (machine.crowding == 1 and (host.cores or host.devices) >= host.devices)
            self._processor_of += [None if alone else processor] * host.devices
            rank += host.devices

    def has_own_core(self, rank: int) -> bool:
        """Whether the rank's core is its own, and other ranks never slow it down."""
        return self._processor_of[rank] is None

    def deliver(self, at: float, rank: int, item: Any) -> None:
        """Schedules the delivery of an item to a rank: an instruction into its inbox, any other item as a signal."""
        self._num_events += 1
        heapq.heappush(self._queue, (at, self._num_events, rank, item))

    def call_at(self, at: float, function: Callable[[], None]) -> None:
        """Schedules a function call."""
        self.deliver(at, _CALLBACK, function)

    def join_barrier(self, rank: int, group: Group) -> None:
        """The rank has arrived at the group's barrier; the last arrival signals the group to all its ranks."""
        group.arrived.append(rank)
        if len(group.arrived) == len(group.ranks):
            for one in group.arrived:
                self.deliver(self.now, one, group)
            group.arrived = []

    def run(self, processes: list[Process]) -> list[int]:
        """Runs until no event is left; returns the ranks that still wait (deadlock)."""
        self._processes = processes
        for rank in range(len(processes)):
            self._resume(rank)
        queue, waiting, inbox, signals = self._queue, self._waiting, self.inbox, self.signals
        pop, resume = heapq.heappop, self._resume
        while queue:
            now = self.now = queue[0][0]
            awake: list[int] = []
            while queue and queue[0][0] == now:
                _, _, rank, item = pop(queue)
                if item is None:
                    awake.append(rank)
                elif rank == _CALLBACK:
                    item()
                elif rank < 0:
                    awake += self._processors[-rank - 1].completed(item)
                else:
                    if type(item) is Instruction:
                        inbox[rank].append(item)
                    else:
                        signals[rank][item] += 1
                    if waiting[rank]:
                        awake.append(rank)
            for rank in awake if len(awake) < 2 else sorted(set(awake)):
                resume(rank)
        return [rank for rank, one in enumerate(self._waiting) if one]

    def _resume(self, rank: int) -> None:
        """Continues a rank's process until it computes, waits or ends."""
        self._waiting[rank] = False
        processor = self._processor_of[rank]
        for request in self._processes[rank]:
            if request is None:
                self._waiting[rank] = True
                break
            if request > 0:
                seconds = request / self.speeds[rank]
                if processor is None:
                    self.deliver(self.now + seconds, rank, None)
                else:
                    processor.start(rank, seconds)
                return
        if processor is not None:
            processor.release(rank)


class Processor:
    """The cores of one host, each with a queue of the ranks that compute on it.

        core 0:  rank 0 ▇▇▇▇▇▇▇▇|slice|      rank 0 ▇▇▇ waits
                 rank 2                ▇▇▇▇▇▇          ▇▇▇▇▇▇

    The first rank of a queue has the core until it waits, or until its time slice ends while others are queued: then
    it goes to the end of the queue. A rank that wakes joins at the end. So of two ranks that wake together one computes
    at full speed and the other one begins after it, as under the kernel's scheduler.
    """

    def __init__(self, clock: Clock, number: int, host: Host, first_rank: int, machine: Machine) -> None:
        self._clock, self._number, self._first_rank = clock, number, first_rank
        self._cores = min(host.cores or host.devices, host.devices)
        self._slowdown_per_core = (machine.crowding - 1) / (self._cores - 1) if self._cores > 1 else 0.0
        self._slice_s = machine.slice_s or math.inf
        self._queues: list[deque[int]] = [deque() for _ in range(self._cores)]
        self._slice_ends = [0.0] * self._cores
        self._remaining: dict[int, float] = {}
        """Seconds of computation left, by rank, at full speed."""
        self._core_rate = 1.0
        """Of the cores that are in use, since the last change."""
        self._updated_at = 0.0
        self._version = 0
        """Grows with every reschedule, so that events of an older schedule are ignored."""

    def start(self, rank: int, seconds: float) -> None:
        """The rank computes for ``seconds``. It goes on in its slice if it has not released its core since."""
        self._advance()
        queue = self._queues[self._core_of(rank)]
        if rank not in queue:
            queue.append(rank)
            if len(queue) == 1:
                self._begin_slice(self._core_of(rank))
        self._remaining[rank] = seconds
        self._reschedule()

    def release(self, rank: int) -> None:
        """The rank waits, or has finished: its core is free for the next rank of the queue."""
        core = self._core_of(rank)
        queue = self._queues[core]
        if rank not in queue:
            return
        self._advance()
        queue.remove(rank)
        if queue:
            self._begin_slice(core)
        self._reschedule()

    def completed(self, version: int) -> list[int]:
        """Ranks whose computation ends now; empty if the event belongs to an older schedule.

        Each of them computes on (``start``) or waits (``release``) at this moment.
        """
        if version != self._version:
            return []
        self._advance()
        heads = [queue[0] for queue in self._queues if queue]
        done = [rank for rank in heads if rank in self._remaining and self._remaining[rank] <= _TOLERANCE_S]
        for rank in done:
            del self._remaining[rank]
        for core, queue in enumerate(self._queues):
            if len(queue) > 1 and queue[0] not in done and self._clock.now >= self._slice_ends[core] - _TOLERANCE_S:
                queue.rotate(-1)
                self._begin_slice(core)
        self._reschedule()
        return done

    def _core_of(self, rank: int) -> int:
        return (rank - self._first_rank) % self._cores

    def _begin_slice(self, core: int) -> None:
        self._slice_ends[core] = self._clock.now + self._slice_s

    def _advance(self) -> None:
        elapsed, self._updated_at = self._clock.now - self._updated_at, self._clock.now
        if elapsed:
            for queue in self._queues:
                if queue and queue[0] in self._remaining:
                    self._remaining[queue[0]] -= elapsed * self._core_rate

    def _reschedule(self) -> None:
        """Schedules the next moment at which a computation or a slice ends."""
        self._version += 1
        busy = [(core, queue) for core, queue in enumerate(self._queues) if queue]
        self._core_rate = 1 / (1 + self._slowdown_per_core * (len(busy) - 1)) if busy else 1.0
        now = self._clock.now
        moments = [
            now + self._remaining[queue[0]] / self._core_rate for _, queue in busy if queue[0] in self._remaining
        ]
        moments += [self._slice_ends[core] for core, queue in busy if len(queue) > 1 and queue[0] in self._remaining]
        if moments:
            self._clock.deliver(max(now, min(moments)), -self._number - 1, self._version)


class Network:
    """The links of a cluster, and until when each NIC is busy."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self._clock = clock
        self._host_of = cluster.host_of
        self._link, self._link_inside = cluster.link, cluster.inside
        self._sending_until: dict[tuple[bool, int], float] = {}
        self._receiving_until: dict[tuple[bool, int], float] = {}

    def shares_memory(self, source: int, target: int) -> bool:
        """Whether messages between these ranks are copies in shared memory."""
        return self._link_inside is None and self._host_of[source] == self._host_of[target]

    def send(self, source: int, target: int, size: float, item: Any) -> None:
        """Sends a message of ``size`` bytes now; it is delivered when its last byte arrives."""
        clock = self._clock
        inside = self._host_of[source] == self._host_of[target]
        link = self._link_inside if inside else self._link
        if link is None:
            clock.deliver(clock.now, target, item)
            return
        out_nic = (inside, self._host_of[source] if link.shared else source)
        in_nic = (inside, self._host_of[target] if link.shared else target)
        transfer_s = size / link.bandwidth
        start = max(clock.now, self._sending_until.get(out_nic, 0.0))
        self._sending_until[out_nic] = start + transfer_s
        clock.call_at(start + link.latency, partial(self._reach_receiver, in_nic, transfer_s, target, item))

    def _reach_receiver(self, in_nic: tuple[bool, int], transfer_s: float, target: int, item: Any) -> None:
        """The first byte is at the receiver's NIC, where the message waits for earlier ones."""
        end = max(self._clock.now, self._receiving_until.get(in_nic, 0.0)) + transfer_s
        self._receiving_until[in_nic] = end
        self._clock.deliver(end, target, item)
