"""Is it the link? Somebody waits for another, and no byte comes: it may be busy, or what it sent was lost.

device R ── heartbeat: waits for P ──▶ coordinator ── Describe ──▶ P     (1) so many bytes its link to R has taken
                                       coordinator ── Describe ──▶ R     (2) a little later: fewer have come out of it
                                       membership: R complains of P      (3) what becomes of it is decided there
"""

from __future__ import annotations

import asyncio
import time

from hoop.errors import HoopError
from hoop.membership import events as m
from hoop.servers.coordinator import Coordinator
from hoop.wire.generated import hoop_pb2 as pb

ON_THE_WAY = 1 / 6
"""Of a lease: how long bytes that a link has taken may be on their way."""
ASK_S = 5.0


class LinkDiagnosis:
    """Looks into what devices say of each other in their heartbeats."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._open: set[tuple[int, int, int, int]] = set()

    def hear(self, beat: pb.Heartbeat) -> None:
        for stall in beat.stalls:
            for peer in stall.device_ids:
                case = (stall.communicator_id, stall.generation, beat.device_id, peer)
                if case not in self._open and self._current(stall, beat.device_id, peer):
                    self._open.add(case)
                    self._coordinator.in_background(self._look_into(case, stall))

    def _current(self, stall: pb.Stall, device_id: int, peer: int) -> bool:
        one = self._coordinator.state.communicators.get(stall.job_id)
        return (
            one is not None and one.generation == stall.generation and {device_id, peer} <= set(one.members)
        )

    async def _look_into(self, case: tuple[int, int, int, int], stall: pb.Stall) -> None:
        _, _, device_id, peer = case
        try:
            if stall.connecting or await self._lost(stall, device_id, peer):
                place = stall.job_id, stall.generation, device_id, peer
                self._coordinator.apply(m.Complained(*place, time.monotonic()))  # (3)
        except HoopError:
            return  # one of them cannot be asked: the detector's business
        finally:
            self._open.discard(case)

    async def _lost(self, stall: pb.Stall, device_id: int, peer: int) -> bool:
        there = await self._link(stall, peer, device_id)  # (1)
        if there is None or not there.sent:
            return False
        await asyncio.sleep(ON_THE_WAY * self._coordinator.config.detector.lease_s)
        here = await self._link(stall, device_id, peer)  # (2)
        return here is not None and here.received < there.sent

    async def _link(self, stall: pb.Stall, device_id: int, peer: int) -> pb.LinkDescription | None:
        """What a device says of its link to another; None: it is not in that seat."""
        answer = await self._coordinator.call(device_id, "Describe", pb.DescribeRequest(), ASK_S)
        for link in (link for task in answer.tasks if task.job_id == stall.job_id for link in task.links):
            place = link.communicator_id, link.generation, link.device_id
            if place == (stall.communicator_id, stall.generation, peer):
                return pb.LinkDescription(sent=link.sent, received=link.received)
        return None
