"""The two ways in which a coordinator can move the data itself: what Hoop is compared with.

``stepped``: it steps every round of the plan, as the public lab implementations do. ``relay``: it gathers every
vector, reduces here and sends the result back, as the papers' naive version does.
"""

from __future__ import annotations

import asyncio

import numpy as np

from hoop.collectives.reduction import Reduction
from hoop.membership.state import CommunicatorState
from hoop.servers.coordinator import Coordinator
from hoop.servers.copying import read, write
from hoop.servers.launching import launch
from hoop.servers.work import Work
from hoop.wire.generated import hoop_pb2 as pb


async def stepped(
    coordinator: Coordinator, one: CommunicatorState, work: Work, timeout: float
) -> pb.OperationReport:
    """A call a device a round: n · rounds calls where the devices alone need n."""
    size = len(one.members)
    rounds = len(work.operation.plan(size, 0).rounds)
    total = pb.OperationReport(algorithm=f"{work.operation.default}, stepped")
    for index in range(rounds):
        (report,) = await launch(coordinator, one, [work], timeout, round_index=index)
        total.seconds += report.seconds
        total.messages_sent += report.messages_sent
        total.bytes_sent += report.bytes_sent
    return total


async def relay(
    coordinator: Coordinator, one: CommunicatorState, work: Work, timeout: float
) -> pb.OperationReport:
    """2n messages of S, all of them through the coordinator."""
    operation = work.operation
    size = operation.count * operation.dtype.itemsize
    report = pb.OperationReport(algorithm="naive, relayed")
    if not size:
        return report
    started = asyncio.get_running_loop().time()
    operands = [work.operands[rank] for rank in range(len(one.members))]
    vectors = await asyncio.gather(
        *(
            read(coordinator, device_id, _source(operand), size, timeout)
            for device_id, operand in zip(one.members, operands, strict=True)
        )
    )
    reduction = Reduction(operation.op, operation.dtype)
    total = np.frombuffer(vectors[0], operation.dtype.numpy).copy()
    for vector in vectors[1:]:
        reduction.combine(total, np.frombuffer(vector, operation.dtype.numpy))
    reduction.finish(total, len(vectors))
    result = total.tobytes()
    await asyncio.gather(
        *(
            write(coordinator, device_id, _destination(operand), result, timeout)
            for device_id, operand in zip(one.members, operands, strict=True)
        )
    )
    report.seconds = asyncio.get_running_loop().time() - started
    report.messages_sent = 2 * len(operands)
    report.bytes_sent = 2 * len(operands) * size
    return report


def _source(operand: pb.Operand) -> pb.Location:
    return operand.source if operand.HasField("source") else operand.destination


def _destination(operand: pb.Operand) -> pb.Location:
    return operand.destination if operand.HasField("destination") else operand.source
