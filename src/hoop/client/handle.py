"""Client calls: conversion of gRPC errors, calls that are made again, and handles of calls that are still running."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from hoop.errors import DeadlineExceeded
from hoop.wire.repeated_calls import FIRST_PAUSE_S, MAX_PAUSE_S, make_repeatable
from hoop.wire.service import connection_broke, translate

T = TypeVar("T")
Ended = Callable[[], bool]
"""Whether the server of a call is known to have ended: then its calls are not made again."""


class Attempts:
    """The attempts of one call, which share its deadline."""

    def __init__(self, timeout: float, repeatable: bool, ended: Ended | None) -> None:
        """``ended`` None: the call is made once."""
        self._deadline = time.monotonic() + timeout
        self._ended = ended if repeatable else None
        self._pause_s = FIRST_PAUSE_S

    @property
    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def may_repeat(self, error: grpc.RpcError) -> bool:
        """Whether to make the call again after this error. Pauses before it says so."""
        if self._ended is None or not connection_broke(error) or self.left_s <= self._pause_s or self._ended():
            return False
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
        return True


def call(method: Any, request: Any, timeout: float, peer: str, ended: Ended | None = None) -> Any:
    """Call ``method`` and return the answer; raises a Hoop error. ``peer`` is the prefix of its text.

    With ``ended`` a call whose connection breaks is made again, and done once.
    """
    attempts = Attempts(timeout, ended is not None and make_repeatable(request), ended)
    while True:
        try:
            return method(request, timeout=attempts.left_s)
        except grpc.RpcError as error:
            if not attempts.may_repeat(error):
                raise translate(error, peer) from None


class Handle(Generic[T]):
    """A running call."""

    def __init__(
        self,
        start: Callable[[float], Any],
        attempts: Attempts,
        peer: str,
        finish: Callable[[Any], T],
        on_failure: Callable[[], None] | None = None,
    ) -> None:
        """``start`` makes the call, with a timeout, and is called again if its connection breaks. ``finish`` converts
        the answer to the result, once. ``on_failure`` is called if the call fails."""
        self._start, self._attempts = start, attempts
        self._future = start(attempts.left_s)
        self._peer = peer
        self._finish: Callable[[Any], T] | None = finish
        self._on_failure = on_failure
        self._result: T | None = None

    def done(self) -> bool:
        """Whether the call has ended, with or without success."""
        return bool(self._future.done())

    def wait(self, timeout: float | None = None) -> T:
        """Wait up to ``timeout`` seconds (None: the call's own deadline) and return the result."""
        deadline = None if timeout is None else time.monotonic() + timeout
        answer = None
        while answer is None:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                answer = self._future.result(left)
            except grpc.FutureTimeoutError:
                raise DeadlineExceeded(f"{self._peer}: not done after {timeout:g} s; it goes on") from None
            except grpc.RpcError as error:
                if self._attempts.may_repeat(error):
                    self._future = self._start(self._attempts.left_s)
                    continue
                if self._on_failure is not None:
                    self._on_failure()
                raise translate(error, self._peer) from None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish(answer)
        return self._result  # type: ignore[return-value]
