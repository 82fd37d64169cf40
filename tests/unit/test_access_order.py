"""AccessOrder: two accesses that share a byte, at least one of them a write, run in the order of acceptance."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hoop.errors import DeadlineExceeded
from hoop.servers.access_order import Access, AccessOrder, MemoryFootprint, MemoryRange

ranges = st.builds(
    lambda device, start, size, writes: MemoryRange(device, start, start + size, writes),
    st.integers(1, 2),
    st.integers(0, 12),
    st.integers(0, 4),
    st.booleans(),
)


@given(st.lists(ranges, max_size=6), st.lists(ranges, max_size=6))
def test_footprints_conflict_if_they_share_a_written_byte(one: list[MemoryRange], other: list[MemoryRange]) -> None:
    def touched(accessed: list[MemoryRange], writes: bool) -> set[tuple[int, int]]:
        selected = [one for one in accessed if one.writes or not writes]
        return {(one.device_id, at) for one in selected for at in range(one.start, one.stop)}

    expected = touched(one, True) & touched(other, False) or touched(one, False) & touched(other, True)
    assert MemoryFootprint(one).conflicts(MemoryFootprint(other)) == bool(expected)
    assert MemoryFootprint(other).conflicts(MemoryFootprint(one)) == bool(expected)


@pytest.mark.parametrize(
    ("other", "conflict"),
    [
        (MemoryRange(1, 0, 8, True, "x"), True),
        (MemoryRange(1, 8, 16, True, "x"), False),
        (MemoryRange(1, 0, 8, True, "y"), False),
        (MemoryRange(2, 0, 8, True, "x"), False),
        (MemoryRange(1, 9999, 10000, True), True),
        (MemoryRange(2, 9999, 10000, True), False),
    ],
)
def test_named_buffers(other: MemoryRange, conflict: bool) -> None:
    """Ranges of one buffer conflict by offset, of two buffers never; an address may be in any buffer."""
    assert MemoryFootprint([MemoryRange(1, 0, 8, False, "x")]).conflicts(MemoryFootprint([other])) == conflict


def write(order: AccessOrder, name: str, start: int, stop: int) -> Access:
    return order.accept(name, [MemoryRange(1, start, stop, True)])


def test_conflicting_accesses_run_in_the_order_of_acceptance() -> None:
    async def run() -> list[str]:
        order, done = AccessOrder(), []
        accesses = [write(order, name, start, stop) for name, start, stop in writes]

        async def take(access: Access) -> None:
            await access.wait_turn(20)
            done.append(access.description)
            await asyncio.sleep(0)  # the others could go on meanwhile
            order.end(access)

        await asyncio.gather(*(take(one) for one in reversed(accesses)))
        assert not len(order)
        return done

    writes = [("a", 0, 8), ("b", 4, 12), ("c", 10, 14), ("d", 100, 108), ("e", 0, 200)]
    done = asyncio.run(run())
    assert set(done) == set("abcde")
    assert [one for one in done if one in "abce"] == list("abce")
    assert done.index("d") < done.index("e")


def test_a_timeout_names_the_access_waited_for() -> None:
    async def run() -> None:
        order = AccessOrder()
        first = write(order, "the first", 0, 8)
        second = write(order, "the second", 0, 8)
        with pytest.raises(DeadlineExceeded, match=r"the second waited .* s for the first"):
            await second.wait_turn(0.01)
        third = write(order, "the third", 0, 8)
        order.end(second)
        order.end(first)
        await third.wait_turn(0)

    asyncio.run(run())


def test_an_access_that_never_ends_expires() -> None:
    async def run() -> None:
        order = AccessOrder()
        order.accept("announced", [MemoryRange(1, 0, 8, True)], time.monotonic() + 0.01)
        waiting = order.wait_only("Read", [MemoryRange(1, 0, 8, False)])
        with pytest.raises(DeadlineExceeded, match=r"Read waited .* for announced"):
            await waiting.wait_turn(60)
        await order.wait_only("Read", [MemoryRange(1, 0, 8, False)]).wait_turn(0)
        assert not len(order)

    asyncio.run(run())


def test_an_access_with_its_own_timeout_limits_the_wait_and_keeps_its_place() -> None:
    """A launch that outlives its timeout still writes: later accesses must not overtake it."""

    async def run() -> None:
        order = AccessOrder()
        running = write(order, "a launch", 0, 8)
        running.max_wait_s = 0.01
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match=r"Read waited .* for a launch"):
                await order.wait_only("Read", [MemoryRange(1, 0, 8, False)]).wait_turn(60)
        order.end(running)
        await order.wait_only("Read", [MemoryRange(1, 0, 8, False)]).wait_turn(0)

    asyncio.run(run())


def test_reads_do_not_wait_for_each_other_and_a_cancelled_access_is_removed() -> None:
    async def run() -> None:
        order = AccessOrder()
        reads = [order.accept("read", [MemoryRange(1, 0, 8, False)]) for _ in range(3)]
        for one in reads:
            await one.wait_turn(0)
        pending_write = write(order, "write", 0, 8)

        async def enter() -> None:
            async with order.in_turn("cancelled", [MemoryRange(1, 0, 8, True)], 60):
                raise AssertionError("it is not its turn")

        task = asyncio.ensure_future(enter())
        await asyncio.sleep(0)  # the task runs until it waits for its turn
        assert len(order) == len([*reads, pending_write, task])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for one in reads:
            order.end(one)
        await pending_write.wait_turn(0)
        order.end(pending_write)
        assert not len(order)

    asyncio.run(run())
