"""The coordinator's calls of devices while the disk of its journal is full."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from hoop.errors import PeerLost, ResourceExhausted
from hoop.membership import events as m
from hoop.membership.journal import Entry
from hoop.servers.coordinator import Coordinator, CoordinatorConfig
from hoop.wire.generated import hoop_pb2 as pb

sys.path.append(str(Path(__file__).parent / "membership"))
from roster import device

CALLS = 6
"""Enough failed ones to declare a device dead, which is journaled."""


class FullJournal:
    refusals = 0

    def append(self, *entries: Entry) -> None:
        self.refusals += 1
        raise ResourceExhausted("journal: cannot write: the disk is full; make room")

    def close(self) -> None:
        """It holds nothing."""


def test_a_call_of_a_lost_device_says_so() -> None:
    """It once raised the error of the journal: a job that invited the device refused it for good."""

    async def scenario() -> None:
        coordinator, journal = Coordinator(CoordinatorConfig()), FullJournal()
        coordinator.apply(m.Joined(device(1), time.monotonic()))
        coordinator.apply(m.Heartbeat(1, "a", time.monotonic()))
        made: Any = journal
        coordinator._journal = made

        async def fail(request: pb.DescribeRequest, timeout: float) -> pb.DescribeResponse:
            metadata = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, metadata, metadata, "connection refused", None)

        method: Any = fail
        for _ in range(CALLS):
            with pytest.raises(PeerLost, match=r"was lost during Describe: connection refused"):
                await coordinator.call(1, lambda _: method, pb.DescribeRequest(), 1.0)
        assert journal.refusals, "the loss could not be written down"
        await coordinator.stop()

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
