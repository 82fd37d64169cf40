"""The log of events: bounded, ordered, waited on, listened to."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from hoop.events import CAPACITY, Event, EventLog

DEADLINE_S = 10.0
LONG_S = 2 * DEADLINE_S
"""Whoever waits so long was not woken: the test has failed by then."""


def in_threads(*works: Callable[[], object]) -> None:
    """Run these side by side to the end."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def test_events_are_numbered_and_their_fields_are_texts() -> None:
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


def test_old_events_fall_out_and_the_numbers_show_it() -> None:
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


def test_what_is_held_is_not_waited_for() -> None:
    log = EventLog()
    first = log.publish("kind", "one")
    log.publish("kind", "two")
    assert log.wait_for(lambda event: event.kind == "kind", timeout=0) is first


@pytest.mark.parametrize("timeout", [0.0, 0.001, -1.0])
def test_what_does_not_come_is_none(timeout: float) -> None:
    log = EventLog()
    log.publish("other", "")
    assert log.wait_for(lambda event: event.kind == "kind", timeout) is None


def test_waiting_ends_with_the_event() -> None:
    log, looking = EventLog(), threading.Event()
    found: list[Event | None] = []

    def match(event: Event) -> bool:
        looking.set()
        return event.kind == "wanted"

    def publish() -> None:
        assert looking.wait(DEADLINE_S)
        log.publish("unwanted", "")
        log.publish("wanted", "here")

    log.publish("unwanted", "so that there is something to look at")
    in_threads(lambda: found.append(log.wait_for(match, LONG_S)), publish)
    assert [event and event.text for event in found] == ["here"]


def test_all_who_wait_are_woken() -> None:
    log, looking = EventLog(), threading.Semaphore(0)
    found: list[Event | None] = []

    def match(event: Event) -> bool:
        looking.release()
        return event.kind == "wanted"

    def publish() -> None:
        assert all(looking.acquire(timeout=DEADLINE_S) for _ in range(5))
        log.publish("wanted", "here")

    log.publish("unwanted", "so that there is something to look at")
    in_threads(*[lambda: found.append(log.wait_for(match, LONG_S))] * 5, publish)
    assert [event and event.text for event in found] == ["here"] * 5


def test_listeners_hear_what_comes_until_they_leave() -> None:
    log = EventLog()
    log.publish("kind", "before")
    one: list[tuple[str, int]] = []
    two: list[str] = []
    leave = log.subscribe(lambda event: one.append((event.text, threading.get_ident())))
    stay = log.subscribe(lambda event: two.append(event.text))
    log.publish("kind", "first")
    leave()
    log.publish("kind", "second")
    stay()
    log.publish("kind", "third")
    assert one == [("first", threading.get_ident())], "on the publishing thread"
    assert two == ["first", "second"]


def test_to_leave_twice_is_to_leave_once() -> None:
    log = EventLog()
    heard: list[Event] = []
    leave = log.subscribe(heard.append)
    log.subscribe(heard.append)
    leave()
    leave()
    event = log.publish("kind", "")
    assert heard == [event], "the other is still there, though it is the same listener"


def test_a_listener_may_use_the_log() -> None:
    log = EventLog()
    heard: list[list[str]] = []

    def once(event: Event) -> None:
        leave()
        heard.append([known.text for known in log.after()])
        log.publish("kind", "answer")

    leave = log.subscribe(once)
    log.publish("kind", "question")
    assert heard == [["question"]]
    assert [event.text for event in log.after()] == ["question", "answer"]


def test_the_same_listener_twice_hears_twice_and_leaves_one_by_one() -> None:
    log = EventLog()
    heard: list[Event] = []
    leave, leave_too = log.subscribe(heard.append), log.subscribe(heard.append)
    log.publish("kind", "")
    leave()
    log.publish("kind", "")
    leave_too()
    log.publish("kind", "")
    assert [event.sequence for event in heard] == [1, 1, 2]


def test_threads_share_one_log() -> None:
    log, start = EventLog(capacity=500), threading.Barrier(6)
    heard: list[int] = []
    published: list[list[int]] = [[] for _ in range(4)]

    def publish(numbers: list[int]) -> None:
        start.wait(DEADLINE_S)
        numbers += [log.publish("count", "").sequence for _ in range(250)]

    def come_and_go() -> None:
        start.wait(DEADLINE_S)
        for _ in range(100):
            log.subscribe(lambda event: None)()

    def look() -> None:
        start.wait(DEADLINE_S)
        for _ in range(20):
            numbers = [event.sequence for event in log.after()]
            assert numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else True

    leave = log.subscribe(lambda event: heard.append(event.sequence))
    in_threads(*(lambda numbers=numbers: publish(numbers) for numbers in published), come_and_go, look)
    leave()
    assert all(numbers == sorted(numbers) for numbers in published)
    assert sorted(number for numbers in published for number in numbers) == sorted(heard) == list(range(1, 1001))
    assert [event.sequence for event in log.after()] == list(range(501, 1001))
