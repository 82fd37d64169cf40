"""Who may call what, on real processes: every method of every service, every ring socket, with and without proof.

The methods come from the .proto files, so a new one that stands in no table fails here.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from lab_cluster import Cluster, check_refusal, hoop_up, memory_of
from lab_target import DEVICE, LAB_DEVICE, METHODS

import hoop
from hoop.cli import main
from hoop.errors import DeadlineExceeded, InvalidArgument, PermissionDenied, Unauthenticated
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.channels import channel_options
from hoop.wire.frames import HEADER_BYTES, FrameHeader, FrameKind
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.roles import ALLOWED, Role
from hoop.wire.tls import Certificates
from hoop.wire.tokens import Token, new_token, write_private

CALL_S = 20.0
SECRET = new_token()
Metadata = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Guarded:
    """A cluster that asks for proof, and where its doors are."""

    running: Cluster
    folder: Path
    proof: Callable[[Role], Credentials]
    device: dict[str, Any]

    def call(self, name: str, credentials: Credentials, metadata: Metadata | None = None) -> None:
        """An empty call in this role; nothing is asked of it but that it comes through the door."""
        method = METHODS[name]
        of_device = method.containing_service in (DEVICE, LAB_DEVICE)
        to = Role.DEVICE if of_device else Role.COORDINATOR
        address = Address.parse(self.device["address"] if of_device else self.running.address)
        kind = "_".join("stream" if one else "unary" for one in (method.client_streaming, method.server_streaming))
        path = f"/{method.containing_service.full_name}/{method.name}"
        with credentials.channel(address, to, channel_options()) as channel:
            answer = getattr(channel, kind)(path)(
                iter([]) if method.client_streaming else b"",
                timeout=CALL_S,
                metadata=credentials.metadata if metadata is None else metadata,
            )
            if method.server_streaming:
                next(iter(answer), None)
                answer.cancel()


@contextmanager
def guarded(folder: Path, *options: object) -> Iterator[Guarded]:
    """``hoop up`` with two devices and these options."""
    with hoop_up(2, *map(str, options)) as running:
        with hoop.connect(running.address, credentials=proof_of(options, Role.CLIENT)) as cluster:
            member = cluster.status().devices[0].device
        device = {"address": member.address, "data_address": member.data_address, "pid": member.pid}
        yield Guarded(running, folder, lambda role: proof_of(options, role), device)


def proof_of(options: Sequence[object], role: Role) -> Credentials:
    kind, path = str(options[0]), Path(str(options[1]))
    if kind == "--tls":
        return Credentials(role, certificates=Certificates.load(path, role))
    return Credentials(role, Token.read(path))


@pytest.fixture(scope="module")
def with_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("token")
    write_private(folder / "join", SECRET)
    with guarded(folder, "--token-file", folder / "join") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def with_tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    if shutil.which("openssl") is None:
        pytest.skip("hoop certs needs the openssl command")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run([sys.executable, "-m", "hoop", "certs", folder / "certs"], timeout=CALL_S, check=True)
    with guarded(folder, "--tls", folder / "certs") as cluster:
        yield cluster


@pytest.fixture(scope="module", params=["with_token", "with_tls"])
def either(request: pytest.FixtureRequest) -> Guarded:
    """A cluster with a token, and one with certificates."""
    found: Guarded = request.getfixturevalue(request.param)
    return found


def hoop_command(*arguments: object) -> None:
    """``hoop …`` in this process, which is quicker; raises what the command says."""
    main.app([str(one) for one in arguments], standalone_mode=False)


def path_of(name: str) -> str:
    return f"/{METHODS[name].containing_service.full_name}/{METHODS[name].name}"


# ---- the table


def test_every_method_stands_in_the_table_and_nothing_else_does() -> None:
    assert set(ALLOWED) == {path_of(name) for name in METHODS}


def test_nobody_may_do_what_is_anothers() -> None:
    """A client is no device, a device no coordinator; the coordinator's word counts on devices alone."""
    roles = {name: ALLOWED[path_of(name)] for name in METHODS}
    assert roles["Coordinator.Join"] == {Role.DEVICE}
    for name in ("AssignRank", "Launch", "Abort", "StartTask", "ReassignTask", "StopTask"):
        assert roles[f"Device.{name}"] == {Role.COORDINATOR}, name
    assert roles["GPUDevice.StreamSend"] == {Role.DEVICE}
    assert not [name for name in roles if "Coordinator." in name and Role.COORDINATOR in roles[name]]


# ---- every method


def code_of(target: Guarded, name: str, credentials: Credentials, metadata: Metadata | None = None) -> str:
    """How the call ends; a refusal at the door says which method, who may call it or how, and no secret."""
    try:
        target.call(name, credentials, metadata)
    except grpc.RpcError as error:
        code: str = error.code().name
        if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            said = check_refusal(error, code, words=path_of(name))
            assert SECRET not in said
            assert ("authorization: Bearer" if code == "UNAUTHENTICATED" else "may not call this") in said
        return code
    return "OK"


