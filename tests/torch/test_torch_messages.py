"""Point-to-point messages: tags, any source, batches, dtypes, sizes, and matching."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hoop.errors import HoopError
from hoop.torch_backend import p2p
from hoop.torch_backend.p2p import MessageKind, P2PMessage, P2PRequest, TagMatcher

RunRanks = Callable[..., list[Any]]


def tags(rank: int) -> None:
    if rank == 0:
        for tag in (3, 1, 2):
            dist.send(torch.full((2,), float(tag)), 1, tag=tag)
        dist.send(torch.zeros(0), 1)
    else:
        for tag in (1, 2, 3):
            tensor = torch.zeros(2)
            assert dist.recv(tensor, 0, tag=tag) == 0
            assert tensor.tolist() == [tag, tag]
        dist.recv(torch.zeros(0), 0)


def test_receives_match_by_tag(run_ranks: RunRanks) -> None:
    run_ranks(2, tags)


def any_source(rank: int) -> list[int]:
    if rank != 0:
        dist.send(torch.tensor([rank, rank * rank]), 0)
        return []
    sources = []
    for _ in range(3):
        tensor = torch.zeros(2, dtype=torch.int64)
        source = dist.recv(tensor)
        assert tensor.tolist() == [source, source * source]
        sources.append(source)
    return sources


def test_any_source(run_ranks: RunRanks) -> None:
    assert sorted(run_ranks(4, any_source)[0]) == [1, 2, 3]


def batches(rank: int) -> None:
    size = dist.get_world_size()
    next_rank, previous_rank = (rank + 1) % size, (rank - 1) % size
    large = torch.full((2_000_000,), float(rank))  # larger than any socket buffer
    received, strided = torch.zeros(2_000_000), torch.zeros(6)
    for receive_first in (True, False):
        ops = [
            dist.P2POp(dist.irecv, received, previous_rank),
            dist.P2POp(dist.irecv, strided[::2], previous_rank, tag=7),
            dist.P2POp(dist.isend, large, next_rank),
            dist.P2POp(dist.isend, torch.full((3,), float(rank)), next_rank, tag=7),
        ]
        for work in dist.batch_isend_irecv(ops if receive_first else ops[::-1]):
            work.wait()
        assert bool((received == previous_rank).all())
        assert strided.tolist() == [previous_rank, 0, previous_rank, 0, previous_rank, 0]
    to_self = torch.zeros(2)
    receiving = dist.irecv(to_self, rank)
    dist.isend(torch.ones(2), rank)
    assert receiving is not None
    receiving.wait()
    assert to_self.tolist() == [1, 1]
    # A pending receive blocks neither collectives nor sends.
    waiting = dist.irecv(received, previous_rank)
    dist.barrier()
    dist.send(large, next_rank)
    assert waiting is not None
    waiting.wait()


def test_batches_and_large_messages(run_ranks: RunRanks) -> None:
    run_ranks(3, batches)


def dtypes(rank: int) -> None:
    for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.float16, torch.int16):
        tensor = torch.ones(3, dtype=dtype) if rank == 0 else torch.zeros(3, dtype=dtype)
        if rank == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
            assert tensor.tolist() == torch.ones(3, dtype=dtype).tolist()
    objects: list[Any] = [{"a": 1}, "b"] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(objects, 1)
    else:
        dist.recv_object_list(objects, 0)
    assert objects == [{"a": 1}, "b"]


def test_dtypes_and_objects(run_ranks: RunRanks) -> None:
    run_ranks(2, dtypes)


def wrong_sizes(rank: int) -> None:
    if rank == 0:
        dist.send(torch.zeros(3), 1)
        dist.send(torch.ones(2), 1)
    else:
        with pytest.raises(RuntimeError, match=r"rank 0 sent 12 bytes with tag 0, .* has 8"):
            dist.recv(torch.zeros(2), 0)
        tensor = torch.zeros(2)
        dist.recv(tensor, 0)
        assert tensor.tolist() == [1, 1], "the next message is not affected"
    world = dist.group.WORLD
    assert world is not None
    with pytest.raises(ValueError, match=r"rank 2 is not in 0\.\.1"):
        world.send([torch.zeros(1)], 2, 0)


def test_a_message_of_the_wrong_size_raises(run_ranks: RunRanks) -> None:
    run_ranks(2, wrong_sizes)


# ---- matching, without links


def request(peer: int | None, tag: int, size: int = 2) -> tuple[P2PRequest, list[tuple[HoopError | None, int]]]:
    completions: list[tuple[HoopError | None, int]] = []
    data = np.zeros(size, np.uint8)
    return P2PRequest(
        False, peer, MessageKind.MESSAGE, tag, data, None, 0.0, lambda *completion: completions.append(completion)
    ), completions


def message(peer: int, tag: int, byte: int = 0, size: int = 2) -> P2PMessage:
    return P2PMessage(peer, MessageKind.MESSAGE, tag, np.full(size, byte, np.uint8))


def test_receives_are_matched_in_order() -> None:
    matcher = TagMatcher()
    first, _ = request(None, 1)
    second, _ = request(2, 1)
    assert not matcher.post_receive(first)
    assert not matcher.post_receive(second)
    assert matcher.match(2, MessageKind.MESSAGE, 9) is None
    assert matcher.match(2, MessageKind.BARRIER, 1) is None
    assert matcher.match(2, MessageKind.MESSAGE, 1) is first
    assert matcher.match(3, MessageKind.MESSAGE, 1) is None
    assert matcher.match(2, MessageKind.MESSAGE, 1) is second


def test_unexpected_messages_are_received_in_order() -> None:
    matcher = TagMatcher()
    for byte in (5, 6):
        matcher.add_unexpected(message(1, 0, byte))
    for byte in (5, 6):
        receive, completions = request(1, 0)
        assert matcher.post_receive(receive)
        assert completions == [(None, 1)]
        assert receive.data.tolist() == [byte, byte]


def test_a_peer_is_not_read_beyond_the_limit_until_a_receive_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2p, "UNEXPECTED_BYTES", 4)
    matcher = TagMatcher()
    matcher.add_unexpected(message(1, 0, size=4))
    assert list(matcher.readable_peers([1, 2])) == [2]
    receive, _ = request(1, 9)
    matcher.post_receive(receive)
    assert list(matcher.readable_peers([1, 2])) == [1, 2]
