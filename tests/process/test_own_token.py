"""Without credentials a cluster on loopback is open to its user alone; ``--lab`` opens the lab's calls only."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from descriptor_stub import Stub
from lab_cluster import CALL_S, channel_to, check_all_reduce, refused
from lab_in_process import Servers, lab_servers
from lab_target import METHODS

import hoop
from hoop.errors import FailedPrecondition, InvalidArgument, Unauthenticated
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.device import wait_for_token
from hoop.servers.grpc_server import check_exposure
from hoop.topology import Address, Addresses
from hoop.wire.auth import LAB_SERVICES, Credentials
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import Role
from hoop.wire.tokens import LocalToken, find_token, forget, runtime_folder

COORDINATOR = pb.DESCRIPTOR.services_by_name["Coordinator"]
LAB = lab.DESCRIPTOR.services_by_name["GPUCoordinator"]


@pytest.fixture
def own_token() -> LocalToken:
    return LocalToken.obtain(0)


@pytest.fixture
def serve(own_token: LocalToken) -> Callable[..., Any]:
    """Servers as ``hoop up`` starts them by default."""

    def start(**options: Any) -> Any:
        config = CoordinatorConfig(credentials=Credentials(Role.COORDINATOR, own_token.token), local_token=own_token)
        device = Credentials(Role.DEVICE, own_token.token)
        return lab_servers(2, replace(config, **options), credentials=device, **options)

    return start


def unauthenticated(channel: grpc.Channel, name: str) -> str:
    """The refusal of an empty call without a token; empty if the call was let in."""
    method = METHODS[name]
    kind = "_".join("stream" if one else "unary" for one in (method.client_streaming, method.server_streaming))
    call = getattr(channel, kind)(f"/{method.containing_service.full_name}/{method.name}")
    try:
        answer = call(iter([]) if method.client_streaming else b"", timeout=CALL_S)
        if method.server_streaming:
            next(iter(answer), None)
            answer.cancel()
    except grpc.RpcError as error:
        details: str = error.details() or ""
        return details if error.code() == grpc.StatusCode.UNAUTHENTICATED else ""
    return ""


def calls_that_need_a_token(servers: Servers) -> dict[str, str]:
    """The refusals by method, of a caller without a token."""
    found = {}
    with channel_to(servers.address) as coordinator, channel_to(str(servers.info(0).address)) as device:
        for name, method in METHODS.items():
            channel = device if "Device" in method.containing_service.name else coordinator
            if refusal := unauthenticated(channel, name):
                found[name] = refusal
    return found


def test_only_processes_of_the_same_user_may_call(serve: Callable[..., Any]) -> None:
    with serve() as servers:
        refusals = calls_that_need_a_token(servers)
        assert set(refusals) == set(METHODS)
        for name, text in refusals.items():
            assert ("--lab" in text) == (METHODS[name].containing_service.full_name in LAB_SERVICES), name
        with hoop.connect(servers.address) as cluster:  # it finds the token
            assert len(cluster.status().devices) == 2
            assert cluster.communicator(2).all_reduce([np.ones(1), np.ones(1)])[0] == [2.0]
        with pytest.raises(Unauthenticated, match="not of this cluster"):
            hoop.connect(servers.address, token=LocalToken().text)
        address = Address.parse(servers.address)
    assert find_token(address) is None, "the file was not removed"


def test_lab_opens_the_calls_of_the_lab_and_no_others(serve: Callable[..., Any]) -> None:
    with serve(lab=True) as servers:
        expected = {name for name, one in METHODS.items() if one.containing_service.full_name not in LAB_SERVICES}
        assert set(calls_that_need_a_token(servers)) == expected
        with channel_to(servers.address) as channel:
            check_all_reduce(channel, 2)
            with refused("UNAUTHENTICATED"):
                Stub(channel, COORDINATOR).GetStatus(pb.GetStatusRequest(), timeout=CALL_S)


def test_a_lab_program_may_send_a_client_s_token(serve: Callable[..., Any], own_token: LocalToken) -> None:
    with serve() as servers, channel_to(servers.address) as channel:
        metadata = (("authorization", f"Bearer {own_token.token.role_token(Role.CLIENT)}"),)
        request = lab.CommInitRequest(numDevices=2)
        assert Stub(channel, LAB).CommInit(request, timeout=CALL_S, metadata=metadata).success


def test_a_refused_call_of_the_lab_is_reported_with_the_remedy(serve: Callable[..., Any]) -> None:
    """Many of the lab's clients print no errors."""
    with serve() as servers:
        with channel_to(servers.address) as channel, refused("UNAUTHENTICATED", match="--lab"):
            Stub(channel, LAB).CommInit(lab.CommInitRequest(numDevices=2), timeout=CALL_S)
        (event,) = servers.events("lab_call_reported")
        assert "CommInit" in event.text
        assert "--lab" in event.text


