"""Authentication and roles on real processes: every method of every service, and data connections, with valid and
invalid credentials.

The methods come from the .proto files, so a new method that is missing in ``ALLOWED`` fails here.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import preloaded
import pytest
from free_ports import free_port
from lab_cluster import Cluster, check_refusal, hoop_up, resident_bytes
from lab_target import DEVICE, LAB_DEVICE, METHODS

import hoop
from hoop.cli.commands import command_line
from hoop.errors import InvalidArgument, NotFound, PermissionDenied, Unauthenticated
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.certificates import Authority, Certificates
from hoop.wire.channels import LEASE_S, channel_options
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.private_files import write_private
from hoop.wire.roles import ALLOWED, Role
from hoop.wire.tokens import Token, new_token

CALL_S = 120.0
SECRET = new_token()


@dataclass(frozen=True)
class SecureCluster:
    """A cluster that requires credentials, and the addresses of its first device."""

    running: Cluster
    folder: Path
    credentials_for: Callable[[Role], Credentials]
    device: dict[str, Any]
    options: tuple[object, ...]
    """The options by which commands get credentials."""

    def channel(self, server_role: Role, credentials: Credentials) -> grpc.Channel:
        """A new channel to the coordinator or to the first device."""
        address = self.device["address"] if server_role is Role.DEVICE else self.running.address
        return credentials.channel(Address.parse(address), server_role, channel_options(LEASE_S))

    def call(self, name: str, channels: Channels, credentials: Credentials) -> None:
        """Calls a method with an empty request; only authentication and authorization matter."""
        method = METHODS[name]
        of_device = method.containing_service in (DEVICE, LAB_DEVICE)
        server_role = Role.DEVICE if of_device else Role.COORDINATOR
        kind = "_".join("stream" if one else "unary" for one in (method.client_streaming, method.server_streaming))
        path = f"/{method.containing_service.full_name}/{method.name}"
        channel = channels.to(self, server_role, credentials)
        request = iter([]) if method.client_streaming else b""
        answer = getattr(channel, kind)(path)(request, timeout=CALL_S)
        if method.server_streaming:
            next(iter(answer), None)
            answer.cancel()


class Channels(ExitStack):
    """Channels that the calls of a test share: one to each server with each certificate, or with nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[tuple[Role, Credentials], grpc.Channel] = {}

    def to(self, target: SecureCluster, server_role: Role, credentials: Credentials) -> grpc.Channel:
        key = server_role, credentials
        if key not in self._opened:
            self._opened[key] = self.enter_context(target.channel(server_role, credentials))
        return self._opened[key]


@contextmanager
def secure_cluster(folder: Path, *options: object) -> Iterator[SecureCluster]:
    """``hoop up`` with two devices and these options."""
    needs_own_command_line = "--token-file" in options
    with hoop_up(2, *map(str, options), real_start=needs_own_command_line) as running:
        with hoop.connect(running.address, credentials=load_credentials(options, Role.CLIENT)) as cluster:
            member = cluster.status().devices[0].device
        device = {"address": member.address, "data_address": member.data_address, "pid": member.pid}
        yield SecureCluster(running, folder, lambda role: load_credentials(options, role), device, options)


def load_credentials(options: Sequence[object], role: Role) -> Credentials:
    kind, path = str(options[0]), Path(str(options[1]))
    if kind == "--tls":
        return Credentials(role, given=Certificates.load(path, role))
    return Credentials(role, Token.read(path))


@pytest.fixture(scope="module")
def with_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    folder = tmp_path_factory.mktemp("token")
    write_private(folder / "join", SECRET)
    with secure_cluster(folder, "--token-file", folder / "join") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def with_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureCluster]:
    folder = tmp_path_factory.mktemp("tls")
    preloaded.run([*preloaded.HOOP, "certs", str(folder / "certs")], timeout=CALL_S, check=True)
    with secure_cluster(folder, "--tls", folder / "certs") as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["with_token", "with_tls"])
def secured(request: pytest.FixtureRequest) -> SecureCluster:
    """A cluster with a token, and one with certificates."""
    found: SecureCluster = request.getfixturevalue(request.param)
    return found


def hoop_command(*arguments: object) -> None:
    """Runs ``hoop …`` in this process, which is faster; raises the command's error."""
    command_line()([str(one) for one in arguments], standalone_mode=False)


def method_path(name: str) -> str:
    return f"/{METHODS[name].containing_service.full_name}/{METHODS[name].name}"


# ---- the table of roles


def test_the_table_of_roles_lists_exactly_the_existing_methods() -> None:
    assert set(ALLOWED) == {method_path(name) for name in METHODS}


