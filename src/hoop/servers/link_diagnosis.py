"""Link diagnosis: a device waits for a peer and receives no byte. Is the peer busy, or did the link lose data?

device R ── heartbeat: waits for P ──▶ coordinator ── Describe ──▶ P     (1) how many bytes P sent on its link to R
                                       coordinator ── Describe ──▶ R     (2) a little later: R has received fewer
                                       membership: R complains of P      (3) ``state_machine`` decides what follows
"""

from __future__ import annotations

import asyncio
import time

from hoop.errors import HoopError
from hoop.membership import events as m
from hoop.servers.coordinator import Coordinator
from hoop.wire.generated import hoop_pb2 as pb

IN_FLIGHT = 1 / 6
"""Fraction of a lease: how long sent bytes may be in flight."""
DESCRIBE_S = 5.0


class LinkDiagnosis:
    """Checks the stalls that devices report in their heartbeats."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._open: set[tuple[int, int, int, int]] = set()
        """Stalls under diagnosis: communicator, generation, waiting device, peer."""

    def on_heartbeat(self, heartbeat: pb.Heartbeat) -> None:
        """Starts a diagnosis for every reported stall that is current and has none yet."""
        for stall in heartbeat.stalls:
            for peer in stall.device_ids:
                case = (stall.communicator_id, stall.generation, heartbeat.device_id, peer)
                if case not in self._open and self._current(stall, heartbeat.device_id, peer):
                    self._open.add(case)
                    self._coordinator.in_background(self._diagnose(case, stall))

    def _current(self, stall: pb.Stall, device_id: int, peer: int) -> bool:
        one = self._coordinator.state.communicators.get(stall.job_id)
        return one is not None and one.generation == stall.generation and {device_id, peer} <= set(one.members)

    async def _diagnose(self, case: tuple[int, int, int, int], stall: pb.Stall) -> None:
        _, _, device_id, peer = case
        try:
            if stall.connecting or await self._lost_bytes(stall, device_id, peer):
                self._coordinator.apply(
                    m.Complained(
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

    async def _lost_bytes(self, stall: pb.Stall, device_id: int, peer: int) -> bool:
        """Whether the peer sent bytes that the device has not received."""
        sender = await self._link(stall, peer, device_id)  # (1)
        if sender is None or not sender.sent:
            return False
        await asyncio.sleep(IN_FLIGHT * self._coordinator.config.detector.lease_s)
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