def test_lab_beyond_loopback_or_with_certificates_is_refused() -> None:
    token = Credentials(Role.COORDINATOR, LocalToken().token)
    with pytest.raises(InvalidArgument, match=r"--lab: 10\.0\.0\.1 can be reached from other machines"):
        check_exposure(Address("10.0.0.1", 0), token, insecure=False, lab=True)
    check_exposure(Address("10.0.0.1", 0), token, insecure=True, lab=True)
    check_exposure(Address("10.0.0.1", 0), token, insecure=False)
    certificates: Any = object()
    with pytest.raises(InvalidArgument, match="--lab: with certificates"):
        check_exposure(Address("127.0.0.1", 0), Credentials(Role.DEVICE, certificates=certificates), False, lab=True)


# ---- devices without credentials


def test_a_device_finds_the_token_or_is_told_why_it_has_none(serve: Callable[..., Any], own_token: LocalToken) -> None:
    with serve() as servers:
        address = Addresses.parse(servers.address)
        assert asyncio.run(wait_for_token(address, CALL_S)) == own_token.token
        forget(address.addresses[0].port)
        with pytest.raises(Unauthenticated, match=rf"{runtime_folder()} has no token for it.*--token-file"):
            asyncio.run(wait_for_token(address, CALL_S))
    with lab_servers(0) as servers, pytest.raises(FailedPrecondition, match="start this device with --insecure too"):
        asyncio.run(wait_for_token(Addresses.parse(servers.address), CALL_S))


# ---- the commands


@pytest.fixture
def fresh_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "hoop"
    assert list((tmp_path / "hoop").iterdir()) == []


def test_hoop_up_shares_a_token_with_its_user_s_commands(
    start: Callable[..., Any], run_hoop: Callable[..., Any], fresh_runtime: Path
) -> None:
    up = start("up", "--devices", 1, "--memory", "1MiB", "--lab", real_start=True)
    assert up.first_line.startswith("coordinator ")
    assert "every user of this machine can make the lab's calls" in up.errors
    (path,) = fresh_runtime.iterdir()
    assert path.name == f"{up.address.rpartition(':')[2]}.token"
    secret = path.read_text().strip()
    assert run_hoop("status", "--coordinator", up.address).returncode == 0
    elsewhere = {"XDG_RUNTIME_DIR": str(fresh_runtime.parent / "another")}  # as another user has
    (fresh_runtime.parent / "another").mkdir()
    answer = run_hoop("status", "--coordinator", up.address, environment=elsewhere)
    assert answer.returncode == 2
    assert "no token came with this call" in answer.stderr
    commands = [Path(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
    for command in commands:
        try:
            assert secret.encode() not in command.read_bytes()
        except OSError:  # it ended
            continue
    up.end()


def test_insecure_uses_no_token(start: Callable[..., Any], fresh_runtime: Path) -> None:
    fresh_runtime.mkdir(mode=0o700)
    coordinator = start("coordinator", "--insecure")
    with channel_to(coordinator.address) as channel:
        assert Stub(channel, COORDINATOR).GetStatus(pb.GetStatusRequest(), timeout=CALL_S).pid == coordinator.pid
    device = start("device", "--join", coordinator.address, "--memory", "1MiB")
    assert device.wait() == 2
    assert "start this device with --insecure too" in device.errors


def test_the_token_stays_only_for_devices_that_live_on(serve: Callable[..., Any], own_token: LocalToken) -> None:
    """``hoop up`` kills its devices that do not leave in time: they do not count."""
    with serve() as servers:
        address = Address.parse(servers.address)
        servers.call(servers.coordinator.stop())
        assert find_token(address) == own_token.token
        servers.call(servers.coordinator.stop(ended={1, 2}))
        assert find_token(address) is None
