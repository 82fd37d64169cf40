"""What an operator sets on real networks: ranges of ports, other names of a host, IPv6, and the doctor of each host."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from lab_in_process import Servers, lab_servers

import hoop
from hoop.errors import FailedPrecondition
from hoop.servers import device
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.topology import Address, PortRange

if TYPE_CHECKING:
    from background import Running

    Run = Callable[..., subprocess.CompletedProcess[str]]

RANGE = 5
"""Ports of the range in these tests."""


def free_ports(host: str = "127.0.0.1") -> PortRange:
    """A range of ports, all of which are free; another one in each process of the tests."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for low in range(4000 + os.getpid() % 1000 * RANGE, 60000, RANGE):
        with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
            for port in range(low, low + RANGE):
                opened.enter_context(socket.create_server((host, port), family=family))
            return PortRange(low, low + RANGE - 1)
    raise AssertionError("no free range of ports")


def sums(servers: Servers) -> list[float]:
    """An all-reduce over the data links of all devices, asked for by a client."""
    with hoop.connect(servers.address) as cluster:
        comm = cluster.communicator(len(servers.devices))
        vectors = [np.full(10_000, rank + 1.0) for rank in range(len(servers.devices))]
        return sorted({float(value) for one in comm.all_reduce(vectors) for value in one})


@pytest.fixture
def no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices have TCP links only, as between hosts."""
    monkeypatch.setattr(device, "open_shm_transport", lambda *_: None)


@pytest.mark.usefixtures("no_shared_memory")
def test_devices_listen_within_one_range_of_ports() -> None:
    ports = free_ports()
    with lab_servers(2, port=ports, data_port=ports) as servers:
        used = {address.port for one in servers.devices for address in (one.info.address, one.info.data_address)}
        assert len(used) == 4
        assert used <= set(ports.ports)
        assert sums(servers) == [3.0]


def test_a_range_that_is_used_up_is_named() -> None:
    ports = free_ports()
    with contextlib.ExitStack() as taken:
        for port in ports.ports:
            taken.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(FailedPrecondition, match=rf"^--data-port: no port of {ports} is free on 127\.0\.0\.1"):
            DeviceServer(DeviceConfig(Address("127.0.0.1", 1), memory=1 << 20, data_port=ports))


@pytest.mark.usefixtures("no_shared_memory")
def test_a_device_advertises_another_name_than_it_listens_on() -> None:
    with lab_servers(2, advertised_host="localhost") as servers:
        for one in servers.devices:
            assert one.info.address.host == one.info.data_address.host == "localhost"
        assert sums(servers) == [3.0]


@pytest.mark.usefixtures("no_shared_memory")
def test_coordinator_devices_and_data_links_over_ipv6() -> None:
    ports = free_ports("::1")
    with lab_servers(2, CoordinatorConfig(host="::1"), host="::1", port=ports, data_port=ports) as servers:
        assert servers.address.startswith("[::1]:")
        assert all(str(one.info.data_address).startswith("[::1]:") for one in servers.devices)
        assert sums(servers) == [3.0]


class Doctor:
    """Stands for ``hoop doctor`` on the hosts, which would load PyTorch: notes what each was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, job: str, devices: int, jobs: Path) -> str:
        self.asked.append((job, devices))
        return json.dumps({"ok": True, "facts": {"host": "h"}, "checks": []})


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Doctor:
    found = Doctor()
    monkeypatch.setattr("hoop.servers.device_service.run_doctor", found)
    return found


def test_one_device_of_each_host_is_asked(doctor: Doctor) -> None:
    with lab_servers(3) as servers, hoop.connect(servers.address) as cluster:
        (host,) = cluster.examine_hosts("my_job:job")
    assert doctor.asked == [("my_job:job", 3)]
    assert host.host == socket.gethostname()
    assert list(host.device_ids) == [1, 2, 3]
    assert json.loads(host.json)["ok"] is True
    assert abs(host.clock_ahead_s) <= host.clock_error_s + 0.1, "the clock is the same"
    assert not host.failure


def test_a_doctor_that_fails_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: Any) -> str:
        raise FailedPrecondition("hoop doctor ended with code 2: no such option")

    monkeypatch.setattr("hoop.servers.device_service.run_doctor", fail)
    with lab_servers(1) as servers, hoop.connect(servers.address) as cluster:
        (host,) = cluster.examine_hosts()
    assert host.failure == "hoop doctor ended with code 2: no such option"


@pytest.mark.slow
def test_a_device_runs_the_real_doctor_on_its_host() -> None:
    """A process of its own, with the device's folder of jobs."""
    jobs = Path(__file__).parent
    with lab_servers(1, jobs=jobs) as servers, hoop.connect(servers.address) as cluster:
        (host,) = cluster.examine_hosts("train_driver:job")
    assert not host.failure
    found = json.loads(host.json)
    assert found["facts"]["arithmetic"]
    assert found["facts"]["data"]


def test_a_device_that_finds_no_free_port_says_so(run_hoop: Run) -> None:
    ports = free_ports()
    with contextlib.ExitStack() as taken:
        for port in ports.ports:
            taken.enter_context(socket.create_server(("127.0.0.1", port)))
        done = run_hoop("device", "--join", "127.0.0.1:1", "--memory", "1MiB", "--port", ports, "--insecure")
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1: no port of {ports} is free; give a larger range" in done.stderr


def test_the_doctor_of_this_machine(run_hoop: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_hoop("doctor", "--json", "--devices", 1, "--memory", "1MiB", "--port", port, "--job", "mnist")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [one["name"] for one in found["checks"] if one["verdict"] == "problem"] == ["port"]
    assert {"host", "hoop", "torch", "python", "processor", "arithmetic", "data"} <= set(found["facts"])


def test_the_doctor_of_a_cluster_that_is_not_there(run_hoop: Run) -> None:
    done = run_hoop("doctor", "--coordinator", "127.0.0.1:1")
    assert done.returncode == 1
    assert "is hoop coordinator running there, is its port open" in " ".join(done.stdout.split())


@pytest.mark.slow
def test_the_doctor_of_a_cluster(start: Callable[..., Running], run_hoop: Run) -> None:
    where = start("coordinator").address
    for jobs in (Path(__file__).parent, "."):
        assert start("device", "--join", where, "--memory", "16MiB", "--jobs", jobs).first_line
    done = run_hoop("doctor", "--coordinator", where, "--job", "train_driver.py:job", "--json", within=700.0)
    assert done.returncode == 0, done.stdout
    checks = json.loads(done.stdout)["checks"]
    named = {one["name"]: one for one in checks}
    assert named["devices"]["found"] == "2 alive on 1 host(s)"
    assert named["versions"]["found"].startswith("Hoop ")
    assert named["job and data"]["host"] == socket.gethostname()
    assert named["clock"]["verdict"] == "ok"
