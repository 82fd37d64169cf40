"""Client calls: conversion of gRPC errors, and handles of calls that are still running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from hoop.errors import DeadlineExceeded
from hoop.wire.service import translate

T = TypeVar("T")


def call(method: Any, request: Any, timeout: float, peer: str) -> Any:
    """Call ``method`` and return the answer; raises a Hoop error. ``peer`` is the prefix of its text."""
    try:
        return method(request, timeout=timeout)
    except grpc.RpcError as error:
        raise translate(error, peer) from None


class Handle(Generic[T]):
    """A running call."""

    def __init__(
        self, future: Any, peer: str, finish: Callable[[Any], T], on_failure: Callable[[], None] | None = None
    ) -> None:
        """``finish`` converts the answer to the result, once. ``on_failure`` is called if the call fails."""
        self._future = future
        self._peer = peer
        self._finish: Callable[[Any], T] | None = finish
        self._on_failure = on_failure
        self._result: T | None = None

    def done(self) -> bool:
        """Whether the call has ended, with or without success."""
        return bool(self._future.done())

    def wait(self, timeout: float | None = None) -> T:
        """Wait up to ``timeout`` seconds (None: the call's own deadline) and return the result."""
        try:
            answer = self._future.result(timeout)
        except grpc.FutureTimeoutError:
            raise DeadlineExceeded(f"{self._peer}: not done after {timeout:g} s; it goes on") from None
        except grpc.RpcError as error:
            if self._on_failure is not None:
                self._on_failure()
            raise translate(error, self._peer) from None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish(answer)
        return self._result  # type: ignore[return-value]
