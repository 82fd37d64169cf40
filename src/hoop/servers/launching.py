"""One launch: every member runs the same operations, and all succeed or the failure is named.

coordinator ── Launch ──▶ each member      (1) its rank and who the others are are in it
             device ◀── chunks ──▶ device      by themselves
coordinator ◀── report ── each member      (2) all answered, or the first failure aborts the rest
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hoop.errors import DeadlineExceeded, HoopError, LinkCorrupted, PeerLost, UserError
from hoop.membership import messages as m
from hoop.membership.state import CommunicatorState
from hoop.servers.coordinator import Coordinator
from hoop.servers.work import Work
from hoop.wire.convert import describe
from hoop.wire.generated import hoop_pb2 as pb

GRACE_S = 1.0
"""How long members may take to come back after an abort."""


def seat(coordinator: Coordinator, one: CommunicatorState, rank: int) -> pb.Seat:
    """A rank's place among the others."""
    members = [describe(coordinator.state.member(device_id).info) for device_id in one.members]
    return pb.Seat(communicator_id=one.id, generation=one.generation, rank=rank, members=members)


async def launch(
    coordinator: Coordinator,
    one: CommunicatorState,
    works: Sequence[Work],
    timeout: float,
    round_index: int | None = None,
    release: bool = False,
    reservation_id: int = 0,
) -> list[pb.OperationReport]:
    """Runs the works as one launch; ``round_index`` runs that round of their plans alone.

    ``reservation_id``: these works are all that was reserved under it; each device ends it with its launch.
    """

    def request(rank: int) -> pb.LaunchRequest:
        operations = [
            pb.LaunchOperation(operation=work.message, operand=work.operands.get(rank), round=round_index)
            for work in works
        ]
        place = seat(coordinator, one, rank)
        return pb.LaunchRequest(
            seat=place,
            operations=operations,
            timeout_s=timeout,
            release=release,
            reservation_id=reservation_id,
        )

    stopped = coordinator.stops.setdefault((one.id, one.generation), asyncio.Event())
    stop = asyncio.ensure_future(stopped.wait())
    calls = [
        asyncio.ensure_future(coordinator.call(device_id, "Launch", request(rank), timeout + 2 * GRACE_S))
        for rank, device_id in enumerate(one.members)
    ]  # (1)
    try:
        pending: set[asyncio.Future[Any]] = {*calls, stop}
        while not stop.done() and not _failures(calls) and not all(call.done() for call in calls):
            _, pending = await asyncio.wait(pending, return_when="FIRST_COMPLETED")
        if not all(call.done() for call in calls):  # (2)
            reason = str(_worst(coordinator, one, calls))
            await coordinator.abort(m.Stop(one.id, one.generation, reason, one.members))
            usable = {device_id: coordinator.state.member(device_id).usable for device_id in one.members}
            alive = [call for device_id, call in zip(one.members, calls, strict=True) if usable[device_id]]
            if alive:  # the dead do not come back
                await asyncio.wait(alive, timeout=GRACE_S)
        if stop.done() or _failures(calls):
            raise _worst(coordinator, one, calls)
    finally:
        for task in (*calls, stop):
            task.cancel()
        await asyncio.gather(*calls, stop, return_exceptions=True)
        coordinator.stops.pop((one.id, one.generation), None)
    answers = [call.result() for call in calls]
    for device_id, answer in zip(one.members, answers, strict=True):
        if len(answer.reports) != len(works):
            raise PeerLost(f"device {device_id} reports {len(answer.reports)} operations of {len(works)}")
    return [_summary([answer.reports[index] for answer in answers]) for index in range(len(works))]


def _failures(calls: Sequence[asyncio.Future[pb.LaunchResponse]]) -> list[BaseException]:
    done = [call for call in calls if call.done() and not call.cancelled()]
    return [error for call in done if (error := call.exception()) is not None]


def _worst(
    coordinator: Coordinator, one: CommunicatorState, calls: Sequence[asyncio.Future[pb.LaunchResponse]]
) -> BaseException:
    """The failure that explains the others: a device's death or mistake before its neighbours' complaints."""
    current = coordinator.state.communicators.get(one.id)
    if current is not None and current.broken_by and current.generation == one.generation:
        return PeerLost(current.reason)

    def weight(error: BaseException) -> int:
        if not isinstance(error, HoopError) or isinstance(error, UserError):
            return 0
        if isinstance(error, PeerLost) and " was lost during " in str(error):
            return 1
        return 2 if isinstance(error, LinkCorrupted) else 3 if isinstance(error, DeadlineExceeded) else 4

    failures = sorted(_failures(calls), key=weight)
    return failures[0] if failures else PeerLost(f"communicator {one.id} was stopped")


def _summary(reports: Sequence[pb.OperationReport]) -> pb.OperationReport:
    """The slowest rank's time, and what all of them sent."""
    return pb.OperationReport(
        seconds=max(report.seconds for report in reports),
        messages_sent=sum(report.messages_sent for report in reports),
        bytes_sent=sum(report.bytes_sent for report in reports),
        algorithm=reports[0].algorithm,
    )
