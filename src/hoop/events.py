"""The coordinator's and devices' event log, read by ``hoop status``, the event stream and tests.

The log is bounded in number and in bytes: it drops old events, and a gap in the sequence numbers shows that. A reader
waits for events on a condition variable, not by polling.

Who publishes an event has decided something, and goes on whatever the listeners do: ``Listeners`` calls each of them,
and an error of one is reported once and stops nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVarTuple

from hoop.texts import MAX_TEXT_BYTES, printable

log = logging.getLogger("hoop.events")
Arguments = TypeVarTuple("Arguments")
CAPACITY = 10_000
MAX_LOG_BYTES = 64 << 20
"""Maximum bytes of all texts in a log."""
MAX_PINNED = 1000
_EVENT_BYTES = 256
"""Bytes that an event takes beside its texts."""


def wall_clock() -> float:
    """Seconds since 1970, to be shown to users. ``hoop doctor`` compares those of several hosts; nothing else does."""
    return time.time()


@dataclass(frozen=True)
class Event:
    """One event."""

    sequence: int
    time: float
    """Seconds since 1970, for display only; no decision depends on it."""
    kind: str
    """Stable name of the kind of event: ``device_joined``, ``device_dead``, ``operation_failed`` …"""
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """About how many bytes of memory it takes."""
        return _EVENT_BYTES + len(self.text) + sum(len(key) + len(value) for key, value in self.fields.items())


class Listeners(Generic[*Arguments]):
    """Functions that are called one after the other. An error of one reaches neither the caller nor the others."""

    def __init__(self, report: Callable[[str], object]) -> None:
        """``report`` gets a text about the first error of each listener; it may call the listeners again."""
        self._report = report
        self._changing = threading.Lock()
        self._listeners: dict[object, Callable[[*Arguments], object]] = {}
        self._failed: set[object] = set()

    def add(self, listener: Callable[[*Arguments], object]) -> Callable[[], None]:
        """Adds a function, which may be added twice. Returns a function that removes it once."""
        key = object()
        with self._changing:
            self._listeners[key] = listener

        def remove() -> None:
            with self._changing:
                self._listeners.pop(key, None)
                self._failed.discard(key)

        return remove

    def call(self, *arguments: *Arguments) -> None:
        with self._changing:
            listeners = list(self._listeners.items())
        for key, listener in listeners:
            try:
                listener(*arguments)
            except Exception as error:
                with self._changing:
                    again = key in self._failed
                    self._failed.add(key)
                if not again:
                    log.exception("a listener failed; it is called again with the next event")
                    self._report(f"{_name(listener)} failed: {type(error).__name__}: {error}")


def _name(listener: object) -> str:
    return str(getattr(listener, "__qualname__", "") or type(listener).__qualname__)


class EventLog:
    """A bounded, thread-safe list of events that readers can wait on and subscribe to."""

    def __init__(
        self,
        capacity: int = CAPACITY,
        pinned: Collection[str] = (),
        max_bytes: int = 0,
        max_log_bytes: int = MAX_LOG_BYTES,
        on_listener_error: Callable[[str], object] = lambda _: None,
    ) -> None:
        """``capacity`` and ``max_log_bytes``: limits of the log. ``max_bytes``: limit of one text or field; 0: none.

        Events of ``pinned`` kinds outlive the others: of those that were dropped, the first and the last are kept, at
        most ``MAX_PINNED``. ``on_listener_error``: see ``Listeners``; it may publish here.
        """
        self._max_bytes = max_bytes
        self._capacity, self._max_log_bytes = capacity, max_log_bytes
        self._events: deque[Event] = deque()
        self._size = 0
        """Bytes of ``_events``."""
        self._pinned_kinds, self._pinned = frozenset(pinned), list[Event]()
        self._last = 0
        self._changed = threading.Condition()
        self._listeners = Listeners[Event](on_listener_error)

    def publish(self, kind: str, text: str, **fields: object) -> Event:
        """Add an event and notify readers. Its texts are made printable for terminals and protobuf."""
        kind, text = self._clean(kind), self._clean(text)
        clean_fields = {key: self._clean(str(value)) for key, value in fields.items()}
        with self._changed:
            self._last += 1
            event = Event(self._last, time.time(), kind, text, clean_fields)
            self._events.append(event)
            self._size += event.size
            while len(self._events) > self._capacity or (self._size > self._max_log_bytes and len(self._events) > 1):
                self._drop_oldest()
            self._changed.notify_all()
        self._listeners.call(event)
        return event

    def _drop_oldest(self) -> None:
        oldest = self._events.popleft()
        self._size -= oldest.size
        if oldest.kind in self._pinned_kinds:
            self._pinned.append(oldest)
            if len(self._pinned) > MAX_PINNED:
                del self._pinned[1]

    def _clean(self, text: str) -> str:
        return printable(text, self._max_bytes or max(MAX_TEXT_BYTES, 8 * len(text)))

    @property
    def last(self) -> int:
        """Sequence number of the newest event; 0 if there is none."""
        return self._last

    def after(self, sequence: int = 0) -> list[Event]:
        """The stored events with a higher sequence number. The cost is that of the events that are returned.

        A reader of a long log calls it after every new event.
        """
        found: list[Event] = []
        with self._changed:
            for event in chain(reversed(self._events), reversed(self._pinned)):
                if event.sequence <= sequence:
                    break
                found.append(event)
        found.reverse()
        return found

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call ``listener`` with every new event, on the publishing thread; returns a function that unsubscribes."""
        return self._listeners.add(listener)

    def wait_for(self, match: Callable[[Event], bool], timeout: float) -> Event | None:
        """The first stored event that matches. Waits up to ``timeout`` seconds for one; None after that."""
        found: list[Event] = []

        def matched() -> bool:
            found[:] = [event for event in self._events if match(event)][:1]
            return bool(found)

        with self._changed:
            self._changed.wait_for(matched, timeout)
        return found[0] if found else None
