"""A server outlives every message: raw HTTP/2 frames and other malformed messages at every port.

``HOOP_FUZZ_MESSAGES`` is how many of them each port gets; in the slow test it is 100,000. Afterwards the server does
what a good process asks, nothing is on its standard error that is a bug, its descriptors and threads are back, and its
memory has grown by less than ``MAX_MEGABYTES``. Some versions of grpcio end an asyncio server at one request (1.84.0 to
1.85.1: a path that is not UTF-8). A server that ends listens again, and a process that cannot get its server back ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.cookiejar
import itertools
import json
import os
import re
import socket
import ssl
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from background import START_S, Running
from lab_cluster import CALL_S, Cluster, hoop_up, resident_bytes, wait_for
from lab_in_process import WAIT_S, Servers, lab_servers
from malformed import (
    Port,
    Site,
    call_of,
    deliver,
    handshake,
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
from hoop.servers import grpc_server
from hoop.topology import Address
from hoop.transport.shm_listener import socket_name
from hoop.wire.local_sockets import socket_path
from hoop.wire.private_files import write_private
from hoop.wire.roles import Role
from hoop.wire.tokens import Token, new_token

MESSAGES = int(os.environ.get("HOOP_FUZZ_MESSAGES", "200"))
MAX_MEGABYTES = 96
"""Most memory that a process may grow by during the messages at one of its ports."""
WARM_UP = 50
"""Messages at a port before its process is measured."""
SPARE = 6
"""Descriptors and threads that a process may have more than before: those of gRPC and of other connections of its own
come and go."""
RAW_PATHS = (b"/\xff", b"/hoop.v1.Coordinator/GetStatus\xff\xfe", b"\x00", b"/\xed\xa0\x80/\xc0\xaf")


MODES = ("local", "insecure", "tls")
"""Sockets of this user, with TCP ports that refuse every call; TCP ports that accept every caller; TLS with a token."""


@contextmanager
def cluster_of(folder: Path, mode: str, *options: str) -> Iterator[tuple[Cluster, hoop.Cluster, ssl.SSLContext | None]]:
    """A cluster of two devices, a client of it, and how a raw connection to its TCP ports is made."""
    if mode != "tls":
        options = (*options, "--insecure") if mode == "insecure" else options
        with hoop_up(2, *options, check_log=False) as running, hoop.connect(running.address) as client:
            yield running, client, None
        return
    text = new_token()
    write_private(folder / "token", text)
    made = Token.parse(text).certificates(Role.CLIENT)
    write_private(folder / "client.pem", f"{made.certificate.decode()}{made.key.decode()}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.load_cert_chain(folder / "client.pem")
    context.set_alpn_protocols(["h2"])
    with (
        hoop_up(2, "--token-file", str(folder / "token"), *options, check_log=False) as running,
        hoop.connect(running.address, token=text) as client,
    ):
        yield running, client, context


@dataclass(frozen=True)
class Usage:
    """What a process uses."""

    megabytes: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        counts = (len(os.listdir(f"/proc/{pid}/{folder}")) for folder in ("fd", "task"))
        return cls(resident_bytes(pid) >> 20, *counts)

    def is_back(self, pid: int) -> bool:
        """Whether the process has no more descriptors and threads than this. Those of gRPC come and go."""
        now = Usage.of(pid)
        return now.descriptors <= self.descriptors + SPARE and now.threads <= self.threads + SPARE


@dataclass(frozen=True)
class Victim:
    """A port, and the process whose it is."""

    name: str
    pid: int
    port: Port
    works: Callable[[], bool]
    """Whether the server does what a good process asks."""


Start = Callable[..., Running]


def address_in(text: str) -> tuple[str, int]:
    place = urllib.parse.urlsplit(text)
    assert place.hostname is not None
    assert place.port is not None
    return place.hostname, place.port


@contextmanager
def cluster_ports(folder: Path, start: Start, mode: str) -> Iterator[list[Victim]]:
    """Every port and socket of gRPC and of data links of a cluster of two devices."""
    with cluster_of(folder, mode) as (running, client, tls):
        status = client.status().devices
        device, works = status[0].device, partial(answers, client)
        members = {each.device.device_id: each.device.pid for each in status}
        data = Address.parse(device.data_address)
        victims = [Victim("data", device.pid, Port(tcp(data.host, data.port), link_frames), works)]
        servers = (
            ("coordinator", running.process.pid, Address.parse(running.address)),
            ("device", device.pid, Address.parse(device.address)),
        )
        for name, pid, where in servers:
            victims.append(Victim(name, pid, Port(tcp(where.host, where.port, tls), http2), works))
            if mode == "tls":
                victims.append(Victim(f"{name}, no TLS", pid, Port(tcp(where.host, where.port), http2), works))
            if mode == "local":
                victims.append(Victim(f"{name}'s socket", pid, Port(unix(str(socket_path(where.port))), http2), works))
        if mode == "local":
            shared = unix(socket_name(Address.parse(device.shared_address)))
            victims.append(Victim("shared memory", device.pid, Port(shared, link_frames), works))
        yield victims
        alive = {each.device.device_id: each.device.pid for each in client.status().devices if each.state == "alive"}
        assert alive == members
        assert "a bug in Hoop" not in running.log.read_text(errors="replace")


@contextmanager
def http_ports(folder: Path, start: Start) -> Iterator[list[Victim]]:
    """The metrics of a coordinator and a device, the dashboard, and one with a login and buttons."""
    up = start("up", "--devices", 1, "--insecure", "--metrics", "127.0.0.1:0")
    with hoop.connect(up.address) as client:
        pids = {"": up.pid, "device 1: ": client.status().devices[0].device.pid}
    up.wait_for_error("device 1: metrics at")
    served = re.findall(r"(device \d+: )?metrics at (http://\S+)", up.errors)
    found = []
    for who, url in dict(served).items():
        place = urllib.parse.urlsplit(url)
        attack = partial(http1, site=Site(place.netloc, ("/metrics", "/", "/metrics?name[]=x")))
        port = Port(tcp(*address_in(url)), attack, slow=2)  # it answers four at a time
        found.append(Victim(f"{who}metrics", pids[who], port, partial(shows, url, b"hoop_")))
    for options in ((), ("--login", "--actions")):
        dashboard = start("dashboard", "-c", up.address, "--port", 0, *options)
        url = dashboard.address
        site = Site(urllib.parse.urlsplit(url).netloc, (*PAGES, "/login", "/admin"))
        if options:
            (password,) = re.findall(r"^admin_password (\S+)$", dashboard.errors, re.MULTILINE)
            site.page, site.cookie = "/admin", log_in(url, password)
        name = f"dashboard {' '.join(options)}".strip()
        port = Port(tcp(*address_in(url)), partial(http1, site=site))
        found.append(Victim(name, dashboard.pid, port, partial(opens_a_page, site)))
    yield found


PAGES = (
    "/",
    "/ws",
    "/static/js/bokeh.min.js",
    "/autoload.js",
    "/metadata",
    "/favicon.ico",
    "/?tab=%ff",
    "/?bokeh-token=x",
)


def shows(url: str, text: bytes) -> bool:
    """Whether a page has the text; while other connections are open a scrape may be refused."""
    with contextlib.suppress(OSError, http.client.HTTPException), urllib.request.urlopen(url, timeout=CALL_S) as answer:
        return text in answer.read()
    return False


def log_in(url: str, password: str) -> str:
    """The cookie of a user who has given this password."""
    jar = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    with opener.open(f"{url}/login", timeout=CALL_S) as form:
        (value,) = re.findall(r'name="_xsrf" value="([^"]+)"', form.read().decode())
    with opener.open(
        f"{url}/login", urllib.parse.urlencode({"token": password, "_xsrf": value}).encode(), timeout=CALL_S
    ) as answer:
        assert answer.status == 200
    return "; ".join(f"{one.name}={one.value}" for one in jar)


def opens_a_page(site: Site) -> bool:
    """Whether a browser gets a page and its websocket the first message. Pages of before are forgotten in a while."""
    with contextlib.suppress(OSError, http.client.HTTPException, IndexError):
        place = Address.parse(site.host)
        with tcp(place.host, place.port)() as sock, sock.makefile("rb") as answer:
            sock.sendall(handshake(site, replace(site).token()))
            if b" 101 " not in answer.readline():
                return False
            while answer.readline() not in (b"\r\n", b""):
                pass
            return answer.read(1) == b"\x81"
    return False


@contextmanager
def ordered_ranks(folder: Path, start: Start, role: str, *options: str) -> Iterator[tuple[Running, list[OrderedRank]]]:
    """Two ranks of ``hoop run`` that do what the test orders (``ordered_ranks.py``)."""
    path = folder / role
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(START_S)
        run = start("run", "-np", 2, *options, Path(__file__).with_name("ordered_ranks.py"), path, role)
        ranks = []
        for _ in range(2):
            sock = stack.enter_context(listener.accept()[0])
            sock.settimeout(START_S)
            ranks.append(OrderedRank(stack.enter_context(sock.makefile("rw"))))
        yield run, sorted(ranks, key=lambda rank: int(rank.described["slot"]))
        for rank in ranks:
            rank.say("end")
        assert run.wait() == 0


class OrderedRank:
    """A rank that waits for orders."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.described: dict[str, Any] = json.loads(stream.readline())

    def say(self, order: str) -> None:
        print(order, file=self._stream, flush=True)

    def answer(self) -> Any:
        return json.loads(self._stream.readline())


