"""A coordinator that cannot start: its error reaches the process that waits for its address."""

from __future__ import annotations

import os
import socket

import pytest

from hoop.errors import FailedPrecondition
from hoop.launch import forked
from hoop.servers.coordinator import CoordinatorConfig


def test_a_port_in_use_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "BIND_S", 0.0)
    address_read, address_write = os.pipe()
    parent_read, parent_write = os.pipe()
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            forked.run_coordinator(CoordinatorConfig(port=port), address_write, parent_read)
        with pytest.raises(FailedPrecondition, match=rf"cannot listen on 127.0.0.1:{port}: .*--port N, on every rank"):
            forked._coordinator_address(address_read)
    finally:
        for descriptor in (address_write, parent_read, parent_write):
            os.close(descriptor)
