"""A stop that a program requests before its job has begun."""

from __future__ import annotations

import os
import threading

import pytest

from hoop.launch.forked import STOP, HeadPipes, ProcessGroups, _Program

WAIT_S = 60.0


def test_a_stop_that_comes_while_devices_load_is_kept_until_the_job_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events_read, events_write = os.pipe()
    control_read, control_write = os.pipe()
    head = _Program(HeadPipes(events_write, control_read))
    watching = threading.Thread(target=head.watch_control, args=(ProcessGroups(),), daemon=True)
    os.write(control_write, STOP + b".")  # the second byte ends the thread, and would end the process
    ended = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(os, "_exit", lambda code: ended.set())
        watching.start()
        assert ended.wait(WAIT_S)
        watching.join(WAIT_S)
    stopped = [threading.Event(), threading.Event()]
    head.set_stop_handler(stopped[0].set)
    assert stopped[0].wait(WAIT_S)
    head.set_stop_handler(stopped[1].set)
    assert not stopped[1].is_set(), "the stop was carried out"
    head._events.close()
    for descriptor in (events_read, control_read, control_write):
        os.close(descriptor)
