"""Two endpoints that talk: what is said, what is heard, and a thread that waits for it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ranks import LONG_S, PROMPT_S, soon

from hoop.errors import PeerLost
from hoop.transport import Endpoint

Pair = tuple[Endpoint, Endpoint]


def receive(endpoint: Endpoint, peer: int, size: int, deadline: float | None = None) -> bytes:
    into = bytearray(size)
    endpoint.recv_into(peer, memoryview(into), deadline or soon())
    return bytes(into)


def say(endpoint: Endpoint, peer: int, what: bytes) -> None:
    """Sends, and stays until it is handed over."""
    endpoint.send(peer, memoryview(what), soon())
    endpoint.flush(soon())


def meet(pair: Pair) -> None:
    """After this the links exist in both directions."""
    for mine, other in (pair, pair[::-1]):
        say(mine, other.rank, b"hello")
    for mine, other in (pair, pair[::-1]):
        assert receive(mine, other.rank, 5) == b"hello"


def until(happened: Callable[[], object], what: str) -> None:
    """Looks again and again until something has happened."""
    deadline = soon()
    while not happened():
        assert time.monotonic() < deadline, f"never happened: {what}"
        threading.Event().wait(0.001)


def until_started(future: Future[Any]) -> None:
    until(lambda: future.running() or future.done(), "a thread at work")


class Waiter:
    """A thread that waits for a peer's message, and is inside ``recv_into`` once this is made."""

    def __init__(self, endpoint: Endpoint, peer: int, size: int = 8) -> None:
        self.into = bytearray(size)
        self._endpoint = endpoint
        self.outcome: Future[None] = Future()
        self._thread = threading.Thread(target=self._wait, args=(peer,), name="waiter")
        self._thread.start()
        until(self._is_inside, "a thread in recv_into")

    def _wait(self, peer: int) -> None:
        try:
            self.outcome.set_result(self._endpoint.recv_into(peer, memoryview(self.into), soon()))
        except BaseException as error:
            self.outcome.set_exception(error)

    def _is_inside(self) -> bool:
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None and frame.f_code.co_name != "recv_into":
            frame = frame.f_back
        return frame is not None or self.outcome.done()

    def error(self) -> BaseException | None:
        """What the wait came to; a TimeoutError when it went on for longer than a wake-up may take."""
        try:
            return self.outcome.exception(PROMPT_S)
        except TimeoutError as hang:
            self._endpoint.abort(PeerLost("given up"))
            return hang
        finally:
            self._thread.join(2 * LONG_S)