def test_each_role_may_call_only_its_own_methods() -> None:
    """Only devices join, only the coordinator runs work on devices, and it calls no coordinator's method."""
    roles = {name: ALLOWED[method_path(name)] for name in METHODS}
    assert roles["Coordinator.Join"] == {Role.DEVICE}
    for name in ("AssignRank", "Launch", "Abort", "StartTask", "ReassignTask", "StopTask"):
        assert roles[f"Device.{name}"] == {Role.COORDINATOR}, name
    assert roles["GPUDevice.StreamSend"] == {Role.DEVICE}
    assert not [name for name in roles if "Coordinator." in name and Role.COORDINATOR in roles[name]]


# ---- every method


@pytest.fixture
def channels() -> Iterator[Channels]:
    with Channels() as opened:
        yield opened


def call_status(target: SecureCluster, name: str, channels: Channels, credentials: Credentials) -> str:
    """The call's status; a refusal must name the method and what is required, and reveal no secret."""
    try:
        target.call(name, channels, credentials)
    except grpc.RpcError as error:
        code: str = error.code().name
        if code == "PERMISSION_DENIED":
            message = check_refusal(error, code, match=method_path(name))
            assert SECRET not in message
            assert "may not call this" in message
        return code
    return "OK"


STRANGERS: dict[str, Callable[[Role], Credentials]] = {
    "nothing": Credentials,
    "another token": lambda role: Credentials(role, Token.parse(new_token())),
    "a certificate that signs itself": lambda role: Credentials(role, given=Authority().certificates(role)),
}


@pytest.mark.parametrize("stranger", STRANGERS)
def test_no_method_is_reached_without_the_cluster_s_token_or_certificates(
    secured: SecureCluster, channels: Channels, stranger: str
) -> None:
    """There is no connection: no byte of a request is read."""
    credentials = {role: STRANGERS[stranger](role) for role in Role}
    codes = {(name, role): call_status(secured, name, channels, credentials[role]) for name in METHODS for role in Role}
    assert {call: code for call, code in codes.items() if code != "UNAVAILABLE"} == {}


def test_a_caller_who_trusts_the_server_and_has_another_certificate_is_refused(secured: SecureCluster) -> None:
    """The server asks for a certificate of its own authority, whatever the caller accepts."""
    authority = secured.credentials_for(Role.CLIENT).certificates
    assert authority is not None
    stranger = replace(Authority().certificates(Role.COORDINATOR), authority=authority.authority)
    for server_role in (Role.COORDINATOR, Role.DEVICE):
        with secured.channel(server_role, Credentials(Role.COORDINATOR, given=stranger)) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/hoop.v1.Device/Describe", None, None)(b"", timeout=CALL_S)
            assert refused.value.code().name == "UNAVAILABLE"


def test_every_method_refuses_every_wrong_role(secured: SecureCluster, channels: Channels) -> None:
    wrong = [(name, role) for name in METHODS for role in set(Role) - ALLOWED[method_path(name)]]
    credentials = {role: secured.credentials_for(role) for role in Role}
    codes = {(name, role): call_status(secured, name, channels, credentials[role]) for name, role in wrong}
    assert {call: code for call, code in codes.items() if code != "PERMISSION_DENIED"} == {}


def test_every_method_accepts_its_allowed_roles(secured: SecureCluster, channels: Channels) -> None:
    """The empty request may then be refused by the method itself."""
    right = [(name, role) for name in METHODS for role in ALLOWED[method_path(name)]]
    credentials = {role: secured.credentials_for(role) for role in Role}
    codes = {(name, role): call_status(secured, name, channels, credentials[role]) for name, role in right}
    unexpected = ("UNAUTHENTICATED", "PERMISSION_DENIED", "INTERNAL", "UNAVAILABLE", "UNIMPLEMENTED")
    assert {call: code for call, code in codes.items() if code in unexpected} == {}


def test_a_large_message_without_a_certificate_takes_no_memory(with_token: SecureCluster) -> None:
    pid = with_token.running.process.pid
    before = resident_bytes(pid)
    with grpc.insecure_channel(with_token.running.address, options=channel_options(LEASE_S)) as channel:
        call = channel.unary_unary("/gpu_sim.GPUCoordinator/Memcpy", None, None)
        calls = [call.future(bytes(60 << 20), timeout=CALL_S) for _ in range(4)]
        assert {one.code().name for one in calls} == {"UNAVAILABLE"}
    assert resident_bytes(pid) - before < 60 << 20


