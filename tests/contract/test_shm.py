"""Shared memory's own: when a rank may go."""

from __future__ import annotations

import threading
import time

import pytest

from hoop.errors import DeadlineExceeded
from hoop.topology import Address
from hoop.transport.handshake import host_identity
from hoop.transport.shm import ShmTransport


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
        with pytest.raises(DeadlineExceeded):
            first.gather(time.monotonic() + 0.2)
        slow.let_in.set()
        first.gather(time.monotonic() + 10)
        first.close()
        second.gather(time.monotonic() + 10)
    finally:
        slow.let_in.set()
        quick.close()
        slow.close()
