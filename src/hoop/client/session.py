"""A client's standing with the coordinator: when the client is gone, however it went, what it made is freed."""

from __future__ import annotations

import secrets
import threading
from typing import Any

import grpc

from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.rpc import Stub, translate, unreachable


class Session:
    """Held open while the client lives; opened again when it breaks on the way."""

    def __init__(self, stub: Stub, whom: str) -> None:
        self.id = secrets.token_hex(8)
        self._stub, self._whom = stub, whom
        self._lock = threading.RLock()
        self._call: Any = None
        self._closed = False

    def hold(self) -> str:
        """Its id, which the coordinator knows when this returns."""
        with self._lock:
            if self._call is None and not self._closed:
                call = self._stub.Hold(pb.HoldRequest(session=self.id))
                try:
                    next(call)
                except grpc.RpcError as error:
                    raise translate(error, self._whom) from None
                self._call = call
                call.add_done_callback(self._broke)
        return self.id

    def _broke(self, call: Any) -> None:
        """Opens it again; that waits by itself until the coordinator is there."""
        with self._lock:
            if not self._closed and unreachable(call):
                self._call = self._stub.Hold(pb.HoldRequest(session=self.id), wait_for_ready=True)
                self._call.add_done_callback(self._broke)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            call, self._call = self._call, None
        if call is not None:
            call.cancel()