def test_a_method_that_does_not_exist_may_be_called_by_nobody(secured: SecureCluster) -> None:
    with secured.channel(Role.COORDINATOR, secured.credentials_for(Role.CLIENT)) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary("/hoop.v1.Coordinator/Nothing", None, None)(b"", timeout=CALL_S)
        check_refusal(refused.value, "PERMISSION_DENIED", match="nobody may")


@pytest.mark.parametrize("server", ["coordinator", "device"])
def test_without_a_certificate_there_is_no_connection(secured: SecureCluster, server: str) -> None:
    address = secured.running.address if server == "coordinator" else secured.device["address"]
    certificates = secured.credentials_for(Role.CLIENT).certificates
    assert certificates is not None
    no_client_certificate = grpc.ssl_channel_credentials(certificates.authority)
    options = (("grpc.ssl_target_name_override", f"{server}.hoop"),)
    with (
        grpc.secure_channel(address, no_client_certificate, options=options) as tls,
        grpc.insecure_channel(address) as plain,
    ):
        for channel in (tls, plain):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/hoop.v1.Coordinator/GetStatus", None, None)(b"", timeout=CALL_S)
            assert refused.value.code().name == "UNAVAILABLE"


def test_a_client_rejects_a_device_certificate_from_the_coordinator(secured: SecureCluster) -> None:
    """A device cannot impersonate the coordinator."""
    client = secured.credentials_for(Role.CLIENT)
    with pytest.raises(Unauthenticated, match="has another token or certificates, or is another process"):
        hoop.connect(secured.device["address"], credentials=client)


# ---- data connections


def reply_header(address: str, hello: bytes) -> FrameHeader:
    """The header of the last reply from a device's data port, after an invalid proof if it sends a challenge."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=CALL_S) as sock:
        sock.sendall(hello)
        received = b""
        while len(received) < HEADER_BYTES and (data := sock.recv(4096)):
            received += data
        if FrameHeader.unpack(received[:HEADER_BYTES]).kind == FrameKind.CHALLENGE:
            sock.sendall(bytes(32))  # a proof made without the key
            received = sock.recv(4096)
    return FrameHeader.unpack(received[:HEADER_BYTES])


def test_a_data_connection_without_proof_is_refused(secured: SecureCluster) -> None:
    plain = FrameHeader(FrameKind.HELLO, 1, 1, 0, 1, 0).pack()
    keyed = FrameHeader(FrameKind.HELLO, 1, 1, 0, 1, 16).pack() + bytes(16)
    for hello in (plain, keyed):
        assert reply_header(secured.device["data_address"], hello).kind == FrameKind.REFUSAL


# ---- valid credentials


def test_a_client_with_credentials_runs_a_collective(secured: SecureCluster) -> None:
    with hoop.connect(secured.running.address, credentials=secured.credentials_for(Role.CLIENT)) as connected:
        comm = connected.communicator(2)
        for total in comm.all_reduce([np.arange(1000.0), np.ones(1000)]):
            assert np.array_equal(total, np.arange(1000.0) + 1)
        comm.destroy()


CLIENT_WITH_MEMORY = """
import sys
import hoop
with hoop.connect(sys.argv[1]) as cluster:
    name = cluster.staging_name()
    cluster.device(1).allocate(name, 1 << 20)
    print(name, flush=True)
    sys.stdin.read()
