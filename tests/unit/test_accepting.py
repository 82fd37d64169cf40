"""A listening socket without descriptors leaves its selector for a while, so that its thread does not spin."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Iterator
from typing import cast

import pytest

from hoop import resources
from hoop.transport import accepting
from hoop.transport.accepting import PAUSE_S, AcceptingSocket, OutOfDescriptors, pending_limit
from hoop.wire.channels import server_options


class Listener:
    """Always readable; ``accept`` fails with ``error``."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.reader, self.writer = os.pipe()
        os.write(self.writer, b"!")

    def fileno(self) -> int:
        return self.reader

    def accept(self) -> tuple[socket.socket, object]:
        raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener(errno.EMFILE)
    yield one
    os.close(one.reader)
    os.close(one.writer)


def test_it_pauses_and_comes_back(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with selectors.DefaultSelector() as selector:
        one = AcceptingSocket(cast("socket.socket", listener), selector)
        assert (one.timeout(None), one.timeout(3.0)) == (None, 3.0)
        assert len(selector.select(0)) == 1
        with pytest.raises(OutOfDescriptors):
            one.accept()
        one.pause()
        one.pause()
        assert selector.select(0) == [], "the thread would spin"
        assert one.timeout(None) == one.timeout(3.0) == pytest.approx(PAUSE_S)
        assert one.timeout(0.0) == 0
        one.resume_if_due()
        assert selector.select(0) == []
        now += 1.01 * PAUSE_S
        assert one.timeout(None) == 0
        one.resume_if_due()
        assert len(selector.select(0)) == 1
        assert one.timeout(None) is None


def test_a_connection_that_is_gone_is_no_reason_to_pause(listener: Listener) -> None:
    with selectors.DefaultSelector() as selector:
        for error in (errno.ECONNABORTED, errno.EAGAIN):
            listener.error = error
            one = AcceptingSocket(cast("socket.socket", listener), selector)
            assert one.accept() is None
            selector.unregister(listener)


def test_pending_connections_leave_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((None, 1024), (100_000, 1024), (1024, 256), (2, 1)):
        monkeypatch.setattr(accepting, "descriptor_limit", lambda limit=limit: limit)
        assert pending_limit(1024) == most


def test_the_soft_limit_of_open_files_is_raised() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lower = soft - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (lower, hard))
    try:
        resources.raise_descriptor_limit(lower)
        assert resources.descriptor_limit() == lower
        resources.raise_descriptor_limit(soft)
        assert (resources.descriptor_limit() or soft) >= soft
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_bounds_its_connections() -> None:
    options = dict(server_options(1024, 512))
    assert options["grpc.max_allowed_incoming_connections"] == 512
    assert 0 < options["grpc.server_handshake_timeout_ms"] < options["grpc.max_connection_idle_ms"]
    assert "grpc.max_allowed_incoming_connections" not in dict(server_options(1024))
