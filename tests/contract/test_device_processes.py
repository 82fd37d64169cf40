"""What a coordinator learns about the process of a device, on its own host and on another one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import preloaded
import pytest

from hoop.errors import InvalidArgument
from hoop.host_processes import ProcessState, own_process, state_of
from hoop.membership import events as m
from hoop.servers.device_processes import DeviceProcesses, ServerProbe
from hoop.servers.device_service import DeviceService
from hoop.topology import Address, DeviceInfo
from hoop.transport.port_check import PortCheck
from hoop.wire.generated import hoop_pb2 as pb

WAIT_S = 60.0
SERVER = """
import asyncio, ctypes, sys
from grpc import aio
from hoop.host_processes import own_process

async def main():
    server = aio.server()
    print(server.add_insecure_port("127.0.0.1:0"), own_process(), sep=";", flush=True)
    await server.start()
    print("started", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    print("holds", flush=True)
    ctypes.PyDLL(None).getchar()  # does not release the interpreter's lock
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Server:
    """A process with a gRPC server that can hold its interpreter's lock."""

    def __init__(self) -> None:
        self.process = preloaded.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        port, self.identity = self.line().split(";")
        self.port = int(port)
        assert self.line() == "started"

    def line(self) -> str:
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).strip()

    def info(self, here: bool) -> DeviceInfo:
        """The description of a device. ``here`` False: its process is one of another host."""
        address = Address("127.0.0.1", self.port)
        identity = self.identity if here else ""
        return DeviceInfo(7, address, address, 0, 1, "host", self.process.pid, "a", process=identity)

    def hold_interpreter(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        assert self.line() == "holds"


@contextmanager
def running_server() -> Iterator[Server]:
    server = Server()
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate(timeout=WAIT_S)


def probe(info: DeviceInfo) -> m.Probed:
    return asyncio.run(DeviceProcesses(lambda probed: None, tls=False).probe(info))


@pytest.mark.parametrize("here", [True, False], ids=["one host", "another host"])
def test_a_process_that_runs_is_seen_to_run_although_its_interpreter_is_held(here: bool) -> None:
    with running_server() as server:
        assert probe(server.info(here)).runs_at > 0
        server.hold_interpreter()
        assert probe(server.info(here)).runs_at > 0


@pytest.mark.parametrize("here", [True, False], ids=["one host", "another host"])
def test_a_process_that_is_stopped_gives_no_sign(here: bool) -> None:
    with running_server() as server:
        os.kill(server.process.pid, signal.SIGSTOP)
        deadline = time.monotonic() + WAIT_S
        while state_of(server.process.pid, server.identity) is not ProcessState.STOPPED:
            assert time.monotonic() < deadline, f"process {server.process.pid} does not stop"
        assert probe(server.info(here)) == m.Probed(7, "a", "")


@pytest.mark.parametrize(("here", "why"), [(True, "has ended"), (False, "refuses connections")])
def test_a_process_that_has_ended_is_known(here: bool, why: str) -> None:
    with running_server() as server:
        server.process.kill()
        server.process.wait(WAIT_S)
        assert why in probe(server.info(here)).failure


def test_the_end_of_a_process_of_this_host_is_reported_at_once() -> None:
    async def watch(server: Server) -> m.Probed:
        ended: asyncio.Future[m.Probed] = asyncio.get_running_loop().create_future()
        processes = DeviceProcesses(ended.set_result, tls=False)
        processes.watch(server.info(here=True))
        processes.watch(server.info(here=True))
        server.process.kill()
        probed = await asyncio.wait_for(ended, WAIT_S)
        processes.keep_only(set())
        return probed

    with running_server() as server:
        assert asyncio.run(watch(server)).failure == f"its process {server.process.pid} has ended"


def check_servers(*addresses: Address) -> list[bool]:
    """What a device answers whom the coordinator asks about the servers of others."""
    service = DeviceService(None, None, None, None, PortCheck(b""), ServerProbe(tls=False))  # type: ignore[arg-type]
    request = pb.CheckLinksRequest(addresses=map(str, addresses))
    return list(asyncio.run(service.check_links(request)).answers)


def test_another_device_confirms_that_a_server_answers_and_not_that_it_does_not() -> None:
    """Whether its interpreter is held or not. A process that is stopped does not answer, nor one that has ended."""
    with running_server() as held, running_server() as stopped, running_server() as ended:
        addresses = [one.info(here=False).address for one in (held, stopped, ended)]
        assert check_servers(*addresses) == [True] * 3
        held.hold_interpreter()
        os.kill(stopped.process.pid, signal.SIGSTOP)
        ended.process.kill()
        ended.process.wait(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while state_of(stopped.process.pid, stopped.identity) is not ProcessState.STOPPED:
            assert time.monotonic() < deadline, f"process {stopped.process.pid} does not stop"
        assert check_servers(*addresses) == [True, False, False]


def test_a_device_is_asked_about_few_servers_at_a_time() -> None:
    with pytest.raises(InvalidArgument, match="addresses: 65 are more than 64; check fewer at a time"):
        check_servers(*[Address("127.0.0.1", 1)] * 65)


def test_a_process_of_another_start_or_host_is_not_taken_for_this_one() -> None:
    host, _, start = own_process().rpartition(" ")
    assert state_of(os.getpid(), own_process()) is ProcessState.RUNS
    assert state_of(os.getpid(), f"{host} {int(start) - 1}") is ProcessState.ENDED
    assert state_of(os.getpid(), f"another {start}") is ProcessState.UNKNOWN
    assert state_of(os.getpid(), "") is ProcessState.UNKNOWN


@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")
def test_a_device_that_asks_for_a_certificate_answers_a_probe_by_its_handshake(tmp_path: Path) -> None:
    """The probe has no certificate of the cluster, and a device with certificates wants one."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=device", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*words, *names], check=True, capture_output=True, timeout=WAIT_S)
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())], certificate.read_bytes(), True
    )

    async def probed() -> m.Probed:
        server = grpc.aio.server()
        address = Address("127.0.0.1", server.add_secure_port("127.0.0.1:0", credentials))
        await server.start()
        try:
            info = DeviceInfo(7, address, address, 0, 1, "host", os.getpid(), "a", process="")
            return await DeviceProcesses(lambda probed: None, tls=True).probe(info)
        finally:
            await server.stop(None)

    assert asyncio.run(probed()).runs_at > 0
