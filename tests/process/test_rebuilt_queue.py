"""An operation that waits while its communicator is rebuilt of other members does not run by the old ranks."""

from __future__ import annotations

import numpy as np
import pytest
from lab_in_process import Servers, lab_servers

from hoop.errors import MembershipChanged
from hoop.servers.operation_request import OperationRequest
from hoop.servers.operations import OperationQueue
from hoop.wire.generated import hoop_pb2 as pb


def request(servers: Servers, ranks: int) -> OperationRequest:
    """A sum in place, at another address for each rank."""
    operation = pb.Operation(collective="all_reduce", dtype="float64", op="sum", count=1)
    first = servers.info(0).min_address
    places = {rank: pb.Operand(source=pb.Location(address=first + 8 * rank)) for rank in range(ranks)}
    return OperationRequest(operation, places)


def test_an_operation_that_was_queued_before_a_rebuild_is_refused_after_it() -> None:
    with lab_servers(3) as servers:
        operations: OperationQueue = servers.coordinator._jobs._operations
        first = servers.info(0).min_address
        for device in servers.devices:
            device._arena.write(first, np.arange(1.0, 4.0).tobytes())

        async def scenario() -> None:
            one = await operations.create([1, 2, 3])
            async with operations._locks[one.id]:  # an operation before it runs
                queued = operations.enqueue(one.id, [request(servers, 3)])
                await operations.rebuild(one.id, leaving=[1])
                assert not queued.done()
            with pytest.raises(MembershipChanged, match=r"rebuilt of devices \[2, 3\] while all_reduce.* waited"):
                await queued
            # An operation for the new ranks runs: the first of them is device 2.
            await operations.run(one.id, [request(servers, 2)])

        servers.call(scenario())
        for rank, device in enumerate(servers.devices[1:]):
            found = np.frombuffer(device._arena.read(first, 24), "float64")
            expected = np.arange(1.0, 4.0)
            expected[rank] = 1.0 + 2.0
            np.testing.assert_array_equal(found, expected)
