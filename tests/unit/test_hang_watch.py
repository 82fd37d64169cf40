"""Which standing still is a hang: not a wait for others, not a process that did not run, not data that is loading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hoop.collectives.rank_context import RankProgress
from hoop.servers.hang_watch import HangWatch, StandStill
from hoop.user_frames import HOOP

LIMIT_S = 60.0
NOW = 1000.0


def calls_from(file: str) -> Callable[[Callable[[], None]], None]:
    """A function that calls its argument, as if it stood in this file of Hoop."""
    space: dict[str, Any] = {}
    exec(compile("def call(function):\n    function()\n", f"{HOOP}/{file}", "exec"), space)
    call: Callable[[Callable[[], None]], None] = space["call"]
    return call


class Watched:
    """A thread that stands in ``forward``, which a file of Hoop called, and its watch."""

    def __init__(self, thread: threading.Thread) -> None:
        self.found: list[StandStill] = []
        self.count, self.on_gpu = 0, False
        assert thread.ident is not None
        self.watch = HangWatch(thread.ident, self.progress, self.found.append)

    def progress(self) -> RankProgress:
        return RankProgress(self.count, 7, LIMIT_S, LIMIT_S, 10 * LIMIT_S, self.on_gpu)

    def look_until(self, seconds: float, since: float = 0.0, every: float = 1.0) -> None:
        for number in range(int((seconds - since) / every) + 1):
            self.watch.look(NOW + since + number * every)


@contextmanager
def standing(file: str) -> Iterator[Watched]:
    end, there = threading.Event(), threading.Event()

    def forward() -> None:
        there.set()
        end.wait()

    thread = threading.Thread(target=calls_from(file), args=(forward,))
    thread.start()
    there.wait()
    watched = Watched(thread)
    try:
        yield watched
    finally:
        watched.watch.close()
        end.set()
        thread.join()


def test_code_of_the_user_that_stands_still_is_warned_of_and_hangs_then() -> None:
    with standing("engine/stage/autograd.py") as watched:
        watched.look_until(29)
        assert not watched.found
        watched.look_until(31, since=30)
        (warning,) = watched.found
        assert (warning.hangs, watched.watch.hangs) == (False, False)
        watched.look_until(61, since=32)
        assert [one.hangs for one in watched.found] == [False, True]
        assert watched.watch.hangs
        text = watched.found[-1].text(2)
        assert text.startswith("device 2 has made no progress for 60 s in step 7: it is in forward of ")
        assert f"{__file__}:" in text
        watched.count += 1
        watched.look_until(62, since=62)
        assert not watched.watch.hangs


@pytest.mark.parametrize(
    "file",
    ["transport/base.py", "collectives/communicator.py", "servers/tasks.py", "engine/custom/own_loop.py"],
)
def test_a_rank_that_waits_for_others_does_not_hang(file: str) -> None:
    with standing(file) as watched:
        watched.look_until(300)
        assert not watched.found


def test_loading_data_may_take_ten_times_as_long() -> None:
    with standing("engine/data_feed.py") as watched:
        watched.look_until(299)
        assert not watched.found
        watched.look_until(601, since=300)
        assert [one.hangs for one in watched.found] == [False, True]


def test_time_in_which_the_process_did_not_run_does_not_count() -> None:
    with standing("engine/stage/autograd.py") as watched:
        watched.look_until(20)
        watched.look_until(120, since=110)
        assert [one.seconds for one in watched.found] == [30.0], "90 s without a look are not counted"


def test_on_a_gpu_only_code_of_the_user_hangs() -> None:
    """In Hoop's own code a rank may wait for the GPUs of others."""
    with standing("engine/stage/peer_rows.py") as watched:
        watched.on_gpu = True
        watched.look_until(31)
        assert watched.found, "the function that was called is a user's"
