"""PortCheck: a data port is open, closed, of another cluster, of another program, or its process is busy."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from hoop.topology import Address
from hoop.transport.port_check import PortCheck
from hoop.transport.tcp_listener import TcpTransport

LOOPBACK = Address("127.0.0.1", 0)
WAIT_S = 60.0


@contextlib.contextmanager
def data_port(key: bytes = b"") -> Iterator[Address]:
    transport = TcpTransport(LOOPBACK, key=key)
    try:
        yield transport.address
    finally:
        transport.close()


def failure(address: Address, key: bytes = b"", timeout_s: float = WAIT_S) -> str:
    ports = PortCheck(key, timeout_s)
    try:
        return ports.data_port(address).result(WAIT_S)
    finally:
        ports.close()


@pytest.mark.parametrize("key", [b"", b"k" * 32])
def test_an_open_data_port_is_usable(key: bytes) -> None:
    with data_port(key) as address:
        assert failure(address, key) == ""


def test_a_closed_port_is_refused_by_name_of_the_reason() -> None:
    with data_port() as address:
        pass
    assert failure(address) == "Connection refused"


def test_devices_with_different_tokens_cannot_link() -> None:
    with data_port(b"a" * 32) as address:
        assert "have both the same token?" in failure(address, b"b" * 32)
        assert failure(address).startswith("it refused the link: this device wants links that prove themselves")


def test_a_port_of_another_program_is_not_a_data_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = PortCheck(b"", WAIT_S)
        try:
            found = ports.data_port(Address("127.0.0.1", server.getsockname()[1]))
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"220 mail.example.org ready\r\n" * 10)
            assert found.result(WAIT_S)
        finally:
            ports.close()


def test_a_process_that_is_busy_counts_as_reachable() -> None:
    """The kernel accepts the connection; only a connection that cannot be made is evidence."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert failure(Address("127.0.0.1", server.getsockname()[1]), timeout_s=0.2) == ""


def test_a_name_that_does_not_exist_is_reported() -> None:
    assert failure(Address("no-such-host.invalid", 1))


def test_close_ends_an_attempt_that_waits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ports = PortCheck(b"", WAIT_S)
        found = ports.data_port(Address("127.0.0.1", server.getsockname()[1]))
        peer, _ = server.accept()
        with peer:
            ports.close()
            assert found.result(0) == ""
