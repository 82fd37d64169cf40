"""Shared memory only: when a rank may exit, and that a killed rank leaves no file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ranks import LONG_S, deadline_in

from hoop.errors import DeadlineExceeded, MembershipChanged
from hoop.memory import Arena
from hoop.topology import Address
from hoop.transport import semaphore
from hoop.transport.base import SharedEndpoint
from hoop.transport.shm_endpoint import ShmEndpoint
from hoop.transport.shm_listener import ShmTransport, host_identity
from hoop.transport.shm_segment import PAGE, create_shared_memory, map_bytes


class _DelayedTransport(ShmTransport):
    """Accepts no connection until ``may_accept`` is set."""

    def __init__(self, address: Address) -> None:
        self.may_accept = threading.Event()
        super().__init__(address)

    def _accept(self) -> None:
        self.may_accept.wait(LONG_S)
        super()._accept()


def test_wait_for_peers_returns_once_the_peers_have_opened_its_memory() -> None:
    """Otherwise a rank could exit, and unlink its memory, before a slower rank has opened it."""
    here = Address(host_identity(), 0)
    quick, slow = ShmTransport(here), _DelayedTransport(here)
    try:
        peers = [quick.address, slow.address]
        first, second = quick.endpoint(7, 1, 0, peers), slow.endpoint(7, 1, 1, peers)
        assert isinstance(first, SharedEndpoint)
        assert isinstance(second, SharedEndpoint)
        with pytest.raises(DeadlineExceeded):
            first.wait_for_peers(deadline_in(0.2))
        slow.may_accept.set()
        first.wait_for_peers(deadline_in())
        first.close()
        second.wait_for_peers(deadline_in())
    finally:
        slow.may_accept.set()
        quick.close()
        slow.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_closed_endpoint_does_not_keep_the_memory_of_its_peers(tmp_path: Path) -> None:
    """A task refers to its endpoints of all generations: the arena of a device that was lost could not be freed."""
    here = Address(host_identity(), 0)

    def mappings(arena: Arena) -> int:
        return Path("/proc/self/maps").read_text().count(arena.path.name)

    with Arena.create(tmp_path / "first", 1 << 20) as one, Arena.create(tmp_path / "second", 1 << 20) as other:
        transports = [ShmTransport(here, one), ShmTransport(here, other)]
        try:
            peers = [transport.address for transport in transports]
            first, second = (transport.endpoint(7, 1, rank, peers) for rank, transport in enumerate(transports))
            for endpoint in (first, second):
                assert isinstance(endpoint, SharedEndpoint)
                endpoint.wait_for_peers(deadline_in())
            assert mappings(other) == 2  # its owner's and its peer's
            first.close()
            assert mappings(other) == 1
            second.close()
        finally:
            for transport in transports:
                transport.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_mapping_holds_no_descriptor_and_ends_with_its_last_array() -> None:
    """The arrays of an ended job may stay until a garbage collection; its descriptors must not."""

    def open_files() -> list[str]:
        return sorted(os.listdir("/proc/self/fd"))

    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:hoop")

    descriptor = create_shared_memory(2 * PAGE)
    files, maps = open_files(), mappings()
    array = map_bytes(descriptor, PAGE, PAGE)
    part = array[8:16].data
    assert (open_files(), mappings()) == (files, maps + 1)
    array[8] = 7
    assert os.pread(descriptor, 1, PAGE + 8) == b"\x07"
    for start, size in ((PAGE, PAGE + 1), (2 * PAGE, PAGE), (0, 0)):
        with pytest.raises(ValueError, match="are not in a file"):
            map_bytes(descriptor, start, size)
    os.close(descriptor)
    del array
    assert part[0] == 7
    assert mappings() == maps + 1
    del part
    assert mappings() == maps


def test_a_sender_that_is_woken_to_give_up_does_not_overwrite_a_block_that_may_still_be_read() -> None:
    """The receiver may be stopped in the middle of the block; the message would be a mixture."""
    here = Address(host_identity(), 0)
    with ShmTransport(here) as one, ShmTransport(here) as other, ThreadPoolExecutor(1) as thread:
        peers = [one.address, other.address]
        sender, receiver = one.endpoint(7, 1, 0, peers), other.endpoint(7, 1, 1, peers)
        assert isinstance(sender, ShmEndpoint)
        assert isinstance(receiver, SharedEndpoint)
        deadline = time.monotonic() + 60
        for endpoint in (sender, receiver):
            endpoint.wait_for_peers(deadline)
        sender.send(1, memoryview(bytes(range(256)) * 4096), deadline)
        first_block = sender.segments[0].ring_blocks(1)[0]
        before = bytes(first_block)
        flushing = thread.submit(sender.flush, deadline)
        while not flushing.running():
            time.sleep(0.001)
        sender.abort(MembershipChanged("generation 2 begins"))
        assert isinstance(flushing.exception(), MembershipChanged)
        assert bytes(first_block) == before


def shm_files(pid: int) -> list[Path]:
    """The files of a process in /dev/shm: names of semaphores and of memory contain its id."""
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


def test_a_rank_killed_before_its_peer_connects_leaves_no_file() -> None:
    """Its semaphores are in its memory, which has no name, so a kill at any moment leaves no file."""
    slow = _DelayedTransport(Address(host_identity(), 0))
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
        assert shm_files(rank.pid) == []
    finally:
        slow.may_accept.set()
        slow.close()


def test_named_semaphores_are_unlinked_once_all_ranks_have_opened_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on macOS."""
    monkeypatch.setattr(semaphore, "_LIBC", None)
    here = Address(host_identity(), 0)
    one, other = ShmTransport(here), _DelayedTransport(here)
    try:
        peers = [one.address, other.address]
        first, second = one.endpoint(7, 1, 0, peers), other.endpoint(7, 1, 1, peers)
        assert isinstance(first, SharedEndpoint)
        assert isinstance(second, SharedEndpoint)
        assert shm_files(os.getpid()) != [] or not Path("/dev/shm").exists()
        other.may_accept.set()
        deadline = deadline_in()
        first.wait_for_peers(deadline)
        second.wait_for_peers(deadline)
        assert shm_files(os.getpid()) == []
        first.send(1, memoryview(b"hello"), deadline)
        into = bytearray(5)
        second.recv_into(0, memoryview(into), deadline)
        assert into == b"hello"
    finally:
        other.may_accept.set()
        one.close()
        other.close()
