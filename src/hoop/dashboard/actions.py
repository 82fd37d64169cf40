"""Actions from the page: what may be done, the thread that does it, and actions on a cluster for its administrator.

    browser ── click ──▶ ActionBar ── submit ──▶ ActionQueue (one thread, at most MAX_WAITING) ──▶ Actor.act
            ◀── text ───────────────── messages ◀──┘

``DemoActor`` (``lab/demo.py``) signals processes that it has started itself. ``ClusterActor`` does with a cluster what
a client may do; the page needs an administrator's login for it, and asks for a confirmation.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from hoop.client.cluster import Cluster
from hoop.errors import HoopError
from hoop.events import wall_clock

log = logging.getLogger(__name__)
MAX_WAITING = 4
"""Actions that wait for the thread; a further one is refused."""
MAX_MESSAGES = 5
DRAIN_S = 60.0
"""How long a drain waits for a device that takes the place of the one that leaves."""
JOIN_S = 10.0


class Action(StrEnum):
    """What a button does."""

    KILL = "kill"
    STOP = "stop"
    CONTINUE = "continue"
    SLOW = "slow"
    LEAVE = "leave"
    ADD = "add"
    FINISH = "finish"

    @property
    def needs_device(self) -> bool:
        return self not in (Action.ADD, Action.FINISH)


class Actor(Protocol):
    """Carries out actions."""

    actions: tuple[Action, ...]
    """Those that it can carry out, in the order of the buttons."""
    confirm: bool
    """The page asks for a confirmation of each action."""

    def act(self, action: Action, device: int) -> str:
        """Does it, and returns a sentence about it. Raises a HoopError if it cannot. ``device``: an id, or 0."""

    def report(self) -> tuple[str, ...]:
        """Sentences that the page shows beside the buttons: what is going on, and what came out."""


@dataclass(frozen=True)
class Message:
    """What an action did."""

    time: float
    """Seconds since 1970."""
    text: str
    failed: bool = False


class ActionQueue:
    """Carries out the actions of all pages, one at a time."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self._waiting: queue.Queue[tuple[Action, int] | None] = queue.Queue(MAX_WAITING)
        self.messages: tuple[Message, ...] = ()
        """The newest last."""
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="hoop-dashboard-actions", daemon=True)
        self._thread.start()

    def submit(self, action: Action, device: int) -> None:
        """Any thread may call it; it does not wait."""
        if action not in self.actor.actions:
            self._say(f"{action}: not possible here", failed=True)
            return
        try:
            self._waiting.put_nowait((action, device))
        except queue.Full:
            self._say(f"{action}: {MAX_WAITING} actions wait already; try again later", failed=True)

    def close(self) -> None:
        """Waits for the action under way, and drops those that wait."""
        while not self._waiting.empty():
            try:
                self._waiting.get_nowait()
            except queue.Empty:
                break
        self._waiting.put(None)
        self._thread.join(JOIN_S)

    def _work(self) -> None:
        while (found := self._waiting.get()) is not None:
            action, device = found
            try:
                self._say(self.actor.act(action, device))
            except HoopError as error:
                self._say(f"{action}: {error}", failed=True)
            except Exception as error:  # a bug: the buttons must go on working
                log.exception("dashboard: %s of device %d", action, device)
                self._say(f"{action}: {type(error).__name__}; the log has more", failed=True)

    def _say(self, text: str, failed: bool = False) -> None:
        with self._lock:
            self.messages = (*self.messages, Message(wall_clock(), text, failed))[-MAX_MESSAGES:]


class ClusterActor:
    """An administrator's actions on a cluster: a device leaves, the newest running job stops after a step."""

    actions: tuple[Action, ...] = (Action.LEAVE, Action.FINISH)
    confirm = True

    def __init__(self, connect: Callable[[], Cluster]) -> None:
        self._connect = connect

    def act(self, action: Action, device: int) -> str:
        with self._connect() as cluster:
            if action is Action.LEAVE:
                cluster.drain(device, DRAIN_S, lambda progress: None)
                return f"device {device} has handed over its work and left"
            running = [one.id for one in cluster.status().jobs if one.status == "running"]
            if not running:
                return "no job runs"
            cluster.job(running[-1]).stop()
            return f"job {running[-1]} stops after this step"

    def report(self) -> tuple[str, ...]:
        return ()
