"""A device that joins is checked: who can connect to it, to whom it can connect, and what a job does without it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lab_in_process import WAIT_S, Servers, lab_servers

import hoop
from hoop import job_events as ev
from hoop.cli.status import as_plain
from hoop.errors import FailedPrecondition, NotFound
from hoop.runs.training import choose_devices
from hoop.servers import device, link_checks
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.servers.link_checks import MAX_PEERS, choose_peers, needs_check
from hoop.servers.tasks import TrainFunction
from hoop.topology import Address, DeviceInfo

LACKS = "job: own_job is not on this machine"


def closed_port(cluster: Cluster) -> tuple[Address, socket.socket]:
    """A port that refuses connections. Its socket is bound until the test ends, so that no other process gets it."""
    reserved = socket.socket()
    cluster.cleanup.callback(reserved.close)
    reserved.bind(("127.0.0.1", 0))
    return Address("127.0.0.1", reserved.getsockname()[1]), reserved


class Cluster:
    """A coordinator, and devices that share no memory, as if each were on a host of its own."""

    def __init__(self, servers: Servers, cleanup: contextlib.ExitStack) -> None:
        self.servers, self.cleanup = servers, cleanup
        self.go_on = threading.Event()
        """Set: jobs may end."""
        self.ranks: list[int] = []
        """Ranks of each generation in which a device took part."""

    def train(self, context: Any, settings: str, emit: Any, stop: Callable[[], bool], resume: bytes | None) -> None:
        self.ranks.append(context.size)
        self.go_on.wait(WAIT_S)

    @staticmethod
    def lack_code(context: Any, settings: str, emit: Any, stop: Callable[[], bool], resume: bytes | None) -> None:
        """As the trainer of a device that does not have the job's module, or its data."""
        raise NotFound(LACKS)

    def join(self, device_id: int, trainer: TrainFunction | None = None, **options: Any) -> DeviceServer:
        coordinator = self.servers.coordinator.coordinator.address
        config = DeviceConfig(coordinator=coordinator, device_id=device_id, memory=1 << 20, **options)

        async def start() -> DeviceServer:
            server = DeviceServer(config, trainer=trainer or self.train)
            await server.start()
            return server

        server: DeviceServer = self.servers.call(start())
        self.cleanup.callback(lambda: self.servers.call(server.stop()))
        return server

    def wait_for(self, kind: str) -> str:
        found = self.servers.coordinator.coordinator.events.wait_for(lambda event: event.kind == kind, WAIT_S)
        assert found is not None, f"no event {kind}"
        return found.text


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr(link_checks, "RECHECK_S", 0.05)
    monkeypatch.setattr(device, "open_shm_transport", lambda *_: None)
    with lab_servers(0) as servers, contextlib.ExitStack() as cleanup:
        found = Cluster(servers, cleanup)
        try:
            yield found
        finally:
            found.go_on.set()


def test_a_device_with_a_closed_data_port_is_named_and_not_counted(cluster: Cluster) -> None:
    cluster.join(1)
    port, _ = closed_port(cluster)
    cluster.join(2, advertise_data=port)
    text = cluster.wait_for("device_unreachable")
    assert f"device 1 (127.0.0.1) cannot connect to its data port at {port} (Connection refused)" in text
    assert f"open port {port.port} there, or name an address that leads to it with hoop device --advertise-data" in text
    with hoop.connect(cluster.servers.address) as client:
        devices = as_plain(client.status())["devices"]
        assert [(one["id"], one["left_out"]) for one in devices] == [(1, False), (2, True)]
        assert f"cannot connect to its data port at {port}" in devices[1]["unreachable"]
        assert choose_devices(client, None) == [1]
        with pytest.raises(FailedPrecondition, match=r"2 asked for, 1 are alive.*; device 2 does not count: device 1"):
            choose_devices(client, 2)
        assert client.communicator(1).devices[0].info.device_id == 1
        # A client that asks for both gets the one, and the job's first event says why.
        job = client.start_job("{}", [2, 1])
        assert job.device_ids == [1]
        cluster.go_on.set()
        refused = [one.event for one in job.events() if isinstance(one.event, ev.Refused)]
    assert [one.device for one in refused] == [2]
    assert refused[0].text.startswith("device 2 (pid ")
    assert f"takes no part: device 1 (127.0.0.1) cannot connect to its data port at {port}" in refused[0].text
    assert cluster.ranks == [1]


def test_a_device_that_cannot_be_reached_does_not_join_a_running_job(cluster: Cluster) -> None:
    cluster.join(1)
    with hoop.connect(cluster.servers.address) as client:
        job = client.start_job("{}", [1])
        cluster.join(2, advertise_data=closed_port(cluster)[0])
        refused = next(one.event for one in job.events() if isinstance(one.event, ev.Refused))
        assert isinstance(refused, ev.Refused)
        assert refused.device == 2
        assert "cannot connect to its data port" in refused.text
        cluster.go_on.set()
        kinds = {type(one.event) for one in job.events()}
    assert ev.Reassigned not in kinds, "no generation is spent on it"


