"""Without credentials a cluster on loopback is open to its user alone; ``--lab`` opens the lab's calls only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from descriptor_stub import Stub
from lab_cluster import CALL_S, channel_to, check_all_reduce, refused, resident_bytes
from lab_in_process import Servers, lab_servers
from lab_target import METHODS

import hoop
from hoop.errors import InvalidArgument, Unauthenticated
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.grpc_server import check_exposure
from hoop.topology import Address, Addresses
from hoop.wire.auth import LAB_SERVICES, Credentials
from hoop.wire.generated import gpu_sim_pb2 as lab
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.local_sockets import has_socket, socket_path
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token, token_of_user

COORDINATOR = pb.DESCRIPTOR.services_by_name["Coordinator"]
LAB = lab.DESCRIPTOR.services_by_name["GPUCoordinator"]


@pytest.fixture
def serve() -> Callable[..., Any]:
    """Servers as ``hoop up`` starts them by default."""

    def start(**options: Any) -> Any:
        config = CoordinatorConfig(credentials=Credentials(Role.COORDINATOR, local=True))
        return lab_servers(2, replace(config, **options), credentials=Credentials(Role.DEVICE, local=True), **options)

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


def refused_at_tcp_ports(servers: Servers) -> dict[str, str]:
    """The refusals by method, of a caller at the TCP ports."""
    texts = {}
    with channel_to(servers.address) as coordinator, channel_to(str(servers.info(0).address)) as device:
        for name, method in METHODS.items():
            channel = device if "Device" in method.containing_service.name else coordinator
            if refusal := unauthenticated(channel, name):
                texts[name] = refusal
    return texts


def test_only_processes_of_the_same_user_may_call(serve: Callable[..., Any]) -> None:
    """Every method is refused at the TCP ports, and answered at the sockets, which only this user reaches."""
    with serve() as servers:
        refusals = refused_at_tcp_ports(servers)
        assert set(refusals) == set(METHODS)
        for name, text in refusals.items():
            assert ("--lab" in text) == (METHODS[name].containing_service.full_name in LAB_SERVICES), name
            assert "hoop token FILE" in text
        with hoop.connect(servers.address) as cluster:
            assert len(cluster.status().devices) == 2
            assert cluster.communicator(2).all_reduce([np.ones(1), np.ones(1)])[0] == [2.0]
        with pytest.raises(Unauthenticated, match=r"has no token and no certificates.*unset HOOP_TOKEN"):
            hoop.connect(servers.address, token=new_token())
        address = Address.parse(servers.address)
        links = {device.config.credentials.link_key for device in servers.devices}
        assert links == {token_of_user().link_key}, "data links have a key too"
    assert not has_socket(address), "the socket was not removed"


def test_at_a_socket_every_method_of_the_table_is_answered_and_no_other(serve: Callable[..., Any]) -> None:
    with serve() as servers:
        for address in (Address.parse(servers.address), servers.info(0).address):
            with grpc.insecure_channel(f"unix:{socket_path(address.port)}") as channel:
                service = "Coordinator" if str(address) == servers.address else "Device"
                of_server = [name for name in METHODS if name.partition(".")[0] in (service, f"GPU{service}")]
                assert [name for name in of_server if unauthenticated(channel, name)] == []
                with pytest.raises(grpc.RpcError) as error:
                    channel.unary_unary("/hoop.v1.Coordinator/Nothing", None, None)(b"", timeout=CALL_S)
                assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED


def test_lab_opens_the_calls_of_the_lab_and_no_others(serve: Callable[..., Any]) -> None:
    with serve(lab=True) as servers:
        expected = {name for name, one in METHODS.items() if one.containing_service.full_name not in LAB_SERVICES}
        assert set(refused_at_tcp_ports(servers)) == expected
        with channel_to(servers.address) as channel:
            check_all_reduce(channel, 2)
            with refused("UNAUTHENTICATED"):
                Stub(channel, COORDINATOR).GetStatus(pb.GetStatusRequest(), timeout=CALL_S)


def test_a_refused_call_of_the_lab_is_reported_with_the_remedy(serve: Callable[..., Any]) -> None:
    """Many of the lab's clients print no errors."""
    with serve() as servers:
        with channel_to(servers.address) as channel, refused("UNAUTHENTICATED", match="--lab"):
            Stub(channel, LAB).CommInit(lab.CommInitRequest(numDevices=2), timeout=CALL_S)
        (event,) = servers.events("lab_call_reported")
        assert "CommInit" in event.text
        assert "--lab" in event.text


def test_lab_is_for_loopback_or_insecure_and_never_with_a_token() -> None:
    """The lab's programs speak no TLS, and a port has one protocol."""
    for credentials in (Credentials(Role.COORDINATOR, Token.parse(new_token())), Credentials(Role.DEVICE, given=Any)):  # type: ignore[arg-type]
        for host in ("127.0.0.1", "10.0.0.1"):
            for insecure in (False, True):
                with pytest.raises(InvalidArgument, match=r"--lab: with a token or certificates.*HOOP_TOKEN"):
                    check_exposure(Address(host, 0), credentials, insecure, lab=True)
                check_exposure(Address(host, 0), credentials, insecure)
    check_exposure(Address("127.0.0.1", 0), Credentials(Role.COORDINATOR, local=True), insecure=False, lab=True)
    with pytest.raises(InvalidArgument, match="--insecure on a network you trust"):
        check_exposure(Address("10.0.0.1", 0), Credentials(Role.COORDINATOR), insecure=False, lab=True)
    check_exposure(Address("10.0.0.1", 0), Credentials(Role.COORDINATOR), insecure=True, lab=True)


