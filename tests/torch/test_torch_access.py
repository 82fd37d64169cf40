"""Another user of the machine cannot take the place of a rank: torch's store tells everybody where the ranks are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from free_ports import free_port
from world import LONG_S

from hoop.errors import HoopError
from hoop.topology import Address
from hoop.torch_backend.p2p import P2PEngine
from hoop.torch_backend.rendezvous import GENERATION
from hoop.transport.link_key import KeyOrigin, own_link_key
from hoop.transport.shm_listener import ABSTRACT
from hoop.transport.tcp_listener import TcpTransport
from hoop.wire.tokens import Token, new_token

RunRanks = Callable[..., list[Any]]
INTRUDER, NOBODY = 2, 65534
STORE_TIMEOUT = timedelta(seconds=LONG_S)


def train_beside_an_intruder(rank: int, port: int) -> Any:
    """Ranks 0 and 1 exchange an object and a sum; the third process is another user's and tries to be rank 1."""
    if rank == INTRUDER:
        "host".encode("idna")  # loads the codec that connections need: nobody may not read root's Python
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, STORE_TIMEOUT, wait_for_workers=False)
    if rank == INTRUDER:
        try:
            return intrude(store)
        finally:
            store.set("intruded", "1")
    if rank == 1:
        dial_late(store)
    dist.init_process_group("hoop", store=store, rank=rank, world_size=2)
    objects = [{"from": "rank 1"}] if rank == 1 else [None]
    if rank == 1:
        dist.send_object_list(objects, 0)
    else:
        dist.recv_object_list(objects, 1)
    total = torch.full((3,), float(rank + 1))
    dist.all_reduce(total)
    dist.barrier()
    return [objects, total.tolist()]


def dial_late(store: Any) -> None:
    """Rank 1 opens its links when the intruder has tried: the first link of a rank is the one that counts."""
    start = P2PEngine.start

    def start_late(self: P2PEngine) -> None:
        store.wait(["intruded"], STORE_TIMEOUT)
        start(self)

    P2PEngine.start = start_late  # type: ignore[method-assign]


def intrude(store: Any) -> list[str]:
    """Tries to link to rank 0 as rank 1, with what everybody can read; returns what happened."""
    store.wait(["0//cpu//hoop/1/addresses/0"], STORE_TIMEOUT)
    number, *_, messages = store.get("0//cpu//hoop/1/addresses/0").decode().split()
    answers = []
    for key in (b"", b"o" * 32):
        with TcpTransport(Address("127.0.0.1", 0), key=key) as transport:
            peers = [Address.parse(messages), transport.address]
            endpoint = transport.endpoint(2 * int(number) + 1, GENERATION, 1, peers)
            until = time.monotonic() + LONG_S
            try:
                endpoint.send(0, memoryview(bytes(24)), until)
                endpoint.recv_into(0, memoryview(bytearray(1)), until)
                answers.append("rank 0 answered")
            except (HoopError, BrokenPipeError) as error:
                answers.append(str(error))
            endpoint.close()
    return answers


@pytest.mark.skipif(not ABSTRACT or os.getuid() != 0, reason="to be somebody else one must be root, on Linux")
def test_another_user_cannot_take_the_place_of_a_rank(run_ranks: RunRanks) -> None:
    first, second, answers = run_ranks(3, train_beside_an_intruder, free_port(), joins=False)
    without_key, with_another = answers
    assert "prove" in without_key or "refused" in without_key, without_key
    assert "prove" in with_another, with_another
    assert first == second == [[{"from": "rank 1"}], [3.0, 3.0, 3.0]]


def test_ranks_have_a_given_token_or_that_of_their_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HOOP_TOKEN", "HOOP_TOKEN_FILE", "HOOP_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    first, second = own_link_key(), own_link_key()
    assert first == second
    assert (first.origin, len(first.secret)) == (KeyOrigin.USER, 32)
    assert (tmp_path / "hoop" / "user.token").stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("HOOP_INSECURE", "1")
    assert own_link_key().origin is KeyOrigin.NONE
    own = new_token()
    monkeypatch.setenv("HOOP_TOKEN", own)
    assert own_link_key().secret == Token.parse(own).link_key
    assert own not in repr(own_link_key())
