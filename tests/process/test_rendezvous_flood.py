"""Connections that do not register cannot end or hold up the rendezvous of ``hoop run --min-np``."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from random import Random
from threading import Thread

import malformed
import pytest
from malformed import few_open_files

from hoop.launch import rendezvous_server
from hoop.launch.rendezvous_client import RendezvousClient, Round
from hoop.launch.rendezvous_server import ADDRESS_VARIABLE, RendezvousServer
from hoop.topology import Address

WAIT_S = 120.0


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    made = RendezvousServer(2, 2)
    try:
        yield made
    finally:
        made.close()


def connect(server: RendezvousServer) -> socket.socket:
    where = Address.parse(server.variables[ADDRESS_VARIABLE])
    return socket.create_connection((where.host, where.port), WAIT_S)


def check_round(server: RendezvousServer) -> None:
    """Asserts that two processes meet."""
    clients = [RendezvousClient({**server.variables, "LOCAL_RANK": str(slot)}, WAIT_S) for slot in range(2)]
    rounds: list[Round] = []
    threads = [Thread(target=lambda client=client: rounds.append(client.next_round(False))) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted((one.rank, one.size) for one in rounds) == [(0, 2), (1, 2)]
    for client in clients:
        client.finish()
        client.close()


def test_idle_connections_keep_nobody_out(server: RendezvousServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than there may be: each further one takes the place of the oldest."""
    server._max_unregistered = 8
    with ExitStack() as idle:
        links = [idle.enter_context(connect(server)) for _ in range(500)]
        assert links[0].recv(1) == b"", "the oldest was closed"
        check_round(server)


def test_a_process_without_free_descriptors_closes_the_oldest_idle_connection(server: RendezvousServer) -> None:
    with few_open_files(), ExitStack() as idle:
        first = idle.enter_context(connect(server))
        with contextlib.suppress(OSError):  # this process holds both ends
            while True:
                idle.enter_context(connect(server))
        assert first.recv(1) == b""
    check_round(server)


def test_a_connection_that_does_not_register_in_time_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_server, "REGISTER_S", 0.0)
    monkeypatch.setattr(rendezvous_server, "POLL_S", 0.01)
    server = RendezvousServer(2, 2)
    try:
        with connect(server) as link:
            assert link.recv(1) == b""
    finally:
        server.close()


@pytest.mark.parametrize("seed", range(2))
def test_malformed_messages_change_nothing(server: RendezvousServer, seed: int) -> None:
    random = Random(seed)
    texts = [b"[" * 60_000 + b"\n", b'{"type": "register", "token": "\xc3\xa9", "slot": 1}\n', b"x" * 200_000]
    texts += [json.dumps({"type": "register", "token": "\ud800", "slot": 0}).encode() + b"\n"]
    texts += [malformed.rendezvous_lines(random)[0] for _ in range(50)]
    for text in texts:
        with connect(server) as link, contextlib.suppress(OSError):
            link.sendall(text)
    check_round(server)
