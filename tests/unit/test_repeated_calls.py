"""Calls that are made again with the same id: each is done once, and every arrival gets its answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest

from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.repeated_calls import MAX_KEPT, AnswersOnce, make_repeatable

METHOD = "hoop.v1.Coordinator.Run"


class Service:
    """Counts how often each request is done."""

    def __init__(self) -> None:
        self.answers, self.done = AnswersOnce(), Counter[int]()
        self.may_end = asyncio.Event()

    async def run(self, request: pb.RunRequest) -> pb.RunResponse:
        self.done[request.communicator_id] += 1
        await self.may_end.wait()
        if not request.communicator_id:
            raise FailedPrecondition("communicator 0 is broken")
        return pb.RunResponse(reports=[pb.OperationReport(messages_sent=request.communicator_id)])

    def arrive(self, communicator: int, call_id: str = "", method: str = METHOD) -> Coroutine[Any, Any, Any]:
        return self.answers.answer(method, pb.RunRequest(communicator_id=communicator, call_id=call_id), self.run)


def test_a_call_that_arrives_again_while_it_runs_or_afterwards_is_done_once() -> None:
    async def calls() -> tuple[list[int], Counter[int]]:
        service = Service()
        first, again = (asyncio.ensure_future(service.arrive(7, "a")) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()  # its connection broke
        service.may_end.set()
        answers = [await again, await service.arrive(7, "a"), await service.arrive(8, "b")]
        return [one.reports[0].messages_sent for one in answers], service.done

    answers, done = asyncio.run(calls())
    assert answers == [7, 7, 8]
    assert done == {7: 1, 8: 1}


def test_a_call_that_failed_fails_again_with_the_same_error() -> None:
    async def calls() -> Counter[int]:
        service = Service()
        service.may_end.set()
        for _ in range(2):
            with pytest.raises(FailedPrecondition, match="communicator 0 is broken"):
                await service.arrive(0, "a")
        return service.done

    assert asyncio.run(calls()) == {0: 1}


def test_calls_without_an_id_or_of_another_method_are_other_calls() -> None:
    async def calls() -> Counter[int]:
        service = Service()
        service.may_end.set()
        for call_id, method in (("", METHOD), ("", METHOD), ("a", METHOD), ("a", "hoop.v1.Device.Launch")):
            await service.arrive(7, call_id, method)
        return service.done

    assert asyncio.run(calls()) == {7: 4}


def test_a_server_keeps_a_bounded_number_of_answers_and_every_call_that_runs() -> None:
    async def calls() -> tuple[int, Counter[int]]:
        service = Service()
        running = asyncio.ensure_future(service.arrive(1, "runs"))
        await asyncio.sleep(0)

        async def at_once(_: object) -> None:
            return None

        for number in range(3 * MAX_KEPT):
            await service.answers.answer(METHOD, pb.RunRequest(call_id=str(number)), at_once)
        service.may_end.set()
        await service.arrive(1, "runs")
        await running
        return len(service.answers._calls), service.done

    kept, done = asyncio.run(calls())
    assert kept <= MAX_KEPT
    assert done == {1: 1}


def test_an_id_is_limited() -> None:
    with pytest.raises(InvalidArgument, match="call_id: 65 characters; at most 64"):
        asyncio.run(Service().arrive(1, "x" * 65))


def test_requests_that_must_not_be_done_twice_get_an_id() -> None:
    request = pb.RunRequest()
    assert make_repeatable(request)
    first = request.call_id
    assert first
    assert make_repeatable(request)
    assert request.call_id == first, "the call is made again with the same id"
    assert make_repeatable(pb.GetStatusRequest())
    assert not make_repeatable(pb.ReassignTaskRequest()), "it has no id, and may have an effect"
