"""A process that is to die waits until word of it has left."""

from __future__ import annotations

import threading

from hoop.servers.tasks import Task


def test_what_was_told_is_heard_when_it_was_sent() -> None:
    task = Task()
    assert task.heard(0.0), "nothing was told yet"
    task.tell({"kind": "fault"})
    assert not task.heard(0.0), "nobody watches"
    found: list[bool] = []
    waits = threading.Thread(target=lambda: found.append(task.heard(30.0)))
    waits.start()
    task.sent(task.log.last)
    waits.join(30.0)
    assert found == [True]
    task.tell({"kind": "fault"})
    assert not task.heard(0.0), "the first was sent, the second was not"
