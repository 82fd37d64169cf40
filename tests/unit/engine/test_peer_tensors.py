"""Tensors between ranks of one host through memory of an emulated accelerator; each rank is a thread here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hoop.collectives.communicator import Communicator
from hoop.engine import peer_tensors as module
from hoop.engine.peer_tensors import PeerTensors
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.peer_memory import PeerMemory, open_peer_memory
from hoop.engine.stage.state import StateVectors
from hoop.engine.tensor_channel import TensorChannel
from hoop.errors import LinkCorrupted
from hoop.memory import Arena
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.topology import Address
from hoop.transport.base import Transport
from hoop.transport.shm_listener import ShmTransport
from hoop.transport.tcp_listener import TcpTransport

LONG_S = 60.0
KIBIBYTES = 256


class Rank:
    """One rank: its arena, accelerator, and channel."""

    def __init__(self, path: Path, scheme: str) -> None:
        self.arena = Arena.create(str(path), KIBIBYTES << 10)
        local = Address("127.0.0.1", 0)
        self.transport: Transport = ShmTransport(local, self.arena) if scheme == "shm" else TcpTransport(local)
        self.accelerator = Accelerator(torch.device("cpu"))
        self.memory: PeerMemory

    def open(self, rank: int, peers: list[Address], used: bool) -> Rank:
        self.communicator = Communicator(self.transport.endpoint(1, 1, rank, peers))
        self.vectors = StateVectors(self.arena, "test.")
        self.memory = open_peer_memory(self.communicator, self.accelerator, self.vectors, used, LONG_S)
        self.channel = TensorChannel(self.communicator.endpoint, PeerTensors(self.memory, self.communicator, LONG_S))
        return self

    def send(self, micro: int, tensor: Tensor, peer: int = 1) -> bool:
        return self.channel.send_from_device(Instruction(InstructionKind.SEND_OUTPUT, 0, micro, peer), tensor, later())

    def receive(self, micro: int, peer: int = 0) -> Tensor:
        return self.channel.expect(Instruction(InstructionKind.RECV_INPUT, 1, micro, peer), later())

    def close(self) -> None:
        self.channel.close()
        self.communicator.close()
        self.transport.close()
        self.arena.close()


def later() -> float:
    return time.monotonic() + LONG_S


OpenRanks = Callable[..., list[Rank]]


@pytest.fixture
def open_ranks(tmp_path: Path) -> Iterator[OpenRanks]:
    opened: list[Rank] = []

    def make(size: int, scheme: str = "shm", unused: tuple[int, ...] = ()) -> list[Rank]:
        ranks = [Rank(tmp_path / f"arena{rank}", scheme) for rank in range(size)]
        peers = [one.transport.address for one in ranks]
        with ThreadPoolExecutor(size) as pool:
            found = pool.map(lambda rank: ranks[rank].open(rank, peers, rank not in unused), range(size))
            opened.extend(found)
        return ranks

    yield make
    for one in opened:
        one.close()


def numbered(number: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def test_tensors_of_all_shapes_and_types_arrive(open_ranks: OpenRanks) -> None:
    sender, receiver = open_ranks(2)
    assert sender.memory.peers == {1}
    tensors = [
        numbered(1, 7, 13),
        numbered(2, 3, 5, 7, 2).contiguous(memory_format=torch.channels_last),
        numbered(3, 9).to(torch.bfloat16),
        torch.arange(5),
        torch.tensor(3.5),
        numbered(4, 1),
        numbered(5, 64, 65)[:, ::2],
    ]
    for micro, tensor in enumerate(tensors):
        assert sender.send(micro, tensor)
        found = receiver.receive(micro)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
        assert found.is_contiguous()
    sent = sender.communicator.endpoint.bytes_sent
    assert sent < 200 * len(tensors) + 4096, "only headers go over the link"
    assert sender.channel.bytes_shared == sum(one.nbytes for one in tensors)


def test_a_slot_is_used_again_when_its_message_was_read(open_ranks: OpenRanks) -> None:
    """Also for a shorter last micro-batch; a longer one gets other memory."""
    sender, receiver = open_ranks(2)
    used = []
    for micro, rows in enumerate((10, 10, 3, 10, 20, 20)):
        assert sender.send(micro, numbered(micro, rows, 100))
        used.append(sender.arena.used)
        assert torch.equal(receiver.receive(micro), numbered(micro, rows, 100))
    assert used[0] == used[1] == used[2] == used[3] < used[4] == used[5]


def test_messages_in_flight_have_slots_of_their_own(open_ranks: OpenRanks) -> None:
    """The sender overwrites its tensors at once, and sends more while none is read."""
    sender, receiver = open_ranks(2)
    used = []
    for step in range(3):
        tensor = torch.empty(50)
        for micro in range(8):
            tensor.copy_(numbered(10 * step + micro, 50))
            assert sender.send(micro, tensor)
        used.append(sender.arena.used)
        with ThreadPoolExecutor(1) as pool:
            flushed = pool.submit(sender.communicator.endpoint.flush, later())  # a link accepts a few messages only
            for micro in range(8):
                assert torch.equal(receiver.receive(micro), numbered(10 * step + micro, 50))
            flushed.result()
    assert used[0] == used[1] == used[2]


def test_ranks_send_to_each_other_before_they_receive(open_ranks: OpenRanks) -> None:
    one, other = open_ranks(2)
    for micro in range(2):
        assert one.send(micro, numbered(micro, 33))
        assert other.send(micro, numbered(100 + micro, 11, 3), peer=0)
    for micro in range(2):
        assert torch.equal(other.receive(micro), numbered(micro, 33))
        assert torch.equal(one.receive(micro, peer=1), numbered(100 + micro, 11, 3))


def test_without_a_slot_or_memory_the_caller_sends_through_the_host(
    open_ranks: OpenRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = open_ranks(2)
    assert not sender.send(0, torch.zeros(KIBIBYTES << 10))
    monkeypatch.setattr(module, "MAX_SLOTS", 2)
    assert sender.send(0, numbered(0, 5))
    assert sender.send(1, numbered(1, 5))
    assert not sender.send(2, numbered(2, 5))
    leaving = Instruction(InstructionKind.SEND_OUTPUT, 0, 2, 1)
    sender.channel.send(leaving, numbered(2, 5), later())
    for micro in range(3):
        assert torch.equal(receiver.receive(micro), numbered(micro, 5))
    assert sender.send(3, numbered(3, 5))
    assert torch.equal(receiver.receive(3), numbered(3, 5))


def test_a_rank_that_shares_nothing_is_no_peer(open_ranks: OpenRanks) -> None:
    ranks = open_ranks(3, unused=(1,))
    assert [one.memory.peers for one in ranks] == [{2}, frozenset(), {0}]
    assert not ranks[0].send(0, numbered(0, 5), peer=1)
    assert ranks[0].send(0, numbered(0, 5), peer=2)


def test_over_tcp_no_memory_is_shared(open_ranks: OpenRanks) -> None:
    ranks = open_ranks(2, "tcp")
    assert [one.memory.peers for one in ranks] == [frozenset(), frozenset()]
    assert not ranks[0].send(0, numbered(0, 5))


def test_a_place_without_shared_memory_is_refused(open_ranks: OpenRanks) -> None:
    sender, receiver = open_ranks(2)
    assert sender.send(0, numbered(0, 5))
    receiver.channel.close()
    with pytest.raises(LinkCorrupted, match="invalid tensor header from rank 0"):
        receiver.receive(0)
