"""Forms the rounds of an elastic run: which processes are its ranks now. ``hoop run --min-np`` has one.

A round is a number of ranks 0..N-1. The processes connect when they start (``launch.rendezvous_client``), and again ask
for a round when theirs is broken. Messages are lines of JSON over a loopback connection:

    process -> server   register   token and slot (the number by which the launcher knows it)
                        ready      it waits for the next round; ``has_state``: it has trained in an earlier one
                        store      the port at which rank 0 of the round serves PyTorch's store
                        finished   its work is done
    server -> process   round      number, rank and size of the round
                        store      the port of the round's store
                        broken     a rank was lost before the store was there; ask again
                        updated    a process waits to join: ask for a new round when that is convenient
                        ended      the run is done without this process

A round is formed when every connected process of the last one is ready and there are at least ``min_size``; processes
that wait to join are in it. The first waits for all processes that the launcher has started. Processes that have
trained come first, so rank 0 has the state of the run. When a process has finished, no new ones are taken in, and those
that have trained and lose a rank finish without it. A connection that closes is a process that is lost. Every user of
this machine can open connections: those that have not registered are few, and have ``REGISTER_S`` seconds.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from hoop.errors import HoopError
from hoop.texts import parse_json
from hoop.transport.accepting import AcceptingSocket, OutOfDescriptors, pending_limit

log = logging.getLogger("hoop.launch")
LOOPBACK = "127.0.0.1"
ADDRESS_VARIABLE, TOKEN_VARIABLE = "HOOP_RENDEZVOUS", "HOOP_RENDEZVOUS_TOKEN"
MAX_MESSAGE_BYTES = 1 << 16
MAX_UNREGISTERED = 256
"""Most connections that have not registered; a further one takes the place of the oldest."""
REGISTER_S = 60.0
"""Seconds that a connection has to register."""
POLL_S = 1.0
"""Seconds between the looks for connections that have not registered in time."""


@dataclass(eq=False)
class _Process:
    """A connected process."""

    link: socket.socket
    until: float
    """When it must have registered (``time.monotonic``)."""
    unread: bytes = b""
    slot: int = -1
    """Number with which the process has registered; -1: it has not."""
    in_round: bool = False
    waiting: bool = False
    has_state: bool = False


class RendezvousServer:
    """Listens on loopback from the constructor to ``close``, in a thread of its own."""

    def __init__(self, size: int, min_size: int) -> None:
        """``size``: the processes that the launcher starts; ``min_size``: the fewest ranks of a round."""
        self._expected, self._min_size = size, min_size
        self._token = secrets.token_hex(16)
        self._listener = socket.create_server((LOOPBACK, 0))
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._accepting = AcceptingSocket(self._listener, self._selector)
        self._max_unregistered = pending_limit(MAX_UNREGISTERED)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._processes: list[_Process] = []
        self._round = 0
        self._store_announced = True
        self._finished = False
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="hoop-rendezvous", daemon=True)
        self._thread.start()

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a process that takes part."""
        host, port = self._listener.getsockname()
        return {ADDRESS_VARIABLE: f"{host}:{port}", TOKEN_VARIABLE: self._token}

    @property
    def rounds(self) -> int:
        """How many rounds have been formed."""
        return self._round

    def process_ended(self, replaced: bool) -> None:
        """The launcher says that a process has ended: one fewer will come, unless it is replaced."""
        with self._lock:
            self._expected -= not replaced
            self._form_round()

    def close(self) -> None:
        self._closing = True
        self._wake.send(b"x")
        self._thread.join()
        for process in self._processes:
            process.link.close()
        self._selector.close()
        for one in (self._listener, self._wake, self._woken):
            one.close()

    # ---- the thread

    def _serve(self) -> None:
        while not self._closing:
            ready = self._selector.select(self._accepting.timeout(POLL_S if self._unregistered() else None))
            self._accepting.resume_if_due()
            for key, _ in ready:
                with self._lock:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.data, _Process) and key.data in self._processes:
                        self._receive(key.data)
            with self._lock:  # the launcher's thread may be forming a round of the same list
                for process in self._unregistered():
                    if process.until < time.monotonic():
                        self._drop(process)

    def _unregistered(self) -> list[_Process]:
        """Connections that have not registered, the oldest first."""
        return [process for process in self._processes if process.slot < 0]

    def _accept(self) -> None:
        """Accepts a connection. Too many that do not register cannot keep others out: the oldest makes room."""
        unregistered = self._unregistered()
        try:
            link = self._accepting.accept()
        except OutOfDescriptors:
            if unregistered:
                self._drop(unregistered[0])
            else:
                self._accepting.pause()
            return
        if link is None:
            return
        if len(unregistered) >= self._max_unregistered:
            self._drop(unregistered[0])
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setblocking(False)
        process = _Process(link, time.monotonic() + REGISTER_S)
        self._processes.append(process)
        self._selector.register(link, selectors.EVENT_READ, process)

    def _drop(self, process: _Process) -> None:
        """Closes a connection that is no process's."""
        self._selector.unregister(process.link)
        process.link.close()
        self._processes.remove(process)

    def _receive(self, process: _Process) -> None:
        try:
            data = process.link.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(process.unread) > MAX_MESSAGE_BYTES:
            self._lose(process)
            return
        *lines, process.unread = (process.unread + data).split(b"\n")
        for line in lines:
            try:
                self._handle(process, parse_json(line))
            except (HoopError, ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
                if process.slot < 0:  # anyone's
                    log.debug("rendezvous: closing a connection after the message %r: %s", line[:100], error)
                    self._drop(process)
                    return
                log.warning("rendezvous: closing a connection after the message %r: %s", line[:100], error)
                self._lose(process)
                return

    def _handle(self, process: _Process, message: dict[str, Any]) -> None:
        kind = message["type"]
        if kind == "register":
            if not hmac.compare_digest(str(message["token"]).encode(), self._token.encode()):
                raise ValueError("a token of another run")
            process.slot = max(0, int(message["slot"]))
            return
        if process.slot < 0:
            raise ValueError("a message before register")
        if kind == "ready":
            process.waiting, process.has_state = True, bool(message["has_state"])
            if self._finished and not process.has_state:
                process.waiting = False
                self._send(process, {"type": "ended"})
            elif not process.in_round:
                self._notify_update()
            self._form_round()
        elif kind == "store":
            self._store_announced = True
            for one in self._processes:
                if one.in_round and one is not process:
                    self._send(one, {"type": "store", "port": int(message["port"])})
        elif kind == "finished":
            self._finished = True
            process.in_round = process.waiting = False
            for one in self._processes:
                if one.waiting and not one.has_state:
                    one.waiting = False
                    self._send(one, {"type": "ended"})
            self._form_round()
        else:
            raise ValueError(f"an unknown type {kind!r}")

    def _notify_update(self) -> None:
        """Says to the ranks of the round that a process waits to join."""
        for one in self._processes:
            if one.in_round and not one.waiting:
                self._send(one, {"type": "updated"})

    def _lose(self, process: _Process) -> None:
        self._drop(process)
        if process.in_round and not self._store_announced:
            self._store_announced = True
            for one in self._processes:
                if one.in_round:
                    self._send(one, {"type": "broken"})
        self._form_round()

    def _form_round(self) -> None:
        waiting = [one for one in self._processes if one.waiting]
        busy = [one for one in self._processes if one.in_round and not one.waiting]
        fewest = self._expected if not self._round else 1 if self._finished else self._min_size
        if busy or not waiting or len(waiting) < fewest:
            return
        self._round += 1
        self._store_announced = False
        waiting.sort(key=lambda one: (not one.has_state, one.slot))
        for rank, process in enumerate(waiting):
            process.in_round, process.waiting = True, False
            number, size = self._round, len(waiting)
            self._send(process, {"type": "round", "number": number, "rank": rank, "size": size})

    def _send(self, process: _Process, message: dict[str, Any]) -> None:
        """A process that does not read has died or will be found dead: its connection closes."""
        with contextlib.suppress(OSError):
            process.link.send(json.dumps(message).encode() + b"\n")
