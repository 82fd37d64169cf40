"""Rows exchanged over NCCL, as far as one GPU permits it: a group of one rank, and processes that share the GPU.

NCCL refuses two ranks on one GPU of one host. With ``NCCL_HOSTID`` a process says that it is on another host: then NCCL
lets its ranks talk over sockets, as those of two hosts, and takes no notice that they share a GPU. Since NCCL 2.30
``NCCL_MULTI_RANK_GPU_ENABLE`` permits it on one host.
"""

from __future__ import annotations

import os
import time
import traceback
from typing import Any

import pytest
import torch
from faulty_ranks import Fault, run_with_faults
from forked_ranks import checkpoint, differing, tensors_in, train
from reported_rows import check_events
from small_jobs import JOBS, alone_losses, settings
from torch import Tensor

from hoop.collectives.communicator import Communicator
from hoop.collectives.shard_tree import merge_plan
from hoop.engine.stage import peer_row_selection
from hoop.engine.stage.accelerator import Accelerator
from hoop.engine.stage.device_group import DeviceGroup
from hoop.engine.stage.exchanged_rows import ExchangedRows
from hoop.engine.stage.nccl_group import INTERFACE, open_nccl_group
from hoop.topology import Address
from hoop.transport.tcp_listener import TcpTransport

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="PyTorch is built without NCCL"),
]
HOST_ID, SEVERAL_RANKS = "NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"
SEVERAL_RANKS_A_GPU = (2, 30)
"""The first version of NCCL with the second variable."""
LONG_S = 120.0
SHARDS, COUNT = 5, 1001
CUDA: dict[str, Any] = {"accelerator": "cuda", "clip": 0.5}


MODES = ["several hosts", "one host"]


@pytest.fixture(params=MODES)
def exchanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are forked now exchange their rows over NCCL, although they share a GPU; they cannot do otherwise."""
    if request.param == "one host":
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        if version < SEVERAL_RANKS_A_GPU:
            pytest.skip(f"NCCL {'.'.join(map(str, version))} refuses two ranks on one GPU; 2.30 does not")
        monkeypatch.setenv(SEVERAL_RANKS, "1")

    def identity(accelerator: Accelerator) -> str:
        if request.param == "several hosts":
            os.environ[HOST_ID] = f"host of process {os.getpid()}"  # before this process uses NCCL
        return f"GPU of process {os.getpid()}"

    def refuse(*_: object) -> None:
        raise AssertionError("the rows are summed in host memory")

    monkeypatch.setattr(Accelerator, "identity", property(identity))
    monkeypatch.setattr(peer_row_selection, "StagedRows", refuse)


def trained(devices: int, **changes: Any) -> dict[str, Tensor]:
    found = train("tcp" if devices > 1 else "shm", devices, settings("data", **CUDA, **changes), JOBS["convolved"])
    return tensors_in(checkpoint(found))


@pytest.mark.parametrize("devices", [2, 3])
def test_processes_exchange_over_nccl_and_get_the_bits_of_one(devices: int, exchanging: None) -> None:
    assert not differing(trained(devices), trained(1))


def test_a_rank_that_dies_in_an_exchange_over_nccl_changes_no_weight(exchanging: None) -> None:
    job, faults = "convolved", [Fault(1, "shares", 12)]
    results = run_with_faults(3, settings("data", **CUDA), JOBS[job], faults, scheme="tcp")
    found = [results[rank].outcome for rank in sorted(results)]
    assert len(found) == 2
    assert not differing(tensors_in(checkpoint(found)), trained(1))
    assert sum(len(one.of("recovered")) for one in found) >= 1
    check_events([one.events for one in found], alone_losses(job, tuple(CUDA.items())))


def exchange_alone(gradients: Tensor, expected: list[float], repeats: int) -> None:
    """Make a group of one rank ``repeats`` times, sum in it, and abort it."""
    transport = TcpTransport(Address("127.0.0.1", 0))
    accelerator = Accelerator(torch.device("cuda", 0))
    plan = merge_plan(range(SHARDS), SHARDS)
    for generation in range(1, repeats + 1):
        comm = Communicator(transport.endpoint(5, generation, 0, [transport.address]))
        group = open_nccl_group(comm, accelerator, LONG_S)
        assert isinstance(group, DeviceGroup), group
        rows = ExchangedRows(comm, [plan], SHARDS, COUNT, accelerator.device, group)
        assert rows.connect(time.monotonic() + LONG_S) == ""
        total = torch.zeros(COUNT, device=accelerator.device)
        for number in (0, 1):
            rows.own[number].copy_(gradients)
            accelerator.synchronize()
            rows.meet(number, time.monotonic() + LONG_S)
            rows.sum_into(total, number)
            assert total.tolist() == expected
        rows.close()
        comm.close()
    transport.close()


def test_a_group_of_one_rank_is_made_aborted_and_made_again() -> None:
    """In a process of its own: after the first use of CUDA no rank can be forked."""
    gradients = torch.randn(SHARDS, COUNT, generator=torch.Generator().manual_seed(3))
    gradients[1:] = 0  # the only node is in the first row, and has the sum already
    pid = os.fork()
    if not pid:
        code = 1
        try:
            exchange_alone(gradients, gradients[0].tolist(), 3)
            assert os.environ[INTERFACE] == "=lo"
            assert not [name for name in os.environ if name.startswith("TORCH_NCCL_")]
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