"""


def test_the_memory_of_a_killed_client_is_freed(secured: SecureCluster) -> None:
    """The coordinator's role allows the calls for it: ListBuffers and Free."""
    kind, path = map(str, secured.options)
    environment = {**os.environ, {"--tls": "HOOP_TLS", "--token-file": "HOOP_TOKEN_FILE"}[kind]: path}
    client = preloaded.Popen(
        [sys.executable, "-c", CLIENT_WITH_MEMORY, secured.running.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    with hoop.connect(secured.running.address, credentials=secured.credentials_for(Role.CLIENT)) as cluster:
        with client:
            try:
                assert client.stdout is not None
                name = client.stdout.readline().strip()
                assert name in cluster.device(1).buffers()
            finally:
                client.kill()
        deadline = time.monotonic() + CALL_S
        while name in cluster.device(1).buffers():
            assert time.monotonic() < deadline, "the memory of the killed client is not freed"
            threading.Event().wait(0.02)


def test_a_role_token_allows_only_its_role(with_token: SecureCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """With a client's or a device's token no other role can be used, and no other token made."""
    join, client, device = (with_token.folder / name for name in ("join", "client", "device"))
    for role, path in (("client", client), ("device", device)):
        hoop_command("token", path, "--role", role, "--token-file", join)
        assert path.stat().st_mode & 0o777 == 0o600
    address = with_token.running.address
    status_command = ["status", "--json", "--coordinator", address]
    hoop_command(*status_command, "--token-file", client)
    assert len(json.loads(capsys.readouterr().out)["devices"]) >= 2
    for command in (
        [*status_command, "--token-file", device],
        ["device", "--join", address, "--token-file", client],
        ["coordinator", "--token-file", device],
        ["token", with_token.folder / "more", "--role", "device", "--token-file", client],
    ):
        with pytest.raises(InvalidArgument, match="join token") as refused:
            hoop_command(*command)
        assert not any(path.read_text().strip() in str(refused.value) for path in (join, client, device))
    with pytest.raises(Unauthenticated, match="authenticates its callers"):
        hoop_command(*status_command)


def test_attach_takes_a_token_file_or_certificates(secured: SecureCluster) -> None:
    """With them the coordinator answers: no job was started."""
    with pytest.raises(NotFound, match="job: none was started"):
        hoop_command("attach", "--coordinator", secured.running.address, *secured.options)


def test_a_device_with_a_device_token_serves_coordinator_clients_and_devices(
    with_token: SecureCluster, start: Callable[..., Any], tmp_path: Path
) -> None:
    """It authenticates the coordinator, clients and other devices, and its links, without the join token."""
    write_private(tmp_path / "device", Token.parse(SECRET).role_token(Role.DEVICE))
    address, port = with_token.running.address, free_port()
    # A device with an advertised data address shares no memory: its links are TCP.
    links = ("--data-port", port, "--advertise-data", f"127.0.0.1:{port}")
    options = ("--id", 9, "--memory", "64MiB", "--token-file", tmp_path / "device", *links)
    running = start("device", "--join", address, *options)
    assert running.id == 9
    with hoop.connect(address, token=SECRET) as cluster:
        comm = cluster.communicator([1, 9])
        for total in comm.all_reduce([np.ones(100_000), np.arange(100_000.0)]):
            assert np.array_equal(total, np.arange(100_000.0) + 1)
        comm.destroy()
        cluster.device(9).allocate("mine", 100)
        assert cluster.device(9).buffers()["mine"][1] == 100


def test_the_token_is_in_no_command_line_and_no_log(with_token: SecureCluster) -> None:
    for pid in (with_token.device["pid"], with_token.running.process.pid):
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert SECRET not in with_token.running.log.read_text()


def test_connect_takes_its_token_from_the_argument_or_the_environment(
    with_token: SecureCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = with_token.running.address
    with pytest.raises(Unauthenticated, match="authenticates its callers"):
        hoop.connect(address)
    with pytest.raises(Unauthenticated, match="has another token or certificates"):
        hoop.connect(address, token=new_token())
    monkeypatch.setenv("HOOP_TOKEN", Token.parse(SECRET).role_token(Role.CLIENT))
    with hoop.connect(address) as cluster:
        assert cluster.status().devices
        with pytest.raises(PermissionDenied):
            cluster._call("Leave", pb.LeaveRequest(device_id=1))


@pytest.mark.slow
def test_training_with_a_token_from_the_environment(run_hoop: Any) -> None:
    """``hoop train`` on this machine needs no token, and is not disturbed by one."""
    done = run_hoop("train", "mnist", "-n", 2, "--epochs", 0, "--json", environment={"HOOP_TOKEN": new_token()})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"] == 2


@pytest.mark.parametrize("command", ["coordinator", "up --devices 0", "device --join 127.0.0.1:1"])
def test_listening_beyond_loopback_requires_authentication(command: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        hoop_command(*command.split(), "--host", "0.0.0.0")
    for word in ("hoop token FILE", "hoop certs DIR", "--insecure on a network you trust"):
        assert word in str(refused.value)
    (tmp_path / "open").write_text(new_token())
    os.chmod(tmp_path / "open", 0o644)
    with pytest.raises(InvalidArgument, match=r"mode 644.*chmod 600"):
        hoop_command(*command.split(), "--host", "0.0.0.0", "--token-file", tmp_path / "open")


def test_with_a_token_the_coordinator_listens_on_all_interfaces(start: Callable[..., Any], tmp_path: Path) -> None:
    write_private(tmp_path / "join", new_token())
    assert start("coordinator", "--host", "0.0.0.0", "--token-file", tmp_path / "join").first_line.startswith(
        "coordinator "
    )


def test_insecure_prints_a_warning(start: Callable[..., Any]) -> None:
    running = start("coordinator", "--host", "0.0.0.0", "--insecure")
    assert running.first_line.startswith("coordinator ")
    assert "callers are not authenticated" in running.errors
