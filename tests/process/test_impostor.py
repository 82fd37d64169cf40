"""A process at a port of the cluster gets no request, and its answers do not count: with a token, with certificates,
and on one machine without either."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from lab_in_process import WAIT_S, lab_servers

import hoop
from hoop.errors import DeadlineExceeded, Unauthenticated
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.channels import LEASE_S, channel_options
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc
from hoop.wire.local_sockets import socket_path
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

JOIN, OTHER = Token.parse(new_token()), Token.parse(new_token())


class Impostor(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """Counts every call that reaches it, and answers it as a coordinator would."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def service(self, details: Any) -> Any:
        self.calls.append(details.method)

        def answer(requests: Iterator[bytes], _: Any) -> Iterator[bytes]:
            for _request in requests:
                yield pb.GetStatusResponse(address="127.0.0.1:1").SerializeToString()

        return grpc.stream_stream_rpc_method_handler(answer)


@contextmanager
def impostor_at(port: int, credentials: Credentials | None) -> Iterator[tuple[Impostor, int]]:
    """An impostor with these certificates, or in plaintext; yields it and its port."""
    with ThreadPoolExecutor() as pool:
        server, handler = grpc.server(pool, options=(("grpc.so_reuseport", 0),)), Impostor()
        server.add_generic_rpc_handlers((handler,))
        address = f"127.0.0.1:{port}"
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            tls = credentials.certificates
            assert tls is not None
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(tls.key, tls.certificate)]))
        server.start()
        yield handler, port
        server.stop(None).wait(WAIT_S)


IMPOSTORS = {
    "with another token": (Credentials(Role.COORDINATOR, OTHER), "has another token or certificates"),
    "with a device's certificate": (Credentials(Role.DEVICE, JOIN), "has another token or certificates"),
    "without certificates": (None, "has no token and no certificates"),
}


@pytest.mark.parametrize("kind", IMPOSTORS)
def test_a_process_without_the_coordinator_s_certificate_gets_no_request(kind: str) -> None:
    theirs, problem = IMPOSTORS[kind]
    with impostor_at(0, theirs) as (impostor, port):
        for credentials in (Credentials(role, JOIN) for role in (Role.CLIENT, Role.DEVICE)):
            with pytest.raises(Unauthenticated, match=problem):
                hoop.connect(f"127.0.0.1:{port}", credentials=credentials)
            with credentials.channel(Address("127.0.0.1", port), Role.COORDINATOR, channel_options(LEASE_S)) as channel:
                with pytest.raises(grpc.RpcError) as failed:
                    pb_grpc.CoordinatorStub(channel).GetStatus(pb.GetStatusRequest(), timeout=WAIT_S)
                assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert impostor.calls == []


def test_a_server_of_the_cluster_gets_the_requests() -> None:
    """The other end of the test above: the same calls arrive at a server with the right certificate."""
    with impostor_at(0, Credentials(Role.COORDINATOR, JOIN)) as (server, port):
        hoop.connect(f"127.0.0.1:{port}", credentials=Credentials(Role.CLIENT, JOIN)).close()
        assert server.calls


@pytest.mark.parametrize("token", [None, JOIN], ids=["local", "token"])
def test_an_impostor_at_the_coordinator_s_port_gets_nothing(token: Token | None) -> None:
    """The coordinator is gone, and another process has its TCP port. The device, which calls it all the time, does not
    call the other one, and joins again when the coordinator is back."""
    mine = Credentials(Role.COORDINATOR, token, local=token is None)
    with lab_servers(1, CoordinatorConfig(credentials=mine), credentials=mine.for_role(Role.DEVICE)) as servers:
        port = Address.parse(servers.address).port
        heartbeats = servers.devices[0]._heartbeat_client
        servers.call(servers.coordinator.stop())
        with impostor_at(port, None) as (impostor, _):
            failures, tried = heartbeats.failures, threading.Event()
            while heartbeats.failures < failures + 5:
                assert not tried.wait(0.01)
            assert impostor.calls == []

        async def start() -> CoordinatorServer:
            server = CoordinatorServer(CoordinatorConfig(port=port, credentials=mine))
            await server.start()
            return server

        again = servers.call(start())
        try:
            joined = again.coordinator.events.wait_for(lambda event: event.kind == "device_joined", WAIT_S)
            assert joined is not None
        finally:
            servers.call(again.stop())


KILLED = """
import asyncio, sys
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.wire.auth import Credentials
from hoop.wire.roles import Role
async def run():
    config = CoordinatorConfig(credentials=Credentials(Role.COORDINATOR, local=True))
    print(await CoordinatorServer(config).start(), flush=True)
    await asyncio.sleep(3600)
asyncio.run(run())
"""


def test_callers_of_a_killed_coordinator_do_not_go_to_the_process_that_takes_its_port() -> None:
    """Its socket stays, and leads nowhere."""
    with subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        address = Address.parse(coordinator.stdout.readline())
        hoop.connect(address).close()
        coordinator.send_signal(signal.SIGKILL)
        coordinator.wait(WAIT_S)
    try:
        with impostor_at(address.port, None) as (impostor, _):
            with pytest.raises(DeadlineExceeded, match="did not answer"):
                hoop.connect(address, connect_timeout=2.0)
            assert impostor.calls == []
    finally:
        socket_path(address.port).unlink()


# ---- another user


AS_NOBODY = """
import os, socket, sys
from pathlib import Path
from hoop.errors import HoopError
from hoop.topology import Address
from hoop.wire.auth import Credentials
from hoop.wire.roles import Role

def connect(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(path))

path, address = Path(sys.argv[1]), Address.parse(sys.argv[2])
"host".encode("idna")  # loads the codec that connections need
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
os.environ.pop("XDG_RUNTIME_DIR")
for attempt in (
    lambda: connect(path),
    lambda: path.unlink(),
    lambda: path.with_name("1.sock").write_text(""),
    lambda: Credentials(Role.DEVICE, local=True).check_coordinator(address),
):
    try:
        attempt()
        print("it worked")
    except (OSError, HoopError) as error:
        print(type(error).__name__, error)
"""


@pytest.fixture
def open_runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A runtime directory that every user can open: only the mode of Hoop's folder in it keeps others out."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="tests-") as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="to be somebody else one must be root")
@pytest.mark.usefixtures("open_runtime")
def test_another_user_reaches_no_socket_and_its_device_says_why_it_cannot_join() -> None:
    local = Credentials(Role.COORDINATOR, local=True)
    with lab_servers(1, CoordinatorConfig(credentials=local), credentials=local.for_role(Role.DEVICE)) as servers:
        coordinator = Address.parse(servers.address)
        for address in (coordinator, servers.info(0).address):
            path = socket_path(address.port)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(str(path))
            command = [sys.executable, "-c", AS_NOBODY, str(path), str(coordinator)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, cwd="/")
            *refused, reason = done.stdout.splitlines()
            assert [line.split()[0] for line in refused] == ["PermissionError"] * 3, done
            assert "has no socket" in reason
            assert "another user's" in reason
        Credentials(Role.DEVICE, local=True).check_coordinator(coordinator)  # this user's own: no error
