"""A process that is to die waits until word of it has left."""

from __future__ import annotations

import threading

from hoop.job_events import FaultInjected
from hoop.servers.tasks import Task


def test_what_was_told_is_heard_when_it_was_sent() -> None:
    task = Task()
    assert task.wait_delivered(0.0), "nothing was told yet"
    task.emit(FaultInjected("kill"))
    assert not task.wait_delivered(0.0), "nobody watches"
    found: list[bool] = []
    waits = threading.Thread(target=lambda: found.append(task.wait_delivered(30.0)))
    waits.start()
    task.mark_sent(task.log.last)
    waits.join(30.0)
    assert found == [True]
    task.emit(FaultInjected("kill"))
    assert not task.wait_delivered(0.0), "the first was sent, the second was not"