def test_the_message_of_a_refused_call_is_not_read(start: Callable[..., Any]) -> None:
    """The refusal does not wait for a large message, and no memory is used for it."""
    coordinator = start("coordinator")
    with channel_to(coordinator.address) as channel:
        before = resident_bytes(coordinator.pid)
        call = channel.unary_unary("/gpu_sim.GPUCoordinator/Memcpy", None, None)
        calls = [call.future(bytes(60 << 20), timeout=CALL_S) for _ in range(4)]
        assert {one.code() for one in calls} == {grpc.StatusCode.UNAUTHENTICATED}
        assert resident_bytes(coordinator.pid) - before < 60 << 20


# ---- several coordinators of one user


def test_several_addresses_of_this_user_s_coordinator_are_called_with_the_user_s_token() -> None:
    """A target of gRPC holds one socket, or several TCP ports: these use TLS with the user's token."""
    mine = Credentials(Role.COORDINATOR, token_of_user(), local=True)
    with lab_servers(1, CoordinatorConfig(credentials=mine), credentials=mine.for_role(Role.DEVICE)) as servers:
        several = Addresses.parse(f"127.0.0.1:9,{servers.address}")
        for address in (several, Addresses.parse(servers.address)):
            with hoop.connect(address) as cluster:
                assert len(cluster.status().devices) == 1
                cluster.device(1).allocate("x", 8, reuse=True)
        joining = Credentials.of_user(Role.DEVICE, several)
        with joining.channel(several, Role.COORDINATOR, []) as channel:
            answer = Stub(channel, COORDINATOR).Leave(pb.LeaveRequest(device_id=9), timeout=CALL_S)
            assert answer == pb.LeaveResponse()


# ---- the commands


@pytest.fixture
def fresh_runtime(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    yield short_folder / "hoop"
    assert {path.name for path in (short_folder / "hoop").iterdir()} <= {"user.token"}


def test_hoop_up_is_found_by_its_user_s_commands_and_by_no_others(
    start: Callable[..., Any], run_hoop: Callable[..., Any], fresh_runtime: Path
) -> None:
    up = start("up", "--devices", 1, "--memory", "1MiB", "--lab", real_start=True)
    assert up.first_line.startswith("coordinator ")
    assert "every user of this machine can make the lab's calls" in up.errors
    assert socket_path(Address.parse(up.address).port).is_socket()
    assert run_hoop("status", "--coordinator", up.address).returncode == 0
    elsewhere = {"XDG_RUNTIME_DIR": str(fresh_runtime.parent / "a")}  # as another user has
    (fresh_runtime.parent / "a").mkdir()
    answer = run_hoop("status", "--coordinator", up.address, environment=elsewhere)
    assert answer.returncode == 2
    assert "answers processes of its own user" in answer.stderr
    device = run_hoop("device", "--join", up.address, "--memory", "1MiB", environment=elsewhere)
    assert device.returncode == 2
    assert "it is another user's" in device.stderr
    up.end()


def test_insecure_uses_no_sockets(start: Callable[..., Any], fresh_runtime: Path) -> None:
    fresh_runtime.mkdir(mode=0o700)
    coordinator = start("coordinator", "--insecure")
    with channel_to(coordinator.address) as channel:
        assert Stub(channel, COORDINATOR).GetStatus(pb.GetStatusRequest(), timeout=CALL_S).pid == coordinator.pid
    assert list(fresh_runtime.iterdir()) == []
    device = start("device", "--join", coordinator.address, "--memory", "1MiB")
    assert device.wait() == 2
    assert "start this device with --insecure too" in device.errors


def test_a_restarted_coordinator_takes_over_the_socket_and_its_devices_come_back(
    start: Callable[..., Any], fresh_runtime: Path
) -> None:
    killed = start("coordinator")
    port = Address.parse(killed.address).port
    device = start("device", "--join", killed.address, "--memory", "1MiB", "--id", 7)
    assert device.id == 7
    killed.kill()
    assert socket_path(port).is_socket()
    again = start("coordinator", "--port", port)
    with hoop.connect(again.address) as cluster:
        cluster.wait_for_devices(1, CALL_S)
    device.end()
    again.end()


def test_a_server_with_a_token_removes_the_socket_that_another_has_left(
    start: Callable[..., Any], fresh_runtime: Path, tmp_path: Path
) -> None:
    """Else its callers would go there."""
    killed = start("coordinator")
    port = Address.parse(killed.address).port
    killed.kill()
    secured = start("coordinator", "--port", port, environment={"HOOP_TOKEN": new_token()})
    with pytest.raises(Unauthenticated, match="authenticates its callers"):
        hoop.connect(secured.address)
    secured.end()
