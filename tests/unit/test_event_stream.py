"""``Cluster.events`` when gRPC cancels the stream: no event is lost or repeated; if it always does, it raises."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from hoop.client.cluster import EVENT_STREAM_ATTEMPTS, Cluster
from hoop.errors import PeerLost
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc
from hoop.wire.roles import Role

EVENTS = 5


class CancellingCoordinator(pb_grpc.CoordinatorServicer):
    """Has five events. Cancels each of the first ``cancels`` streams after ``before`` of its events."""

    def __init__(self, cancels: int, before: int) -> None:
        self._cancels, self._before = cancels, before
        self.asked: list[int] = []

    def WatchEvents(self, request: Any, context: Any) -> Iterator[Any]:
        self.asked.append(request.after)
        for number, sequence in enumerate(range(request.after + 1, EVENTS + 1)):
            if len(self.asked) <= self._cancels and number == self._before:
                context.cancel()
                return
            yield pb.Event(sequence=sequence, kind="device_joined")


def sequences(coordinator: CancellingCoordinator) -> list[int]:
    server = grpc.server(ThreadPoolExecutor(2))
    pb_grpc.add_CoordinatorServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    cluster = Cluster(Address("127.0.0.1", port), 60.0, Credentials(Role.CLIENT))
    try:
        return [event.sequence for event in cluster.events()]
    finally:
        cluster.close()
        server.stop(None)


@pytest.mark.parametrize("before", [0, 2])
def test_a_cancelled_stream_goes_on_after_its_last_event(before: int) -> None:
    coordinator = CancellingCoordinator(cancels=2, before=before)  # type: ignore[abstract]  # one call is enough
    assert sequences(coordinator) == [1, 2, 3, 4, 5]
    assert coordinator.asked == [0, before, 2 * before]


def test_a_stream_that_is_always_cancelled_raises() -> None:
    coordinator = CancellingCoordinator(cancels=1000, before=0)  # type: ignore[abstract]  # one call is enough
    with pytest.raises(PeerLost, match="CANCELLED"):
        sequences(coordinator)
    assert len(coordinator.asked) == EVENT_STREAM_ATTEMPTS + 1
