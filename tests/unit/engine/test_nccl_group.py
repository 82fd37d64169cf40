"""The conditions under which ranks use NCCL, and the interface that it listens on; NCCL itself is not needed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hoop.collectives.communicator import Communicator
from hoop.engine.stage import nccl_group
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.device_group import DeviceGroup
from hoop.engine.stage.nccl_group import INTERFACE, SWITCH, agree, open_nccl_group
from hoop.engine.stage.peer_row_selection import open_group
from hoop.topology import Address
from hoop.transport.inproc import InprocTransport
from hoop.transport.interfaces import interface_addresses, interface_of

LONG_S = 60.0


class NamedGpu(Accelerator):
    """A GPU with this name, which computes nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(torch.device("cpu"))
        self.cuda, self._name = True, name

    @property
    def identity(self) -> str:
        return self._name


class CountingBackend:
    """Counts how often it is aborted."""

    def __init__(self) -> None:
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1


@pytest.fixture
def unused(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has not used NCCL."""
    for name in ("problem", "interface"):
        monkeypatch.setattr(nccl_group._Past, name, "")
    for name in (SWITCH, INTERFACE):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.pop(INTERFACE, None)


def on_ranks(function: Callable[[Communicator], object], host: str = "127.0.0.1", size: int = 3) -> list[object]:
    """The results of a function, in rank order; the ranks are threads with addresses of this host."""
    transports = [InprocTransport(Address(host, 0)) for _ in range(size)]
    peers = [one.address for one in transports]
    ranks = [Communicator(one.endpoint(3, 1, rank, peers)) for rank, one in enumerate(transports)]
    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(function, ranks, timeout=LONG_S))
    for one in ranks:
        one.close()
    for transport in transports:
        transport.close()
    return found


def opened(names: list[str], host: str = "127.0.0.1") -> set[object]:
    """The reason why ranks with these GPUs do not use NCCL, which is the same at all of them."""
    found = on_ranks(lambda comm: open_nccl_group(comm, NamedGpu(names[comm.rank]), LONG_S), host, len(names))
    return set(found)


def test_an_emulated_gpu_does_not_use_nccl() -> None:
    found = on_ranks(lambda comm: open_group(comm, Accelerator(torch.device("cpu")), LONG_S))
    assert found == ["the GPU is emulated"] * 3


@pytest.mark.skipif(torch.distributed.is_nccl_available(), reason="PyTorch has NCCL")
def test_without_nccl(unused: None) -> None:
    assert opened(["a", "b"]) == {f"rank 0: PyTorch {torch.__version__} is built without NCCL"}


def test_a_variable_switches_it_off(unused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert opened(["a", "b"]) == {"rank 0: HOOP_NCCL=0"}


def test_one_rank_is_enough_to_refuse(unused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_group, "_problem", lambda comm, gpu: "no NCCL" if comm.rank == 2 else "")
    assert opened(["a", "b", "c"]) == {"rank 2: no NCCL"}


def test_ranks_that_share_a_gpu_do_not_use_nccl(unused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_group, "_problem", lambda comm, gpu: "")
    assert opened(["a", "b", "a"]) == {"ranks 0 and 2 share a GPU, which NCCL refuses"}


def test_a_failure_of_one_rank_is_remembered_by_all(unused: None) -> None:
    backends = [CountingBackend() for _ in range(3)]
    said = threading.Barrier(3)

    def fail(comm: Communicator) -> object:
        group = DeviceGroup(backends[comm.rank], comm.endpoint, torch.device("cpu"))  # type: ignore[arg-type]
        first = agree(comm, group, "", LONG_S)
        assert first is group
        said.wait(LONG_S)
        return agree(comm, group, "no route" if comm.rank == 1 else "", LONG_S)

    assert on_ranks(fail) == ["rank 1: no route"] * 3
    assert [one.aborted for one in backends] == [1] * 3
    assert nccl_group._Past.problem == "NCCL failed before (rank 1: no route)"


def test_nccl_listens_where_its_rank_does(unused: None) -> None:
    def choose(comm: Communicator) -> str:
        return nccl_group._choose_interface(comm)

    assert on_ranks(choose, size=1) == [""]
    assert os.environ[INTERFACE] == "=lo"
    nccl_group._Past.interface = "eth7"  # NCCL has read its environment, and does not read it again
    assert on_ranks(choose, size=1) == ["NCCL of this process listens on eth7, and these ranks need lo"]


def test_an_address_that_no_interface_has_is_refused(unused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(comm: Communicator) -> str:
        return nccl_group._choose_interface(comm)

    (refusal,) = on_ranks(choose, host="192.0.2.77", size=1)
    assert refusal == f"no network interface of this host has the address 192.0.2.77; {INTERFACE} can name one"
    monkeypatch.setenv(INTERFACE, "eth0")  # the user knows better
    assert on_ranks(choose, host="192.0.2.77", size=1) == [""]
    assert os.environ[INTERFACE] == "eth0"


def test_interfaces_are_found_by_their_addresses() -> None:
    names = {name for _, name in socket.if_nameindex()}
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    assert interface_of("192.0.2.77") == interface_of("no.such.host.invalid") == ""
    assert set(interface_addresses().values()) <= names


def test_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOP_TEST_ONE", "before")
    monkeypatch.delenv("HOOP_TEST_TWO", raising=False)
    with nccl_group._environment({"HOOP_TEST_ONE": "inside", "HOOP_TEST_TWO": "inside"}):
        assert os.environ["HOOP_TEST_ONE"] == os.environ["HOOP_TEST_TWO"] == "inside"
    assert os.environ["HOOP_TEST_ONE"] == "before"
    assert "HOOP_TEST_TWO" not in os.environ
