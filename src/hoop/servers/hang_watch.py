"""``HangWatch``: notices that a device's training thread makes no progress, and tells where it is.

A thread looks at the training thread about once a second.

    progress          the rank executes instructions: all is well
    waiting           its innermost frame of Hoop is in a collective, on a link, or in the wait for a rank
    no progress       for half of the limit: a warning, with the stack; for the whole limit: the rank hangs
    no interpreter    code holds Python's lock, and no thread can look: the stack is printed by ``faulthandler``

So of ranks that stand still only the one is named for which the others wait. Time in which this process did not run as
a whole (it was stopped, or starved) does not count. ``membership.job_membership`` decides what follows.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary

from hoop.collectives.rank_context import RankProgress
from hoop.user_frames import HOOP, is_users

LOOK_S = 1.0
"""Longest time between two looks, in seconds."""
FIRST_LOOKS_S = 0.1
"""Seconds between looks until the rank says how far it is: code may hold the interpreter's lock right after that."""
LATE_S = 1.0
"""Lateness of a look, in seconds, from which on this process is taken to have been stopped or starved."""
LOOKS = 20
"""Least number of looks within the limit."""
WAITING_ROOMS = ("collectives", "transport", "servers")
"""Rooms of Hoop in which a rank waits for others, or for the coordinator."""
OWN_LOOP = "own_loop.py"
"""File in which the training thread waits for a user's own loop, which may take any time."""
FEEDS = ("feed.py", "data_feed.py", "prefetcher.py", "worker_pool.py")
"""Files in which a rank loads data."""
MAX_STACK = 4000
"""Maximum number of characters of a stack in a text."""


@dataclass(frozen=True)
class StandStill:
    """A rank that makes no progress and waits for nobody."""

    step: int
    """Number of the step."""
    seconds: float
    """Seconds without progress."""
    limit_s: float
    """Seconds after which the rank hangs."""
    place: str
    """Function, file and line."""
    stack: str

    @property
    def hangs(self) -> bool:
        return self.seconds >= self.limit_s

    def text(self, device: int) -> str:
        """``device 2 has made no progress for 60 s in step 7: it is in forward of model.py:12`` and the stack."""
        return (
            f"device {device} has made no progress for {self.seconds:.0f} s in step {self.step}: it is in "
            f"{self.place}\n{self.stack}"
        )


class HangWatch:
    """Watches one training thread. ``look`` is called again and again, by one thread."""

    def __init__(
        self, thread_id: int, progress: Callable[[], RankProgress | None], report: Callable[[StandStill], None]
    ) -> None:
        """``report`` gets a rank that stands still: at half of the limit, and each time the limit is over again."""
        self._thread_id, self._progress, self._report = thread_id, progress, report
        self._count: object = None
        self._since: float | None = None
        """Time since when there is no progress; None: nothing is watched."""
        self._looked = 0.0
        self._reports = 0
        """Number of reports since the last progress."""
        self.hangs = False
        """Whether the limit was over at the last report, without progress since."""
        self._armed_at = 0.0
        self.interval_s = FIRST_LOOKS_S

    def look(self, now: float) -> None:
        """Compares the progress with that of the last look."""
        progress, since = self._progress(), self._since
        if progress is None or not progress.limit_s:
            self._reset(None)
            self._disarm()
            return
        late_s = now - self._looked - self.interval_s if self._looked else 0.0
        self._looked, self.interval_s = now, min(LOOK_S, progress.limit_s / LOOKS)
        if since is None or progress.count != self._count:
            self._count = progress.count
            self._reset(now)
            self._arm(now, progress.hang_s)
            return
        if late_s > LATE_S:
            self._since = since = since + late_s
        frames = self._frames()
        if not frames or _waits(frames, progress.on_gpu):
            self._reset(now)
            self._arm(now, progress.hang_s)
            return
        self._arm(now, progress.hang_s)
        limit_s = max(progress.limit_s, progress.unusual_limit_s) if _loads(frames) else progress.limit_s
        seconds = now - since
        if seconds >= limit_s * (self._reports or 0.5):
            self._reports = max(self._reports + 1, int(seconds / limit_s) + 1)
            stand_still = StandStill(progress.step, seconds, limit_s, _place(frames), _shown(frames))
            self.hangs = stand_still.hangs
            self._report(stand_still)

    def _reset(self, now: float | None) -> None:
        self._since, self._reports, self.hangs = now, 0, False

    def close(self) -> None:
        self._disarm()

    def _frames(self) -> list[FrameSummary]:
        """The stack of the training thread, the innermost frame last."""
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return []
        linecache.checkcache()
        return list(traceback.extract_stack(frame))

    def _arm(self, now: float, seconds: float) -> None:
        """Has all stacks printed to standard error if no Python thread runs for so long."""
        if now - self._armed_at < min(LOOK_S, self.interval_s):
            return
        self._armed_at = now
        with contextlib.suppress(Exception):  # standard error has no descriptor, or is closed
            faulthandler.dump_traceback_later(max(seconds, 2 * LATE_S))

    def _disarm(self) -> None:
        if self._armed_at:
            self._armed_at = 0.0
            faulthandler.cancel_dump_traceback_later()


def _waits(frames: list[FrameSummary], on_gpu: bool) -> bool:
    """Whether this is the stack of a rank that waits for others, for the coordinator or for a user's own loop.

    On a GPU other ranks are also waited for in the engine, for the GPU: only the user's own code counts there.
    """
    inner = next((frame for frame in reversed(frames) if frame.filename.startswith(HOOP)), None)
    if inner is None or Path(inner.filename).name == OWN_LOOP:
        return True
    room = Path(inner.filename).relative_to(HOOP).parts[0]
    return room in WAITING_ROOMS or (on_gpu and not any(is_users(frame.filename) for frame in frames))


def _loads(frames: list[FrameSummary]) -> bool:
    """Whether the rank loads data, which may take long."""
    own = (Path(frame.filename) for frame in frames if frame.filename.startswith(HOOP))
    return any(path.name in FEEDS or path.parent.name == "data" for path in own)


def _place(frames: list[FrameSummary]) -> str:
    """The innermost function of the user's code, else the innermost of all."""
    frame = next((frame for frame in reversed(frames) if is_users(frame.filename)), frames[-1])
    return f"{frame.name} of {frame.filename}:{frame.lineno}{f' ({frame.line})' if frame.line else ''}"


def _shown(frames: list[FrameSummary]) -> str:
    """The stack from the first frame of the user's code on, else its innermost frames."""
    first = next((index for index, frame in enumerate(frames) if is_users(frame.filename)), len(frames) - 6)
    return "".join(traceback.format_list(frames[max(0, first) :])).rstrip()[-MAX_STACK:]