def all_answer(ranks: list[OrderedRank], expected: list[Any]) -> bool:
    """Whether each rank answers a good order with what is expected of it."""
    for rank in ranks:
        rank.say("good")
    return [rank.answer() for rank in ranks] == expected


@contextmanager
def rendezvous_port(folder: Path, start: Start) -> Iterator[list[Victim]]:
    """The port at which ``hoop run --min-np`` forms rounds."""
    with ordered_ranks(folder, start, "rendezvous", "--min-np", "2") as (run, ranks):
        meeting = Address.parse(ranks[0].described["address"])
        port = Port(tcp(meeting.host, meeting.port), rendezvous_lines)
        yield [Victim("rendezvous", run.pid, port, partial(all_answer, ranks, [2, 2]))]


@contextmanager
def torch_ports(folder: Path, start: Start) -> Iterator[list[Victim]]:
    """The listeners of a rank of ``torch.distributed``: for messages, and for memory that ranks share."""
    with ordered_ranks(folder, start, "torch") as (_, ranks):
        described, works = ranks[0].described, partial(all_answer, ranks, [[3.0, 3.0, 3.0]] * 2)
        messages, shared = (Address.parse(described["listeners"][scheme]) for scheme in ("tcp", "shm"))
        yield [
            Victim("torch messages", described["pid"], Port(tcp(messages.host, messages.port), link_frames), works),
            Victim("torch shared memory", described["pid"], Port(unix(socket_name(shared)), link_frames), works),
        ]