def test_every_method_refuses_an_unauthenticated_call(with_token: Guarded) -> None:
    nobody, other = Credentials(Role.CLIENT), Credentials(Role.CLIENT, Token.parse(new_token()))
    bare = with_token.proof(Role.CLIENT).metadata[0][1].removeprefix("Bearer ")
    spoken: dict[str, Metadata] = {
        "nothing": (),
        "another cluster's": other.metadata,
        "empty": (("authorization", ""),),
        "nearly the join token": (("authorization", f"Bearer {SECRET}x"),),
        "without its scheme": (("authorization", bare),),
    }
    codes = {(name, how): code_of(with_token, name, nobody, spoken[how]) for name in METHODS for how in spoken}
    assert {call: code for call, code in codes.items() if code != "UNAUTHENTICATED"} == {}


def test_every_method_refuses_every_wrong_role(either: Guarded) -> None:
    wrong = [(name, role) for name in METHODS for role in set(Role) - ALLOWED[path_of(name)]]
    codes = {(name, role): code_of(either, name, either.proof(role)) for name, role in wrong}
    assert {call: code for call, code in codes.items() if code != "PERMISSION_DENIED"} == {}


def test_every_method_takes_its_own_roles(either: Guarded) -> None:
    """What is wrong with an empty request is then the method's to say."""
    right = [(name, role) for name in METHODS for role in ALLOWED[path_of(name)]]
    codes = {(name, role): code_of(either, name, either.proof(role)) for name, role in right}
    closed = ("UNAUTHENTICATED", "PERMISSION_DENIED", "INTERNAL", "UNAVAILABLE", "UNIMPLEMENTED")
    assert {call: code for call, code in codes.items() if code in closed} == {}


def test_a_strangers_message_is_not_read(with_token: Guarded) -> None:
    """However much comes, the refusal does not wait for it, and it takes no memory."""
    pid = with_token.running.process.pid
    before = memory_of(pid)
    with grpc.insecure_channel(with_token.running.address, options=channel_options()) as channel:
        call = channel.unary_unary("/gpu_sim.GPUCoordinator/Memcpy", None, None)
        calls = [call.future(bytes(60 << 20), timeout=CALL_S) for _ in range(4)]
        assert {one.code().name for one in calls} == {"UNAUTHENTICATED"}
    assert memory_of(pid) - before < 60 << 20


def test_an_unknown_method_is_not_told_to_strangers(with_token: Guarded) -> None:
    for metadata, code in (
        ((), "UNAUTHENTICATED"),
        (with_token.proof(Role.CLIENT).metadata, "PERMISSION_DENIED"),
    ):
        with grpc.insecure_channel(with_token.running.address) as channel:
            call = channel.unary_unary("/hoop.v1.Coordinator/Nothing", None, None)
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=CALL_S, metadata=metadata)
        assert refused.value.code().name == code


@pytest.mark.parametrize("door", ["coordinator", "device"])
def test_without_a_certificate_there_is_no_connection(with_tls: Guarded, door: str) -> None:
    address = with_tls.running.address if door == "coordinator" else with_tls.device["address"]
    authority = with_tls.proof(Role.CLIENT).certificates
    assert authority is not None
    half = grpc.ssl_channel_credentials(authority.authority)
    name = (("grpc.ssl_target_name_override", f"{door}.hoop"),)
    with (
        grpc.secure_channel(address, half, options=name) as trusting,
        grpc.insecure_channel(address) as plain,
    ):
        for channel in (trusting, plain):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/hoop.v1.Coordinator/GetStatus", None, None)(b"", timeout=CALL_S)
            assert refused.value.code().name == "UNAVAILABLE"


def test_a_device_does_not_pass_for_the_coordinator(with_tls: Guarded) -> None:
    """Whoever dials the coordinator and meets a device's certificate hangs up."""
    client = with_tls.proof(Role.CLIENT)
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        hoop.connect(with_tls.device["address"], connect_timeout=1.0, credentials=client)


# ---- ring sockets


