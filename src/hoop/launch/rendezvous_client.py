"""One process's connection to the ``RendezvousServer`` of its launcher. The server's file describes the messages."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hoop.errors import DeadlineExceeded, MembershipChanged, PeerLost
from hoop.launch.rendezvous_server import ADDRESS_VARIABLE, TOKEN_VARIABLE
from hoop.texts import parse_json
from hoop.topology import Address

CONNECT_S = 30.0


@dataclass(frozen=True)
class Round:
    """The place of this process in a round."""

    number: int
    rank: int
    size: int


class RunEnded(Exception):
    """The other processes have finished the run: nothing is left to do for this one."""


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher with a rendezvous server started this process."""
    return bool(environ.get(ADDRESS_VARIABLE))


class RendezvousClient:
    """Connects and registers in the constructor. A thread reads until ``close``."""

    def __init__(self, environ: Mapping[str, str], timeout_s: float) -> None:
        """``timeout_s``: the longest wait for a round."""
        self._timeout_s = timeout_s
        address = Address.parse(environ[ADDRESS_VARIABLE], ADDRESS_VARIABLE)
        self._link = socket.create_connection((address.host, address.port), CONNECT_S)
        self._link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._link.settimeout(None)
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.updated = threading.Event()
        """Set when a process waits to join; cleared by ``next_round``."""
        slot = int(environ.get("LOCAL_RANK", "0"))
        self._send({"type": "register", "token": environ[TOKEN_VARIABLE], "slot": slot})
        self._thread = threading.Thread(target=self._read, name="hoop-rendezvous", daemon=True)
        self._thread.start()

    def next_round(self, has_state: bool) -> Round:
        """Waits until the launcher forms a round that this process is a rank of."""
        while not self._messages.empty():  # of the last round
            self._messages.get_nowait()
        self._send({"type": "ready", "has_state": has_state})
        message = self._wait("round")
        self.updated.clear()
        return Round(int(message["number"]), int(message["rank"]), int(message["size"]))

    def announce_store(self, port: int) -> None:
        """Rank 0 says where it serves the store."""
        self._send({"type": "store", "port": port})

    def store_port(self) -> int:
        """Where rank 0 serves the store; MembershipChanged if a rank was lost before: ask for the next round."""
        return int(self._wait("store")["port"])

    def finish(self) -> None:
        """Says that the work of this process is done."""
        self._send({"type": "finished"})

    def close(self) -> None:
        self._link.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._link.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._link.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise PeerLost(f"the launcher of this run is gone ({error}); start it again") from None

    def _wait(self, kind: str) -> dict[str, Any]:
        try:
            message = self._messages.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(
                f"no {kind} within {self._timeout_s:g} s: too few processes are left, or one of them makes no "
                "collective and so does not notice that a rank was lost (--elastic-timeout)"
            ) from None
        match message["type"]:
            case "ended":
                raise RunEnded
            case "lost":
                raise PeerLost("the launcher of this run is gone; start it again")
            case "broken":
                raise MembershipChanged("a rank was lost while the round began")
        return message

    def _read(self) -> None:
        with self._link.makefile("rb") as lines:
            try:
                for line in lines:
                    self._take(parse_json(line))
            except (OSError, ValueError):
                pass
        self._messages.put({"type": "lost"})

    def _take(self, message: dict[str, Any]) -> None:
        if message["type"] == "updated":
            self.updated.set()
        else:
            self._messages.put(message)