PORTS: dict[str, tuple[Callable[..., Any], int]] = {
    "cluster": (partial(cluster_ports, mode="local"), 6),
    "cluster without credentials": (partial(cluster_ports, mode="insecure"), 3),
    "cluster with a token": (partial(cluster_ports, mode="tls"), 5),
    "http": (http_ports, 4),
    "rendezvous": (rendezvous_port, 1),
    "torch.distributed": (torch_ports, 2),
}
"""Ports of processes that are started together, and how many these are."""


@pytest.mark.parametrize("ports", PORTS)
@pytest.mark.parametrize(
    "messages", [MESSAGES, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_malformed_messages_at_every_port_leave_the_processes_up(
    tmp_path: Path, start: Start, ports: str, messages: int
) -> None:
    open_ports, count = PORTS[ports]
    with open_ports(tmp_path, start) as targets:
        assert len(targets) == count
        for victim in targets:
            check_victim(victim, messages)


def check_victim(victim: Victim, messages: int) -> None:
    """Sends malformed messages to a port, and asserts that its process is as before."""
    wait_for(victim.works, f"an answer of {victim.name}")
    for _ in send_malformed(victim.port, WARM_UP, seed=WARM_UP):  # threads and pools that are made when first used
        pass
    wait_for(victim.works, f"an answer of {victim.name}")
    before, began = Usage.of(victim.pid), time.monotonic()
    for sent in send_malformed(victim.port, messages, seed=messages):  # noqa: B007 - the last one counts
        pass
    took = time.monotonic() - began
    wait_for(victim.works, f"an answer of {victim.name} after {sent} messages")
    wait_for(partial(before.is_back, victim.pid), f"the descriptors and threads of {victim.name}: {before}")
    after = Usage.of(victim.pid)
    print(f"{victim.name}: {sent} messages in {took:.0f} s; {before} -> {after}")
    assert after.megabytes - before.megabytes < MAX_MEGABYTES, f"{victim.name}: {before} -> {after}"


def answers(client: hoop.Cluster) -> bool:
    """Whether an all-reduce works. A call that was lost with a server is made again by the caller."""
    with contextlib.suppress(HoopError):
        comm = client.communicator(2)
        totals = comm.all_reduce([np.arange(100.0), np.ones(100)])
        comm.destroy()
        return all(np.array_equal(total, np.arange(100.0) + 1) for total in totals)
    return False


@pytest.mark.parametrize("mode", MODES)
def test_a_request_with_any_path_leaves_the_servers_up(tmp_path: Path, mode: str) -> None:
    with cluster_of(tmp_path, mode) as (running, client, tls):
        devices = [one.device for one in client.status().devices]
        for address in (running.address, devices[0].address):
            where = Address.parse(address)
            ways = [tcp(where.host, where.port, tls)]
            if mode == "local":
                ways.append(unix(str(socket_path(where.port))))
            for connect, path in itertools.product(ways, RAW_PATHS):
                with connect() as sock:
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
