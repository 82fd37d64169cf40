"""Helpers to send and receive between two endpoints, and a thread that waits for a message."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

from ranks import LONG_S, PROMPT_S, deadline_in

from hoop.errors import PeerLost
from hoop.transport import Endpoint

Pair = tuple[Endpoint, Endpoint]


def receive(endpoint: Endpoint, peer: int, size: int, deadline: float | None = None) -> bytes:
    into = bytearray(size)
    endpoint.recv_into(peer, memoryview(into), deadline or deadline_in())
    return bytes(into)


def send_and_flush(endpoint: Endpoint, peer: int, data: bytes) -> None:
    endpoint.send(peer, memoryview(data), deadline_in())
    endpoint.flush(deadline_in())


def connect(pair: Pair) -> None:
    """Sends a message in each direction; afterwards both links exist."""
    for endpoint, peer in (pair, pair[::-1]):
        send_and_flush(endpoint, peer.rank, b"hello")
    for endpoint, peer in (pair, pair[::-1]):
        assert receive(endpoint, peer.rank, 5) == b"hello"


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Polls until the condition holds."""
    deadline = deadline_in()
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        threading.Event().wait(0.001)


def wait_until_running(future: Future[Any]) -> None:
    wait_until(lambda: future.running() or future.done(), "a thread at work")


class Waiter:
    """A thread that waits for a peer's message; it is inside ``recv_into`` when the constructor returns."""

    def __init__(self, endpoint: Endpoint, peer: int, size: int = 8) -> None:
        self.into = bytearray(size)
        self._endpoint = endpoint
        self.outcome: Future[None] = Future()
        self._thread = threading.Thread(target=self._wait, args=(peer,), name="waiter")
        self._thread.start()
        wait_until(self._is_inside, "a thread in recv_into")

    def _wait(self, peer: int) -> None:
        try:
            self.outcome.set_result(self._endpoint.recv_into(peer, memoryview(self.into), deadline_in()))
        except BaseException as error:
            self.outcome.set_exception(error)

    def _is_inside(self) -> bool:
        frame = sys._current_frames().get(self._thread.ident or 0)
        # Frames of a running thread end meanwhile: CPython 3.11 was seen to give another object for one.
        while isinstance(frame, FrameType) and frame.f_code.co_name != "recv_into":
            frame = frame.f_back
        return isinstance(frame, FrameType) or self.outcome.done()

    def error(self) -> BaseException | None:
        """The exception that ended the wait, if any; a TimeoutError if the wait lasted longer than PROMPT_S."""
        try:
            return self.outcome.exception(PROMPT_S)
        except TimeoutError as timeout:
            self._endpoint.abort(PeerLost("given up"))
            return timeout
        finally:
            self._thread.join(2 * LONG_S)
