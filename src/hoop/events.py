"""What happened, in order: the log that status, the event stream and tests read.

A log is bounded: old events fall out, and their numbers show that they did. Whoever waits for an
event waits on the log itself, never by polling.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from hoop.texts import LONGEST, printable

CAPACITY = 10_000


@dataclass(frozen=True)
class Event:
    """One thing that happened."""

    sequence: int
    time: float
    """Seconds since 1970, for people; nothing is decided by it."""
    kind: str
    """A stable name: ``device_joined``, ``device_dead``, ``operation_failed`` …"""
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)


class EventLog:
    """A bounded, thread-safe list of events with waiting and subscription."""

    def __init__(self, capacity: int = CAPACITY, pinned: Collection[str] = (), longest: int = 0) -> None:
        """``pinned`` kinds never fall out. ``longest``: bytes of a text or a field; 0: as long as it comes."""
        self._longest = longest
        self._events: deque[Event] = deque(maxlen=capacity)
        self._pinned, self._kept = frozenset(pinned), list[Event]()
        self._last = 0
        self._changed = threading.Condition()
        self._listeners: dict[object, Callable[[Event], None]] = {}

    def publish(self, kind: str, text: str, **fields: object) -> Event:
        """Adds an event. Its texts are made printable: they may go to a terminal, or into protobuf."""
        kind, text = self._clean(kind), self._clean(text)
        shown = {key: self._clean(str(value)) for key, value in fields.items()}
        with self._changed:
            self._last += 1
            event = Event(self._last, time.time(), kind, text, shown)
            if len(self._events) == self._events.maxlen and self._events[0].kind in self._pinned:
                self._kept.append(self._events[0])
            self._events.append(event)
            self._changed.notify_all()
            listeners = list(self._listeners.values())
        for listener in listeners:
            listener(event)
        return event

    def _clean(self, text: str) -> str:
        return printable(text, self._longest or max(LONGEST, 8 * len(text)))

    @property
    def last(self) -> int:
        """The number of the newest event; 0: there was none yet."""
        return self._last

    def after(self, sequence: int = 0) -> list[Event]:
        """The events with a higher sequence that are still held."""
        with self._changed:
            return [event for event in (*self._kept, *self._events) if event.sequence > sequence]

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Calls ``listener`` with every new event, on the publishing thread; returns the way out."""
        key = object()  # the same listener may be here twice, and leave once
        with self._changed:
            self._listeners[key] = listener

        def unsubscribe() -> None:
            with self._changed:
                self._listeners.pop(key, None)

        return unsubscribe

    def wait_for(self, match: Callable[[Event], bool], timeout: float) -> Event | None:
        """The first held event that matches, waiting up to ``timeout`` seconds for one; None if none came."""
        found: list[Event] = []

        def look() -> bool:
            found[:] = [event for event in self._events if match(event)][:1]
            return bool(found)

        with self._changed:
            self._changed.wait_for(look, timeout)
        return found[0] if found else None