def said_to(address: str, words: bytes) -> FrameHeader:
    """The header of what a device's data port answers before it hangs up."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=CALL_S) as sock:
        sock.sendall(words)
        heard = b""
        while len(heard) < HEADER_BYTES and (data := sock.recv(4096)):
            heard += data
        if FrameHeader.unpack(heard[:HEADER_BYTES]).kind == FrameKind.CHALLENGE:
            sock.sendall(bytes(32))  # a proof by someone without the key
            heard = sock.recv(4096)
    return FrameHeader.unpack(heard[:HEADER_BYTES])


def test_a_ring_socket_without_proof_is_refused(either: Guarded) -> None:
    plain = FrameHeader(FrameKind.HELLO, 1, 1, 0, 1, 0).pack()
    keyed = FrameHeader(FrameKind.HELLO, 1, 1, 0, 1, 16).pack() + bytes(16)
    for words in (plain, keyed):
        assert said_to(either.device["data_address"], words).kind == FrameKind.REFUSAL


# ---- and it works


def test_a_client_with_proof_can_work(either: Guarded) -> None:
    with hoop.connect(either.running.address, credentials=either.proof(Role.CLIENT)) as connected:
        comm = connected.communicator(2)
        for total in comm.all_reduce([np.arange(1000.0), np.ones(1000)]):
            assert np.array_equal(total, np.arange(1000.0) + 1)
        comm.destroy()


def test_roles_in_files_of_their_own(with_token: Guarded, capsys: pytest.CaptureFixture[str]) -> None:
    """A machine with a client's token is a client; with it nothing else can be made or started."""
    join, client, device = (with_token.folder / name for name in ("join", "client", "device"))
    for role, path in (("client", client), ("device", device)):
        hoop_command("token", path, "--role", role, "--token-file", join)
        assert path.stat().st_mode & 0o777 == 0o600
    address = with_token.running.address
    ask = ["status", "--json", "--coordinator", address]
    hoop_command(*ask, "--token-file", client)
    assert len(json.loads(capsys.readouterr().out)["devices"]) >= 2
    for command in (
        [*ask, "--token-file", device],
        ["device", "--join", address, "--token-file", client],
        ["coordinator", "--token-file", device],
        ["token", with_token.folder / "more", "--role", "device", "--token-file", client],
    ):
        with pytest.raises(InvalidArgument, match="join token") as refused:
            hoop_command(*command)
        assert not any(path.read_text().strip() in str(refused.value) for path in (join, client, device))
    with pytest.raises(Unauthenticated, match="no token came with this call"):
        hoop_command(*ask)


def test_a_device_with_a_devices_token_serves_all_three(
    with_token: Guarded, start: Callable[..., Any], tmp_path: Path
) -> None:
    """It recognises the coordinator, clients and other devices, and proves its links, without the join token."""
    write_private(tmp_path / "device", Token.parse(SECRET).role_token(Role.DEVICE))
    address, port = with_token.running.address, free_port()
    # Whoever says where its links are reached shares no memory: they are TCP.
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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_the_token_is_nowhere_to_be_seen(with_token: Guarded) -> None:
    """Not in the arguments of any process, and not in what they say."""
    for pid in (with_token.device["pid"], with_token.running.process.pid):
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    derived = [Token.parse(SECRET).credential(role) for role in Role]
    assert not [one for one in (SECRET, *derived) if one in with_token.running.log.read_text()]


def test_python_says_who_it_is(with_token: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    address = with_token.running.address
    with pytest.raises(Unauthenticated, match="no token came with this call"):
        hoop.connect(address)
    with pytest.raises(Unauthenticated, match="not of this cluster"):
        hoop.connect(address, token=new_token())
    monkeypatch.setenv("HOOP_TOKEN", Token.parse(SECRET).role_token(Role.CLIENT))
    with hoop.connect(address) as cluster:
        assert cluster.status().devices
        with pytest.raises(PermissionDenied):
            cluster._call("Leave", pb.LeaveRequest(device_id=1))


@pytest.mark.slow
def test_training_with_a_token_of_its_own(run_hoop: Any) -> None:
    """``hoop train`` on this machine guards its coordinator and devices with HOOP_TOKEN."""
    done = run_hoop("train", "mnist", "-n", 2, "--epochs", 0, "--json", environment={"HOOP_TOKEN": new_token()})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["devices"] == 2


@pytest.mark.parametrize("command", ["coordinator", "up --devices 0", "device --join 127.0.0.1:1"])
def test_beyond_loopback_something_is_asked_for(command: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        hoop_command(*command.split(), "--host", "0.0.0.0")
    for word in ("hoop token FILE", "hoop certs DIR", "--insecure on a network you trust"):
        assert word in str(refused.value)
    (tmp_path / "open").write_text(new_token())
    os.chmod(tmp_path / "open", 0o644)
    with pytest.raises(InvalidArgument, match=r"mode 644.*chmod 600"):
        hoop_command(*command.split(), "--host", "0.0.0.0", "--token-file", tmp_path / "open")


def test_with_a_token_it_listens_anywhere(start: Callable[..., Any], tmp_path: Path) -> None:
    write_private(tmp_path / "join", new_token())
    assert start("coordinator", "--host", "0.0.0.0", "--token-file", tmp_path / "join").first.startswith("coordinator ")


def test_insecure_is_said_aloud(start: Callable[..., Any]) -> None:
    running = start("coordinator", "--host", "0.0.0.0", "--insecure")
    assert running.first.startswith("coordinator ")
    assert "callers are not authenticated" in running.errors