def test_a_port_that_is_opened_later_makes_the_device_count(cluster: Cluster) -> None:
    cluster.join(1)
    port, proxy = closed_port(cluster)
    second = cluster.join(2, advertise_data=port)
    cluster.wait_for("device_unreachable")
    # A proxy at the advertised address, which leads to the device's data port.
    real = second._transport.address
    with proxy:
        proxy.listen()
        stopped = threading.Event()

        def forward() -> None:
            while not stopped.is_set():
                try:
                    incoming, _ = proxy.accept()
                except OSError:
                    return
                with incoming, socket.create_connection((real.host, real.port)) as outgoing:
                    outgoing.sendall(incoming.recv(4096))
                    incoming.sendall(outgoing.recv(4096))

        thread = threading.Thread(target=forward)
        thread.start()
        try:
            cluster.wait_for("device_reachable")
            with hoop.connect(cluster.servers.address) as client:
                assert choose_devices(client, None) == [1, 2]
        finally:
            stopped.set()
            proxy.shutdown(socket.SHUT_RDWR)
            thread.join(WAIT_S)


def test_a_device_whose_services_cannot_be_called_is_not_counted(cluster: Cluster) -> None:
    cluster.join(1)
    cluster.join(2, advertise=closed_port(cluster)[0])
    assert "the coordinator cannot connect to its services at" in cluster.wait_for("device_unreachable")
    with hoop.connect(cluster.servers.address) as client:
        assert choose_devices(client, None) == [1]


def test_a_device_without_the_job_ends_it_before_the_first_step_by_name(cluster: Cluster) -> None:
    cluster.join(1)
    cluster.join(2, trainer=cluster.lack_code)
    with hoop.connect(cluster.servers.address) as client:
        job = client.start_job("{}", [1, 2])
        with pytest.raises(NotFound, match=rf"rank 1 \(device 2 on {socket.gethostname()}\): {LACKS}"):
            list(job.events())


def test_a_device_without_the_job_is_named_and_does_not_join_it(cluster: Cluster) -> None:
    cluster.join(1)
    with hoop.connect(cluster.servers.address) as client:
        job = client.start_job("{}", [1])
        cluster.join(2, trainer=cluster.lack_code)
        refused = next(one.event for one in job.events() if isinstance(one.event, ev.Refused))
        assert isinstance(refused, ev.Refused)
        assert refused.device == 2
        info = cluster.servers.coordinator.coordinator.state.members[2].info
        assert refused.text == f"{info} on {socket.gethostname()} cannot take part: {LACKS}"
        cluster.go_on.set()
        assert ev.Reassigned not in {type(one.event) for one in job.events()}


def test_devices_that_reach_each_other_cause_no_event(cluster: Cluster) -> None:
    for device_id in (1, 2, 3):
        cluster.join(device_id)
    with hoop.connect(cluster.servers.address) as client:
        job = client.start_job("{}", [1, 2, 3])  # it waits for the checks
        cluster.go_on.set()
        assert not [one for one in job.events() if isinstance(one.event, ev.Refused)]
    assert not cluster.servers.events("device_unreachable")
    assert cluster.ranks == [3, 3, 3]


def info(device_id: int, shared: Address | None = None, host: str = "127.0.0.1") -> DeviceInfo:
    address = Address(host, 4000 + device_id)
    return DeviceInfo(device_id, address, address, 0x1000, 0x2000, "h", 1, f"{device_id}", shared_address=shared)


def test_each_device_is_checked_with_a_few_others_and_none_with_all() -> None:
    members = [info(number) for number in range(1, 201)]
    asked = {
        one.device_id: [peer.device_id for peer in choose_peers(one, members[: one.device_id - 1])] for one in members
    }
    assert asked[1] == []
    assert asked[5] == [4, 3, 1, 2], "a small cluster is checked completely"
    assert asked[200] == [199, 198, 196, 192]
    assert max(map(len, asked.values())) == MAX_PEERS
    load = [sum(number in peers for peers in asked.values()) for number in range(1, 201)]
    assert max(load) <= 2 * MAX_PEERS


def test_devices_of_one_machine_that_share_memory_need_no_check() -> None:
    here, there = Address("machine-a", 1), Address("machine-b", 1)
    assert not needs_check(info(2, here), [info(1, here)])
    assert needs_check(info(2, here), [info(1)])
    assert needs_check(info(2, here, host="10.0.0.2"), [info(1, here)])
    assert [one.device_id for one in choose_peers(info(4, here), [info(1, here), info(2, there), info(3, there)])] == [
        3
    ]
