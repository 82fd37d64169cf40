"""Shared memory's own: when a rank may go, and that nothing of a killed one stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hoop.errors import DeadlineExceeded
from hoop.topology import Address
from hoop.transport import semaphore
from hoop.transport.base import SharedEndpoint
from hoop.transport.shm_listener import ShmTransport, host_identity


class _Slow(ShmTransport):
    """Lets nobody in until told to."""

    def __init__(self, address: Address) -> None:
        self.let_in = threading.Event()
        super().__init__(address)

    def _accept(self) -> None:
        self.let_in.wait(10)
        super()._accept()


def test_a_rank_has_gathered_only_when_the_others_hold_what_is_its_own() -> None:
    """Else it might go, with its memory's name, while a slower rank is still about to open it."""
    here = Address(host_identity(), 0)
    quick, slow = ShmTransport(here), _Slow(here)
    try:
        peers = [quick.address, slow.address]
        first, second = quick.endpoint(7, 1, 0, peers), slow.endpoint(7, 1, 1, peers)
        assert isinstance(first, SharedEndpoint)
        assert isinstance(second, SharedEndpoint)
        with pytest.raises(DeadlineExceeded):
            first.wait_for_peers(time.monotonic() + 0.2)
        slow.let_in.set()
        first.wait_for_peers(time.monotonic() + 10)
        first.close()
        second.wait_for_peers(time.monotonic() + 10)
    finally:
        slow.let_in.set()
        quick.close()
        slow.close()


def named_things(pid: int) -> list[Path]:
    """What the process has made in /dev/shm: names of semaphores and of memory carry its id."""
    shared = Path("/dev/shm")
    return [*shared.glob(f"sem.hoop-{pid:08x}*"), *shared.glob(f"hoop-{pid}-*")]


ALONE = """
import sys
from hoop.topology import Address
from hoop.transport.shm_listener import host_identity
from hoop.transport.shm_listener import ShmTransport

transport = ShmTransport(Address(host_identity(), 0))
endpoint = transport.endpoint(7, 1, 0, [transport.address, Address.parse(sys.argv[1])])
print("made", flush=True)
sys.stdin.read()
"""


def test_a_rank_that_is_killed_before_its_peer_came_leaves_nothing() -> None:
    """Its semaphores lie in its memory, which has no name; there is no moment in which a kill leaves something."""
    slow = _Slow(Address(host_identity(), 0))
    try:
        with subprocess.Popen(
            [sys.executable, "-c", ALONE, str(slow.address)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as rank:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "made\n"
            rank.kill()
        assert named_things(rank.pid) == []
    finally:
        slow.let_in.set()
        slow.close()


def test_where_semaphores_must_have_names_they_go_when_all_have_opened_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on macOS."""
    monkeypatch.setattr(semaphore, "_LIBC", None)
    here = Address(host_identity(), 0)
    one, other = ShmTransport(here), _Slow(here)
    try:
        peers = [one.address, other.address]
        first, second = one.endpoint(7, 1, 0, peers), other.endpoint(7, 1, 1, peers)
        assert isinstance(first, SharedEndpoint)
        assert isinstance(second, SharedEndpoint)
        assert named_things(os.getpid()) != [] or not Path("/dev/shm").exists()
        other.let_in.set()
        soon = time.monotonic() + 10
        first.wait_for_peers(soon)
        second.wait_for_peers(soon)
        assert named_things(os.getpid()) == []
        first.send(1, memoryview(b"hello"), soon)
        into = bytearray(5)
        second.recv_into(0, memoryview(into), soon)
        assert into == b"hello"
    finally:
        other.let_in.set()
        one.close()
        other.close()
