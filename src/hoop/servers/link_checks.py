"""Checks of the links between devices, by the coordinator: when a device joins, and when it reports a stall.

``JoinCheck``: can the coordinator and other devices connect to a device that joins, and it to them?

    coordinator ── connects ──▶ J        (1) to the services of J, and to its data port
    coordinator ── CheckLinks ─▶ J       (2) J connects to the data ports of a few members, one a host …
    coordinator ── CheckLinks ─▶ P       (3) … and each of those to the data port of J
    membership ◀── LinksChecked          (4) stores what failed: the events device_unreachable and device_reachable

The join does not wait for it, and few checks run at a time: many devices may join at once. A failed check is repeated
from time to time, and at the start of a job, which waits for the checks of its devices. No evidence is taken from a
device that does not answer: the failure detector decides about that one. Devices that share memory with each other
need no data port, so devices of this machine alone are not checked.

``LinkDiagnosis``: a device waits for a peer and receives no byte. Is the peer busy, or did the link lose data?

    device R ── heartbeat: waits for P ──▶ coordinator ── Describe ──▶ P   (1) how many bytes P sent on its link to R
                                           coordinator ── Describe ──▶ R   (2) a little later: R has received fewer
                                           membership: R complains of P    (3) ``state_machine`` decides what follows

A device that connects to a peer complains of it if it still does a little later.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import grpc

from hoop.errors import HoopError
from hoop.events import Event
from hoop.membership import events as m
from hoop.membership.reachability import share_memory
from hoop.membership.state import COORDINATOR, Connection
from hoop.servers.coordinator import Coordinator
from hoop.topology import Address, DeviceInfo
from hoop.transport.port_check import CONNECT_S, PortCheck
from hoop.wire.generated import hoop_pb2 as pb

MAX_PEERS = 4
"""Number of devices with which a new one is checked: 1, 2, 4 and 8 places before it, so that no device is asked by
all."""
MAX_CHECKS = 8
"""Maximum number of checks that run at the same time."""
CALL_S = CONNECT_S + 3.0
SETTLE_S = CALL_S + 2.0
"""Seconds that the start of a job waits for the checks of its devices."""
RECHECK_S = 5.0
"""Seconds before a failed check is repeated for the first time; they double with each repetition."""
MAX_RECHECK_S = 15.0
"""Maximum seconds before a failed check is repeated."""
IN_FLIGHT_S = 1.5
"""Time that sent bytes may be in flight: several round trips of a slow link, with retransmissions. A property of
networks, not of the lease."""
DESCRIBE_S = 5.0


@dataclass
class _Check:
    """The check of one incarnation of a device, until all its connections have worked."""

    info: DeviceInfo
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no attempt is under way."""
    again: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to begin the next attempt at once."""


class JoinCheck:
    """Checks every device that joins."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._ports = PortCheck(coordinator.config.credentials.link_key)
        self._checks: dict[str, _Check] = {}
        """Checks that run, or have failed and will be repeated, by incarnation of the device."""
        self._slots = asyncio.Semaphore(MAX_CHECKS)
        self._unsubscribe = coordinator.events.subscribe(self._on_event)

    def start(self) -> None:
        """Checks the devices of the journal."""
        for member in self._coordinator.state.members.values():
            if member.usable:
                self._begin(member.info)

    async def close(self) -> None:
        self._unsubscribe()
        await asyncio.to_thread(self._ports.close)

    async def settle(self, device_ids: Collection[int]) -> None:
        """Waits until these devices have been checked; those whose check failed are checked again."""
        checks = [one for one in self._checks.values() if one.info.device_id in device_ids]
        for check in checks:
            if check.settled.is_set():
                check.settled.clear()
                check.again.set()
        waits = [asyncio.ensure_future(check.settled.wait()) for check in checks]
        if waits:
            _, late = await asyncio.wait(waits, timeout=SETTLE_S)
            for wait in late:
                wait.cancel()

    def _on_event(self, event: Event) -> None:
        if event.kind == "device_joined":
            self._begin(self._coordinator.state.member(int(event.fields["device"])).info)

    def _begin(self, info: DeviceInfo) -> None:
        known = self._checks.get(info.incarnation)
        if known is not None:
            known.info = info
            known.again.set()
            return
        if needs_check(info, self._others(info)):
            check = self._checks[info.incarnation] = _Check(info)
            self._coordinator.in_background(self._check_until_reachable(check))

    def _others(self, info: DeviceInfo) -> list[DeviceInfo]:
        members = self._coordinator.state.members.values()
        return [one.info for one in members if one.usable and one.info.device_id != info.device_id]

    async def _check_until_reachable(self, check: _Check) -> None:
        pause = RECHECK_S
        try:
            while self._is_member(check.info):
                check.again.clear()
                async with self._slots:
                    results = await self._check(check.info)
                self._report(check.info, results)
                check.settled.set()
                if not any(results.values()):
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(check.again.wait(), pause)
                pause = min(2 * pause, MAX_RECHECK_S)
                check.settled.clear()
        finally:
            check.settled.set()
            self._checks.pop(check.info.incarnation, None)

    def _is_member(self, info: DeviceInfo) -> bool:
        member = self._coordinator.state.members.get(info.device_id)
        return member is not None and member.usable and member.info.incarnation == info.incarnation

    def _report(self, info: DeviceInfo, results: dict[Connection, str]) -> None:  # (4)
        self._coordinator.apply(m.LinksChecked(info.device_id, info.incarnation, results))

    async def _check(self, info: DeviceInfo) -> dict[Connection, str]:
        """Tries the connections to and from a device. Returns why each failed; empty: it worked."""
        own, target = Connection(COORDINATOR, info.device_id), info.device_id
        services, data = await asyncio.gather(  # (1)
            asyncio.wrap_future(self._ports.services(info.address)),
            asyncio.wrap_future(self._ports.data_port(info.data_address)),
        )
        results = {own._replace(data=False): services}
        if services:
            return results
        peers = self._peers(info)
        answers = await asyncio.gather(
            self._ask(info, [peer.data_address for peer in peers]),  # (2)
            *(self._ask(peer, [info.data_address]) for peer in peers),  # (3)
        )
        for peer, failure in zip(peers, answers[0] or (), strict=False):
            results[Connection(target, peer.device_id)] = failure
        for peer, failures in zip(peers, answers[1:], strict=True):
            if failures:
                results[Connection(peer.device_id, target)] = failures[0]
        # The coordinator itself uses no data port. Where other devices have tried, only their results count.
        tried = any(one.data and one.target == target for one in results)
        results[own] = "" if tried else data
        return results

    def _peers(self, info: DeviceInfo) -> list[DeviceInfo]:
        """The members that a device is checked with: a few of other hosts, and those with which it failed before."""
        others = self._others(info)
        failed = {key for one in self._coordinator.state.unreachable for key in one[:2] if info.device_id in one[:2]}
        again = [one for one in others if one.device_id in failed]
        return list({one.device_id: one for one in (*again, *choose_peers(info, others))}.values())

    async def _ask(self, info: DeviceInfo, addresses: Sequence[Address]) -> list[str] | None:
        """Asks a device to try these data ports. None: no answer, which is no evidence against any of them."""
        if not addresses:
            return []
        request = pb.CheckLinksRequest(data_addresses=map(str, addresses))
        try:
            # Not by ``Coordinator.call``: a check that is too slow is no evidence for the failure detector.
            answer = await self._coordinator.device(info.device_id).CheckLinks(request, timeout=CALL_S)
        except (grpc.RpcError, HoopError):
            return None
        return list(answer.failures) if len(answer.failures) == len(addresses) else None


