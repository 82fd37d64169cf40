"""``count`` is bytes to some clients and elements to others: ``--count-unit auto``, refusals, and what is reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest
from lab_cluster import LabClient, channel_to, lab, refused
from lab_in_process import Servers, lab_channel, lab_servers

from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.grpc_server import MAX_REPORTS, REPEAT_S, WINDOW_S, ClientReports
from hoop.servers.lab_dialect import CopyLengths, find_unit


@pytest.mark.parametrize(
    ("count", "lengths", "unit"),
    [
        (16, [128, 128], "elements"),
        (128, [128, 128], "bytes"),
        (16, [128], "elements"),
        (64, [128], "bytes"),  # 64 elements are more than was copied
        (16, [1024], ""),  # both fit
        (16, [8], ""),  # neither fits
        (16, [], ""),
        (16, [128, 16], ""),  # the ranks contradict each other
        (12, [12], ""),  # not whole elements
        (12, [96], "elements"),
    ],
)
def test_the_unit_follows_from_the_length_of_the_last_copies(count: int, lengths: list[int], unit: str) -> None:
    assert find_unit(count, lengths) == unit


def test_the_last_copy_to_an_address_counts_and_old_ones_are_forgotten() -> None:
    copies = CopyLengths(most=2)
    copies.record(1, 4096, 64)
    copies.record(2, 4096, 128)
    copies.record(1, 4096, 8)
    assert copies.of([(1, 4096), (2, 4096), (3, 4096)]) == [8, 128]
    copies.record(3, 4096, 16)
    assert copies.of([(1, 4096), (2, 4096), (3, 4096)]) == [8, 16]


def test_reports_do_not_repeat_and_are_bounded() -> None:
    now, texts = 0.0, list[str]()
    reports = ClientReports(texts.append, lambda: now)
    for _ in range(100):
        reports.refused("GroupEnd", "ipv4:127.0.0.1", "NOT_FOUND", "communicator 7 is unknown")
    assert texts == ["GroupEnd of the client at ipv4:127.0.0.1 was refused: NOT_FOUND: communicator 7 is unknown"]
    for number in range(100):
        reports.add(f"text {number}")
    assert len(texts) == MAX_REPORTS
    assert "not reported" in texts[-1]
    now = WINDOW_S
    reports.add("later")
    assert texts[-1] == "later"
    now = REPEAT_S + WINDOW_S
    reports.add("later")
    assert texts[-2:] == ["later", "later"]


# ---- on servers


@contextmanager
def counting(unit: str) -> Iterator[tuple[Servers, grpc.Channel]]:
    config = CoordinatorConfig(count_unit=unit, command="hoop up")
    with lab_servers(2, config) as servers, lab_channel(servers) as channel:
        yield servers, channel


def write_ones(comm: LabClient, count: int) -> list[int]:
    addresses = [comm.address(rank, 64 * rank) for rank in range(2)]
    for rank, address in enumerate(addresses):
        comm.write(rank, address, np.ones(count))
    return addresses


def held(comm: LabClient, addresses: list[int], count: int) -> list[list[float]]:
    return [comm.read(rank, address, count).tolist() for rank, address in enumerate(addresses)]


def test_auto_serves_clients_of_both_units() -> None:
    with counting("auto") as (_, channel):
        for unit in ("bytes", "elements"):
            comm = LabClient(channel, 2, unit)
            addresses = write_ones(comm, 16)
            with refused("INVALID_ARGUMENT", match=r"count: .* no copy is known.* hoop up with --count-unit bytes"):
                comm.all_reduce(lab.SUM, [address + 8 for address in addresses], 8)
            comm.all_reduce(lab.SUM, addresses, 16)
            assert held(comm, addresses, 16) == [[2.0] * 16] * 2
            comm.all_reduce(lab.SUM, [address + 8 for address in addresses], 8)  # the same communicator, the same unit
            assert held(comm, addresses, 16) == [[2.0] + [4.0] * 8 + [2.0] * 7] * 2


def test_a_count_in_the_other_unit_is_reported() -> None:
    with counting("bytes") as (servers, channel):
        comm = LabClient(channel, 2, "elements")
        addresses = write_ones(comm, 16)
        comm.all_reduce(lab.SUM, addresses, 16)
        (event,) = servers.events("lab_call_reported")
        assert "count 16 is taken as bytes, but elements would fit" in event.text
        assert "hoop up with --count-unit auto" in event.text


def test_refused_calls_are_reported_to_the_operator() -> None:
    with counting("bytes") as (servers, channel):
        comm = LabClient(channel, 2)
        for _ in range(3):
            with refused("INVALID_ARGUMENT", match=r"12 bytes .*hoop up --count-unit elements"):
                comm.call("AllReduceRing", commId=comm.id, count=12, memAddrs=places(comm))
        with refused("UNIMPLEMENTED", match="CommSplit is not a call of gpu_sim.GPUCoordinator here; it has AllReduce"):
            channel.unary_unary("/gpu_sim.GPUCoordinator/CommSplit", None, None)(b"", timeout=120)
        texts = [event.text for event in servers.events("lab_call_reported")]
        assert [text.partition(":")[0] for text in texts] == [
            "AllReduceRing of the client at ipv4",
            "CommSplit of the client at ipv4",
        ]
        with channel_to(str(servers.info(1).address)) as device, refused("NOT_FOUND"):
            request = lab.GetStreamStatusRequest(streamId=lab.StreamId(value=77))
            lab.Stub(device, "GPUDevice").GetStreamStatus(request, timeout=120)
        (report,) = servers.reports
        assert report.startswith("device 2: GetStreamStatus of the client at ipv4:127.0.0.1 was refused: NOT_FOUND: ")


def places(comm: LabClient) -> dict[int, Any]:
    return {rank: lab.MemAddr(value=comm.address(rank)) for rank in range(2)}


def test_an_empty_request_with_unknown_fields_is_refused() -> None:
    """Its sender has another gpu_sim.proto, in which the count has another number."""
    varint_at_7 = bytes([7 << 3, 16])
    with counting("bytes") as (servers, channel):
        comm = LabClient(channel, 2)
        empty = lab.AllReduceRingRequest(commId=comm.id, memAddrs=places(comm)).SerializeToString()
        call = channel.unary_unary("/gpu_sim.GPUCoordinator/AllReduceRing", None, None)
        call(empty, timeout=120)
        match = r"count: it is 0 or missing, and the message has unknown fields \(7\).*number 2 of AllReduceRingRequest"
        with refused("INVALID_ARGUMENT", match=match):
            call(empty + varint_at_7, timeout=120)
        call(lab.AllReduceRingRequest(commId=comm.id, memAddrs=places(comm), count=8).SerializeToString() + varint_at_7)

        copy = lab.MemcpyHostToDeviceRequest(
            dstDeviceId=comm.devices[0].deviceId, dstMemAddr=lab.MemAddr(value=comm.address(0))
        ).SerializeToString()
        memcpy = channel.unary_unary("/gpu_sim.GPUCoordinator/Memcpy", None, None)
        with refused("INVALID_ARGUMENT", match="hostSrcData: it is 0 or missing"):
            memcpy(bytes([1 << 3 | 2, len(copy) + 2]) + copy + varint_at_7, timeout=120)

        with channel_to(str(servers.info(0).address)) as device:
            for rpc in ("BeginSend", "BeginReceive"):
                with refused("INVALID_ARGUMENT", match="numBytes: it is 0 or missing"):
                    device.unary_unary(f"/gpu_sim.GPUDevice/{rpc}", None, None)(varint_at_7, timeout=120)
