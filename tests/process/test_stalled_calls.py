"""Calls that stop in the middle of a large request do not fill the memory of a server."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from lab_in_process import lab_servers
from stalled_calls import stalled_calls

import hoop
from hoop.errors import DeadlineExceeded
from hoop.topology import Address
from hoop.wire.service import MAX_RECEIVING, Receiving

ANNOUNCED = 8 << 20
WAIT_S = 240.0
UNREAD = 128 << 10
"""Above what flow control lets come of a request before it is read."""
CALLS = 3 * MAX_RECEIVING


def test_few_of_many_stalled_requests_are_in_memory_and_other_calls_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Receiving.__init__, "__defaults__", (MAX_RECEIVING, 0.5, 60.0))
    with lab_servers(0) as servers:
        address = Address.parse(servers.address)
        with stalled_calls(address, "/hoop.v1.Coordinator/GetStatus", ANNOUNCED, CALLS) as calls:
            # Those that the server does not read go on until one is read: on a busy machine that may take seconds.
            deadline = time.monotonic() + WAIT_S

            def none_is_read() -> bool:
                return max(call.sent for call in calls) <= UNREAD and time.monotonic() < deadline

            threads = [threading.Thread(target=call.send, args=(ANNOUNCED - 1000, none_is_read)) for call in calls]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            most = MAX_RECEIVING * ANNOUNCED + CALLS * UNREAD
            # The server has dropped the others, which they learn.
            while (held := sum(call.sent for call in calls if not call.wait_ended(0.1))) > most:
                assert time.monotonic() < deadline, f"{held} bytes are held"
            assert max(call.sent for call in calls) > UNREAD, "some were read"
            with hoop.connect(servers.address) as cluster:  # it makes the stalled ones hurry
                assert cluster.status().address == servers.address


def test_a_request_that_stalls_makes_room_for_one_that_waits() -> None:
    async def scenario() -> None:
        bounded = Receiving(most=1, hurried_s=0.0)
        began = asyncio.Event()

        async def never() -> bytes:
            began.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def at_once() -> bytes:
            return b"request"

        # Several: one that waited and then stalls itself makes room too.
        stalled = [asyncio.ensure_future(bounded.receive("Memcpy", never)) for _ in range(3)]
        await began.wait()
        assert bounded.count == 1
        assert await bounded.receive("GetStatus", at_once) == b"request"
        for one in stalled:
            with pytest.raises(DeadlineExceeded, match=r"^Memcpy: the request did not arrive within .* others wait"):
                await one
        assert bounded.count == 0

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_a_slow_request_may_take_its_time_while_none_waits() -> None:
    async def scenario() -> None:
        bounded, begun, go_on = Receiving(most=2, hurried_s=0.0), asyncio.Semaphore(0), asyncio.Event()

        async def slow() -> bool:
            begun.release()
            return await go_on.wait()

        both = [asyncio.ensure_future(bounded.receive("Memcpy", slow)) for _ in range(2)]
        for _ in both:
            await begun.acquire()
        assert bounded.count == 2
        go_on.set()
        assert await asyncio.gather(*both) == [True, True]

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))


def test_a_request_that_never_arrives_ends() -> None:
    async def scenario() -> None:
        with pytest.raises(DeadlineExceeded, match=r"^StartJob: the request did not arrive within [\d.]+ s; send it"):
            await Receiving(receive_s=0.0).receive("StartJob", asyncio.Event().wait)

    asyncio.run(asyncio.wait_for(scenario(), WAIT_S))