def needs_check(info: DeviceInfo, others: Sequence[DeviceInfo]) -> bool:
    """Whether a device, or one of the others, needs a data port, or comes from another machine."""
    local = info.address.is_loopback and info.shared_address is not None
    return not local or any(not share_memory(info, one) for one in others)


def choose_peers(info: DeviceInfo, others: Sequence[DeviceInfo]) -> list[DeviceInfo]:
    """The members of other hosts, one a host, that are 1, 2, 4 and 8 places before a device in the order of ids."""
    hosts: dict[str, DeviceInfo] = {}
    before = sorted(others, key=lambda one: (one.device_id > info.device_id, -one.device_id))
    for one in before:
        if not share_memory(info, one):
            hosts.setdefault(one.shared_address.host if one.shared_address else one.incarnation, one)
    apart = list(hosts.values())
    chosen = [apart[place - 1] for place in (1, 2, 4, 8) if place <= len(apart)]
    chosen += [one for one in apart if one not in chosen]  # a small cluster is checked completely
    return chosen[:MAX_PEERS]


class LinkDiagnosis:
    """Checks the stalls that devices report in their heartbeats."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._open: set[tuple[int, int, int, int]] = set()
        """Stalls under diagnosis, each as communicator, generation, waiting device, peer."""
        self._connecting: dict[int, set[tuple[int, int, int, int]]] = {}
        """Stalls of each device that connects to a peer, of its newest heartbeat."""

    def on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        """Starts a diagnosis for every reported stall that is current and has none yet."""
        self._connecting.pop(heartbeat.device_id, None)
        for stall in heartbeat.stalls:
            for peer in stall.device_ids:
                case = (stall.communicator_id, stall.generation, heartbeat.device_id, peer)
                if stall.connecting:
                    self._connecting.setdefault(heartbeat.device_id, set()).add(case)
                if case not in self._open and self._current(stall, heartbeat.device_id, peer):
                    self._open.add(case)
                    self._coordinator.in_background(self._diagnose(case, stall))

    def _current(self, stall: pb.Stall, device_id: int, peer: int) -> bool:
        one = self._coordinator.state.communicators.get(stall.job_id)
        return one is not None and one.generation == stall.generation and {device_id, peer} <= set(one.members)

    async def _diagnose(self, case: tuple[int, int, int, int], stall: pb.Stall) -> None:
        _, _, device_id, peer = case
        try:
            if await (self._still_connects(case) if stall.connecting else self._lost_bytes(stall, device_id, peer)):
                self._coordinator.apply(
                    m.LinkFailureReported(
                        communicator_id=stall.job_id,
                        generation=stall.generation,
                        device_id=device_id,
                        peer_id=peer,
                        now=time.monotonic(),
                    )
                )  # (3)
        except HoopError:
            return  # one of them cannot be reached: the failure detector decides
        finally:
            self._open.discard(case)

    async def _still_connects(self, case: tuple[int, int, int, int]) -> bool:
        """Whether the device's newest heartbeat, a little later, still says that it connects to the peer."""
        await asyncio.sleep(IN_FLIGHT_S)
        return case in self._connecting.get(case[2], ())

    async def _lost_bytes(self, stall: pb.Stall, device_id: int, peer: int) -> bool:
        """Whether the peer sent bytes that the device has not received."""
        sender = await self._link(stall, peer, device_id)  # (1)
        if sender is None or not sender.sent:
            return False
        await asyncio.sleep(IN_FLIGHT_S)
        receiver = await self._link(stall, device_id, peer)  # (2)
        return receiver is not None and receiver.received < sender.sent

    async def _link(self, stall: pb.Stall, device_id: int, peer: int) -> pb.LinkDescription | None:
        """A device's byte counts of its link to a peer; None: it does not use that generation."""
        answer = await self._coordinator.call(
            device_id, lambda device: device.Describe, pb.DescribeRequest(), DESCRIBE_S
        )
        for link in (link for task in answer.tasks if task.job_id == stall.job_id for link in task.links):
            key = link.communicator_id, link.generation, link.device_id
            if key == (stall.communicator_id, stall.generation, peer):
                return pb.LinkDescription(sent=link.sent, received=link.received)
        return None
