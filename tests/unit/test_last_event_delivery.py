"""Task.wait_delivered: a process that is about to be killed waits until its last event was sent."""

from __future__ import annotations

import threading

from hoop.job_events import FaultInjected
from hoop.servers.tasks import Task


def test_wait_delivered_returns_once_the_event_was_sent() -> None:
    task = Task()
    assert task.wait_delivered(0.0), "nothing was emitted yet"
    task.emit(FaultInjected("kill"))
    assert not task.wait_delivered(0.0), "no client watches the task"
    results: list[bool] = []
    waiter = threading.Thread(target=lambda: results.append(task.wait_delivered(30.0)))
    waiter.start()
    task.mark_sent(task.log.last)
    waiter.join(30.0)
    assert results == [True]
    task.emit(FaultInjected("kill"))
    assert not task.wait_delivered(0.0), "the first was sent, the second was not"
