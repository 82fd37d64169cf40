"""Calls from the client: errors in Hoop's words, and handles for calls that are still running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc

from hoop.errors import DeadlineExceeded
from hoop.wire.service import translate

T = TypeVar("T")


def call(method: Any, request: Any, timeout: float, whom: str) -> Any:
    """One call, answered or raised as a Hoop error."""
    try:
        return method(request, timeout=timeout)
    except grpc.RpcError as error:
        raise translate(error, whom) from None


class Handle(Generic[T]):
    """A call that is under way."""

    def __init__(
        self, future: Any, whom: str, finish: Callable[[Any], T], failed: Callable[[], None] | None = None
    ) -> None:
        """``finish`` makes the result of the answer, once; ``failed`` cleans up when there is none."""
        self._future = future
        self._whom = whom
        self._finish: Callable[[Any], T] | None = finish
        self._failed = failed
        self._result: T | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return bool(self._future.done())

    def wait(self, timeout: float | None = None) -> T:
        """Its result, waiting up to ``timeout`` seconds (None: the call's own deadline)."""
        try:
            answer = self._future.result(timeout)
        except grpc.FutureTimeoutError:
            raise DeadlineExceeded(f"{self._whom}: not done after {timeout:g} s; it goes on") from None
        except grpc.RpcError as error:
            if self._failed is not None:
                self._failed()
            raise translate(error, self._whom) from None
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish(answer)
        return self._result  # type: ignore[return-value]
