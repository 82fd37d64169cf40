"""Tries whether the ports of other devices can be reached, on threads of its own.

A device does this for the coordinator when another device joins, and the coordinator does it itself. A data port is
asked for a collective of no communicator (an ASK frame, as in ``tcp_call_check``), so that the answer also proves that
a device of the same cluster is behind it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from hoop.errors import LinkCorrupted, PeerLost
from hoop.topology import Address
from hoop.transport.auth_handshake import authenticate, read_exactly
from hoop.transport.tcp_link import connect
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind

CONNECT_S = 3.0
"""Limit of one attempt: enough for a lost packet that TCP sends again after 1 s."""
_THREADS = 8
_MAX_TEXT_BYTES = 2048


class PortCheck:
    """Tries ports, a few at a time."""

    def __init__(self, key: bytes, timeout_s: float = CONNECT_S) -> None:
        """``key``: both ends of a data link prove that they have it; empty: no authentication."""
        self._key, self._timeout_s = key, timeout_s
        self._attempts: _Attempts | None = None
        """Made for the first port: many devices never try one."""

    def data_port(self, address: Address) -> Future[str]:
        """Why this data port cannot be used; empty if it can be."""
        return self._open().submit(address, partial(_ask, self._key))

    def services(self, address: Address) -> Future[str]:
        """Why no connection to these gRPC services can be made; empty if one can be."""
        return self._open().submit(address, lambda sock, read: "")

    def _open(self) -> _Attempts:
        self._attempts = self._attempts or _Attempts(self._timeout_s)
        return self._attempts

    def close(self) -> None:
        """Ends all attempts, and waits for their threads."""
        if self._attempts is not None:
            self._attempts.close()


class _Attempts:
    """Attempts on threads, which ``close`` interrupts."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(_THREADS, "hoop-port-check")
        self.wakeup, self._wakeup_writer = socket.socketpair()
        self._closing = False

    def submit(self, address: Address, talk: Callable[[socket.socket, _Wait], str]) -> Future[str]:
        return self._threads.submit(self._try, address, talk)

    def close(self) -> None:
        self._closing = True
        self._wakeup_writer.send(b"!")
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.wakeup.close()
        self._wakeup_writer.close()

    def _try(self, address: Address, talk: Callable[[socket.socket, _Wait], str]) -> str:
        wait = _Wait(self.wakeup, time.monotonic() + self._timeout_s, lambda: self._closing)
        try:
            sock = connect(address, *wait)
        except InterruptedError:
            return ""
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s"
        except (OSError, ValueError) as error:  # ValueError: a host name that no resolver accepts
            return _reason(error)
        with contextlib.closing(sock):
            try:
                return talk(sock, wait)
            except (TimeoutError, InterruptedError):
                return ""  # the port is open: the process behind it is only busy
            except (PeerLost, LinkCorrupted) as error:
                return str(error)
            except OSError as error:
                return _reason(error)


class _Wait(NamedTuple):
    """How an attempt waits: the arguments of ``connect``, ``authenticate`` and ``read_exactly``."""

    wakeup: socket.socket
    deadline: float
    stop: Callable[[], bool]


def _ask(key: bytes, sock: socket.socket, wait: _Wait) -> str:
    """Asks a data port for its collective; returns the text of a refusal."""
    hello = FrameHeader(FrameKind.ASK, communicator=0, generation=0, source=0, sequence=0, length=0)
    if key:
        authenticate(sock, hello, key, *wait)
    else:
        sock.sendmsg([memoryview(hello.pack())])
    answer = FrameHeader.unpack(read_exactly(sock, HEADER_BYTES, *wait))
    if answer.kind != FrameKind.REFUSAL:
        return ""
    text = read_exactly(sock, min(answer.length, _MAX_TEXT_BYTES), *wait)
    return f"it refused the link: {text.decode(errors='replace')}"


def _reason(error: OSError | ValueError) -> str:
    code = error.errno if isinstance(error, OSError) else None
    return os.strerror(code) if code is not None and code > 0 else str(error)  # a resolver's codes are negative
