"""Requests beyond a limit are refused; the error names the limit and the option that raises it."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from background import HOOP, START_S
from descriptor_stub import Stub

import hoop
from hoop.errors import ResourceExhausted
from hoop.topology import Address
from hoop.wire.channels import LEASE_S, channel_options
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.service import translate

OPEN_FILES = 256
LAB_DEVICE = lab.DESCRIPTOR.services_by_name["GPUDevice"]


def test_an_exceeded_limit_is_refused_with_the_option_that_raises_it(
    start: Callable[..., Any], connect: Callable[..., hoop.Cluster]
) -> None:
    limits = ("--max-communicators", 3, "--communicators-per-client", 2, "--max-message", "1MiB")
    coordinator = start("coordinator", *limits)
    device = start(
        "device",
        "--join",
        coordinator.address,
        "--memory",
        "8MiB",
        "--lab",
        "--max-streams",
        1,
        "--max-message",
        "1MiB",
    )
    assert device.id == 1
    cluster = connect(coordinator.address)

    communicators = [cluster.communicator(1) for _ in range(2)]
    with pytest.raises(ResourceExhausted, match=r"has 2 communicators, its limit.*--communicators-per-client"):
        cluster.communicator(1)
    communicators.pop().destroy()
    communicators.append(cluster.communicator(1))

    with pytest.raises(ResourceExhausted, match=r"larger than max.*--max-message"):
        cluster.copy((1, "x" * (2 << 20)), (1, 0), 8)

    with grpc.insecure_channel(device.address, options=channel_options(LEASE_S)) as channel:
        begin_receive = Stub(channel, LAB_DEVICE).BeginReceive
        low = cluster.status().devices[0].device.min_address
        fields: dict[str, Any] = {"recvBuffAddr": {"value": low}, "numBytes": 8}
        begin_receive(lab.BeginReceiveRequest(streamId={"value": 7}, **fields), timeout=START_S)
        with pytest.raises(grpc.RpcError) as refused:
            begin_receive(lab.BeginReceiveRequest(streamId={"value": 8}, **fields), timeout=START_S)
        error = translate(refused.value)
        assert isinstance(error, ResourceExhausted)
        assert "1 streams are open here" in str(error)
        assert "--max-streams" in str(error)

    with pytest.raises(ResourceExhausted, match="--memory"):
        cluster.device(1).allocate("too much", 1 << 40)


@pytest.mark.slow
def test_connections_without_calls_do_not_use_up_the_descriptors_of_a_coordinator(tmp_path: Path) -> None:
    """More of them than open files that it may have: they get half, and lose them when their time is over."""
    limited = ["sh", "-c", f'ulimit -n {OPEN_FILES}; exec "$@"', "sh", *HOOP, "coordinator"]
    with (
        open(tmp_path / "errors", "wb") as errors,
        subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=errors, text=True) as coordinator,
        ExitStack() as stack,
    ):
        stack.callback(coordinator.terminate)
        assert coordinator.stdout is not None
        address = Address.parse(coordinator.stdout.readline().split()[-1])
        for _ in range(2 * OPEN_FILES):
            stack.enter_context(socket.create_connection((address.host, address.port), START_S))
        with hoop.connect(str(address), connect_timeout=START_S) as cluster:
            assert not cluster.status().devices
