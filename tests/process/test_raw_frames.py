"""A server outlives every message: raw HTTP/2 frames and other malformed messages at every port.

``HOOP_FUZZ_MESSAGES`` is how many of them each port gets; in the slow test it is 100,000. Some versions of grpcio end
an asyncio server at one request (1.84.0 to 1.85.1: a path that is not UTF-8). A server that ends listens again, and a
process that cannot get its server back ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import ssl
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from lab_cluster import CALL_S, Cluster, hoop_up, resident_bytes, wait_for
from lab_in_process import WAIT_S, Servers, lab_servers
from malformed import (
    Port,
    call_of,
    deliver,
    http1,
    http2,
    link_frames,
    opening,
    rendezvous_lines,
    send_malformed,
    tcp,
    unix,
)

import hoop
from hoop.errors import FailedPrecondition, HoopError
from hoop.launch.rendezvous_server import ADDRESS_VARIABLE, RendezvousServer
from hoop.servers import grpc_server
from hoop.topology import Address
from hoop.transport.shm_listener import socket_name

MESSAGES = int(os.environ.get("HOOP_FUZZ_MESSAGES", "200"))
MAX_MEGABYTES = 96
"""Most memory that a process may grow by during the messages at one of its ports."""
RAW_PATHS = (b"/\xff", b"/hoop.v1.Coordinator/GetStatus\xff\xfe", b"\x00", b"/\xed\xa0\x80/\xc0\xaf")


@contextmanager
def cluster_of(
    folder: Path, secured: bool, *options: str
) -> Iterator[tuple[Cluster, hoop.Cluster, ssl.SSLContext | None]]:
    """A cluster of two devices, plain or with certificates, a client of it, and how a raw connection is made."""
    if not secured:
        with hoop_up(2, "--insecure", *options, check_log=False) as running, hoop.connect(running.address) as client:
            yield running, client, None
        return
    if shutil.which("openssl") is None:
        pytest.skip("hoop certs needs the openssl command")
    certs = folder / "certs"
    preloaded.run([*preloaded.HOOP, "certs", str(certs)], timeout=CALL_S, check=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(certs / "client" / "cert.pem", certs / "client" / "key.pem")
    context.set_alpn_protocols(["h2"])
    with (
        hoop_up(2, "--tls", str(certs), *options, check_log=False) as running,
        hoop.connect(running.address, tls=str(certs)) as client,
    ):
        yield running, client, context


@dataclass(frozen=True)
class Usage:
    """What a process uses."""

    megabytes: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        return cls(resident_bytes(pid) >> 20, len(os.listdir(f"/proc/{pid}/fd")))


@dataclass(frozen=True)
class Victim:
    """A port, and the process whose it is."""

    name: str
    pid: int
    port: Port


def address_in(text: str) -> tuple[str, int]:
    place = urllib.parse.urlsplit(text)
    assert place.hostname is not None
    assert place.port is not None
    return place.hostname, place.port


@contextmanager
def victims(folder: Path, secured: bool, start: Callable[..., Any]) -> Iterator[tuple[list[Victim], hoop.Cluster]]:
    """Every port of a cluster of two devices with metrics, its dashboard, and the rendezvous of ``hoop run``."""
    with cluster_of(folder, secured, "--metrics", "127.0.0.1:0") as (running, client, tls), ExitStack() as stack:
        device = client.status().devices[0].device
        control, data = Address.parse(device.address), Address.parse(device.data_address)
        coordinator = Address.parse(running.address)
        found = [
            Victim("coordinator", running.process.pid, Port(tcp(coordinator.host, coordinator.port, tls), http2)),
            Victim("device", device.pid, Port(tcp(control.host, control.port, tls), http2)),
            Victim("data", device.pid, Port(tcp(data.host, data.port), link_frames)),
        ]
        if secured:  # the other ports are the same without certificates
            plain = tcp(coordinator.host, coordinator.port)
            yield [*found, Victim("coordinator, no TLS", running.process.pid, Port(plain, http2))], client
            return
        shared = unix(socket_name(Address.parse(device.shared_address)))
        found.append(Victim("shared memory", device.pid, Port(shared, link_frames)))
        metrics = re.findall(r"(?:(device) \d+: )?metrics at (http://\S+)", running.log.read_text(errors="replace"))
        pids = {"": running.process.pid, "device": device.pid}
        found += [
            Victim(f"{who} metrics", pids[who], Port(tcp(*address_in(url)), http1))
            for who, url in dict(metrics).items()
        ]
        dashboard = start("dashboard", "-c", running.address, "--port", 0, "--json")
        page = json.loads(dashboard.first_line)["dashboard"]
        found.append(Victim("dashboard", dashboard.process.pid, Port(tcp(*address_in(page)), http1)))
        rendezvous = RendezvousServer(2, 2)
        stack.callback(rendezvous.close)
        meeting = Address.parse(rendezvous.variables[ADDRESS_VARIABLE])
        found.append(Victim("rendezvous", os.getpid(), Port(tcp(meeting.host, meeting.port), rendezvous_lines)))
        yield found, client


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(
    "messages", [MESSAGES, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_malformed_messages_at_every_port_leave_the_processes_up(
    tmp_path: Path, start: Callable[..., Any], secured: bool, messages: int
) -> None:
    with victims(tmp_path, secured, start) as (targets, client):
        assert len(targets) == (4 if secured else 8)
        wait_for(lambda: answers(client), "an all-reduce")
        members = {one.device.device_id: one.device.pid for one in client.status().devices}
        for victim in targets:
            before, began = Usage.of(victim.pid), time.monotonic()
            for sent in send_malformed(victim.port, messages, seed=messages):  # noqa: B007 - the last one counts
                pass
            wait_for(lambda: answers(client), f"an all-reduce after {sent} messages at {victim.name}")
            after = Usage.of(victim.pid)
            took = time.monotonic() - began
            print(f"{victim.name}: {sent} messages in {took:.0f} s; {before} -> {after}")
            assert after.megabytes - before.megabytes < MAX_MEGABYTES, f"{victim.name}: {before} -> {after}"
        alive = {one.device.device_id: one.device.pid for one in client.status().devices if one.state == "alive"}
        assert alive == members


def answers(client: hoop.Cluster) -> bool:
    """Whether an all-reduce works. A call that was lost with a server is made again by the caller."""
    with contextlib.suppress(HoopError):
        comm = client.communicator(2)
        totals = comm.all_reduce([np.arange(100.0), np.ones(100)])
        comm.destroy()
        return all(np.array_equal(total, np.arange(100.0) + 1) for total in totals)
    return False


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "tls"])
def test_a_request_with_any_path_leaves_the_servers_up(tmp_path: Path, secured: bool) -> None:
    with cluster_of(tmp_path, secured) as (running, client, tls):
        devices = [one.device for one in client.status().devices]
        for address in (running.address, devices[0].address):
            where = Address.parse(address)
            for path in RAW_PATHS:
                with tcp(where.host, where.port, tls)() as sock:
                    deliver(sock, opening() + call_of(path), wait=True)
                wait_for(lambda: answers(client), "an all-reduce")
        members = {one.device.device_id: (one.device.pid, one.state) for one in client.status().devices}
        assert members == {one.device_id: (one.pid, "alive") for one in devices}
        assert "a bug in Hoop" not in running.log.read_text(errors="replace")


# ---- a server that ends


class Refusing:
    """In place of the function that starts a server."""

    async def __call__(self, address: Address) -> Any:
        raise FailedPrecondition(f"cannot listen on {address}: the port is in use or not ours")


def end_server(servers: Servers, server: grpc_server.Server) -> None:
    """As an error in gRPC's loop does."""
    servers.call(server._server.stop(None))


