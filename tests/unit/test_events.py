"""EventLog: bounded and ordered; waiting for events and subscribing to them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hoop.events import CAPACITY, MAX_PINNED, Event, EventLog

DEADLINE_S = 120.0
LONG_S = 2 * DEADLINE_S
"""Timeout of a waiter that must be woken: longer than the test waits for its threads."""


def in_threads(*functions: Callable[[], object]) -> None:
    """Run the functions in parallel threads until all return."""
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_events_are_numbered_and_their_fields_are_strings() -> None:
    log = EventLog()
    first = log.publish("device_joined", "device 1 joined", device=1, ok=True)
    second = log.publish("device_dead", "device 1 is dead")
    assert (first.sequence, second.sequence) == (1, 2)
    assert (first.kind, first.text, first.fields) == (
        "device_joined",
        "device 1 joined",
        {"device": "1", "ok": "True"},
    )
    assert second.fields == {}
    assert 0 < first.time <= second.time
    assert (log.after(), log.after(1), log.after(2)) == ([first, second], [second], [])
    with pytest.raises(AttributeError):
        first.text = "changed"  # type: ignore[misc]


def test_old_events_are_dropped_and_sequence_numbers_continue() -> None:
    log = EventLog(capacity=3)
    for number in range(1, 6):
        log.publish("count", str(number))
    assert [event.sequence for event in log.after()] == [3, 4, 5]
    assert [event.sequence for event in log.after(4)] == [5]
    assert log.wait_for(lambda event: event.text == "1", timeout=0) is None
    by_default = EventLog()
    for _ in range(CAPACITY + 1):
        by_default.publish("count", "")
    assert len(by_default.after()) == CAPACITY
    assert by_default.after()[0].sequence == 2


def test_a_log_is_bounded_in_bytes() -> None:
    """10,000 events of 8 KiB in each of several fields would be hundreds of megabytes."""
    log = EventLog(max_log_bytes=100_000)
    for number in range(1000):
        log.publish("failing", "x" * 1000, reason="y" * 1000, number=number)
    kept = log.after()
    assert 1 < len(kept) < 50
    assert kept[-1].sequence == 1000
    assert [event.sequence for event in kept] == list(range(kept[0].sequence, 1001))
    log.publish("failing", "z" * 200_000)
    assert [event.sequence for event in log.after()] == [1001], "the newest event stays, however large"


def test_pinned_events_outlive_others_and_are_bounded_too() -> None:
    log = EventLog(capacity=2, pinned=["started"])
    for kind in ("started", "other", "other", "other"):
        log.publish(kind, "")
    assert [event.sequence for event in log.after()] == [1, 3, 4]
    for _ in range(MAX_PINNED + 10):
        log.publish("started", "")
    sequences = [event.sequence for event in log.after()]
    assert (sequences[0], sequences[-1], len(sequences)) == (1, MAX_PINNED + 14, MAX_PINNED + 2)


def test_wait_for_returns_a_past_event_at_once() -> None:
    log = EventLog()
    first = log.publish("kind", "one")
    log.publish("kind", "two")
    assert log.wait_for(lambda event: event.kind == "kind", timeout=0) is first


@pytest.mark.parametrize("timeout", [0.0, 0.001, -1.0])
def test_wait_for_returns_none_on_timeout(timeout: float) -> None:
    log = EventLog()
    log.publish("other", "")
    assert log.wait_for(lambda event: event.kind == "kind", timeout) is None


def test_wait_for_returns_when_the_event_is_published() -> None:
    log, waiting = EventLog(), threading.Event()
    found: list[Event | None] = []

    def match(event: Event) -> bool:
        waiting.set()
        return event.kind == "wanted"

    def publish() -> None:
        assert waiting.wait(DEADLINE_S)
        log.publish("unwanted", "")
        log.publish("wanted", "here")

    log.publish("unwanted", "so that there is something to look at")
    in_threads(lambda: found.append(log.wait_for(match, LONG_S)), publish)
    assert [event and event.text for event in found] == ["here"]


def test_publishing_wakes_all_waiters() -> None:
    log, waiting = EventLog(), threading.Semaphore(0)
    found: list[Event | None] = []

    def match(event: Event) -> bool:
        waiting.release()
        return event.kind == "wanted"

    def publish() -> None:
        assert all(waiting.acquire(timeout=DEADLINE_S) for _ in range(5))
        log.publish("wanted", "here")

    log.publish("unwanted", "so that there is something to look at")
    in_threads(*[lambda: found.append(log.wait_for(match, LONG_S))] * 5, publish)
    assert [event and event.text for event in found] == ["here"] * 5


def test_listeners_receive_events_until_they_unsubscribe() -> None:
    log = EventLog()
    log.publish("kind", "before")
    one: list[tuple[str, int]] = []
    two: list[str] = []
    unsubscribe_one = log.subscribe(lambda event: one.append((event.text, threading.get_ident())))
    unsubscribe_two = log.subscribe(lambda event: two.append(event.text))
    log.publish("kind", "first")
    unsubscribe_one()
    log.publish("kind", "second")
    unsubscribe_two()
    log.publish("kind", "third")
    assert one == [("first", threading.get_ident())], "on the publishing thread"
    assert two == ["first", "second"]


def test_unsubscribing_twice_removes_one_subscription() -> None:
    log = EventLog()
    received: list[Event] = []
    unsubscribe = log.subscribe(received.append)
    log.subscribe(received.append)
    unsubscribe()
    unsubscribe()
    event = log.publish("kind", "")
    assert received == [event], "the other subscription of the same listener remains"


def test_a_listener_may_use_the_log() -> None:
    log = EventLog()
    received: list[list[str]] = []

    def once(event: Event) -> None:
        unsubscribe()
        received.append([known.text for known in log.after()])
        log.publish("kind", "answer")

    unsubscribe = log.subscribe(once)
    log.publish("kind", "question")
    assert received == [["question"]]
    assert [event.text for event in log.after()] == ["question", "answer"]


def test_a_listener_subscribed_twice_receives_twice_and_unsubscribes_one_by_one() -> None:
    log = EventLog()
    received: list[Event] = []
    unsubscribe_first, unsubscribe_second = log.subscribe(received.append), log.subscribe(received.append)
    log.publish("kind", "")
    unsubscribe_first()
    log.publish("kind", "")
    unsubscribe_second()
    log.publish("kind", "")
    assert [event.sequence for event in received] == [1, 1, 2]


def test_threads_share_one_log() -> None:
    log, start = EventLog(capacity=500), threading.Barrier(6)
    received: list[int] = []
    published: list[list[int]] = [[] for _ in range(4)]

    def publish(numbers: list[int]) -> None:
        start.wait(DEADLINE_S)
        numbers += [log.publish("count", "").sequence for _ in range(250)]

    def subscribe_and_unsubscribe() -> None:
        start.wait(DEADLINE_S)
        for _ in range(100):
            log.subscribe(lambda event: None)()

    def read() -> None:
        start.wait(DEADLINE_S)
        for _ in range(20):
            numbers = [event.sequence for event in log.after()]
            assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True

    unsubscribe = log.subscribe(lambda event: received.append(event.sequence))
    in_threads(*(lambda numbers=numbers: publish(numbers) for numbers in published), subscribe_and_unsubscribe, read)
    unsubscribe()
    assert all(numbers == sorted(numbers) for numbers in published)
    assert sorted(number for numbers in published for number in numbers) == sorted(received) == list(range(1, 1001))
    assert [event.sequence for event in log.after()] == list(range(501, 1001))


def test_a_listener_that_fails_is_reported_once_and_stops_nothing() -> None:
    texts: list[str] = []
    seen: list[str] = []

    def report(text: str) -> None:
        texts.append(text)
        log.publish("listener_failed", text)

    log = EventLog(on_listener_error=report)

    def broken(event: Event) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    log.subscribe(broken)
    unsubscribe = log.subscribe(broken)
    log.subscribe(lambda event: seen.append(event.kind))
    for _ in range(3):
        log.publish("count", "")
    assert len(texts) == 2
    assert texts[0].endswith("broken failed: BrokenPipeError: [Errno 32] Broken pipe")
    assert sorted(seen) == ["count"] * 3 + ["listener_failed"] * 2
    assert [event.kind for event in log.after()][:1] == ["count"]
    unsubscribe()
