"""A coordinator runs a bounded number of jobs at a time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hoop.errors import FailedPrecondition, ResourceExhausted
from hoop.membership.state import State
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.jobs import Jobs


class Operations:
    """Creating a communicator waits until ``may_create`` is set, then fails."""

    def __init__(self) -> None:
        self.may_create = asyncio.Event()
        self.waiting = asyncio.Semaphore(0)

    async def create(self, *_: object) -> None:
        self.waiting.release()
        await self.may_create.wait()
        raise FailedPrecondition("no device")


class Checked:
    """All devices were checked when they joined."""

    async def settle(self, _: object) -> None:
        pass


async def start_three() -> tuple[list[Any], Any]:
    operations = Operations()
    coordinator: Any = SimpleNamespace(config=CoordinatorConfig(max_jobs=2), state=State())
    jobs = Jobs(coordinator, operations, Checked())  # type: ignore[arg-type]
    starting = [asyncio.ensure_future(jobs.start("{}", (), "")) for _ in range(2)]
    for _ in starting:
        await operations.waiting.acquire()
    with pytest.raises(ResourceExhausted, match=r"^2 jobs run here, the limit; .* --max-jobs$"):
        await jobs.start("{}", (), "")
    operations.may_create.set()
    failed = await asyncio.gather(*starting, return_exceptions=True)
    # Jobs that could not be started do not count.
    again = await asyncio.gather(jobs.start("{}", (), ""), return_exceptions=True)
    return failed, again[0]


def test_a_job_above_the_limit_is_refused_with_the_option_that_raises_it() -> None:
    failed, again = asyncio.run(start_three())
    assert all(isinstance(one, FailedPrecondition) for one in [*failed, again])