def restarted(server: grpc_server.Server) -> bool:
    return server.restarts == 1


def test_a_server_that_ends_listens_again_at_its_port() -> None:
    with lab_servers(1) as servers:
        coordinator, device = servers.coordinator.coordinator._server, servers.devices[0]._server
        assert coordinator is not None
        assert device is not None
        for server in (coordinator, device):
            end_server(servers, server)
            wait_for(partial(restarted, server), "the server's restart")
        with hoop.connect(servers.address) as client:
            wait_for(lambda: client.device(1).allocate("a", 64, reuse=True) > 0, "a call to each")


def test_a_device_without_a_server_is_dismissed_and_does_not_say_that_it_is_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(grpc_server, "LISTEN_AGAIN_S", 0.0)
    with lab_servers(1) as servers:
        device = servers.devices[0]
        assert device._server is not None
        device._server._start = Refusing()
        end_server(servers, device._server)
        servers.call(asyncio.wait_for(device.dismissed.wait(), WAIT_S))
        assert "cannot start again" in str(device.failure)
        assert device.exit_code == 1
        coordinator = servers.coordinator.coordinator
        wait_for(lambda: not coordinator.state.members[1].usable, "the end of device 1")


def test_a_coordinator_without_a_server_says_that_it_must_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "LISTEN_AGAIN_S", 0.0)
    with lab_servers(0) as servers:
        coordinator = servers.coordinator.coordinator
        assert coordinator._server is not None
        coordinator._server._start = Refusing()
        end_server(servers, coordinator._server)
        with pytest.raises(FailedPrecondition, match=rf"{coordinator.address} ended .*cannot start again"):
            servers.call(asyncio.wait_for(coordinator.wait_failed(), WAIT_S))
