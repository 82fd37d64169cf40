"""The weights are the product: they come out however the coordinator and the client fare while a job ends."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import preloaded
import pytest
from trainings import DRIVER, ENV, HOOP, TIMEOUT_S, hoop_train

import hoop
from hoop.lab.chaos.network import Network, private_network, unavailable_reason
from hoop.wire.generated import hoop_pb2 as pb
from hoop.wire.generated import hoop_pb2_grpc as pb_grpc

pytestmark = pytest.mark.skipif(bool(unavailable_reason(rules=False)), reason=unavailable_reason(rules=False))
COORDINATOR, DEVICES = 1, 2
"""Host numbers: the coordinator and the client are on one host, all devices on another."""
PORT = 4021
IMPATIENT = Path(__file__).with_name("impatient_coordinator.py")
ISOLATION_S = "60"
JOB = [f"{DRIVER}:job", "--set", "max_steps=60", "--set", "slowdown=[100, 100, 100, 100]"]


class Hosts:
    """A coordinator on one host, and devices on another."""

    def __init__(self, network: Network, devices: int, folder: Path, cleanup: ExitStack) -> None:
        self.network, self._folder, self._cleanup = network, folder, cleanup
        self.address = f"{network.address(COORDINATOR)}:{PORT}"
        environment = {**ENV, "ISOLATION_S": ISOLATION_S}
        command = [*preloaded.HOOP[:1], str(IMPATIENT), "coordinator", "--host", network.address(COORDINATOR)]
        self.start(COORDINATOR, [*command, "--port", str(PORT), "--insecure"], environment)
        for number in range(1, devices + 1):
            join = ["device", "--join", self.address, "--jobs", str(DRIVER.parent), "--id", str(number)]
            where = ["--host", network.address(DEVICES), "--port", str(PORT + number), "--insecure"]
            self.start(DEVICES, [*HOOP, *join, *where], ENV)

    def start(self, host: int, command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        """Starts a process on a host, and waits for its first line."""
        with open(self._folder / "errors", "ab") as errors:
            process = preloaded.Popen(
                [*self.network.exec_prefix(host), *command],
                text=True,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._cleanup.callback(process.communicate, timeout=TIMEOUT_S)
        self._cleanup.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    def wait_for_end_of_tasks(self, devices: int) -> None:
        """Waits until no device trains any more; the devices are asked directly."""
        for number in range(1, devices + 1):
            address = f"{self.network.address(DEVICES)}:{PORT + number}"
            with grpc.insecure_channel(address) as channel:
                while pb_grpc.DeviceStub(channel).Describe(pb.DescribeRequest(), timeout=TIMEOUT_S).tasks:
                    pass


@contextmanager
def running_hosts(devices: int, folder: Path) -> Iterator[Hosts]:
    with ExitStack() as cleanup:
        yield Hosts(cleanup.enter_context(private_network(2)), devices, folder, cleanup)


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        pytest.param("data", 2, id="data"),
        pytest.param("pipeline:1f1b", 3, id="pipeline"),
        pytest.param("data:sharded", 2, id="data sharded", marks=pytest.mark.slow),
        pytest.param("ps:bsp", 3, id="ps", marks=pytest.mark.slow),
        pytest.param("hybrid:replicas=2", 4, id="hybrid", marks=pytest.mark.slow),
        pytest.param("ring", 3, id="ring", marks=pytest.mark.slow),
    ],
)
def test_the_weights_are_there_after_coordinator_and_client_were_cut_off_while_the_job_ended(
    strategy: str, devices: int, tmp_path: Path
) -> None:
    """The coordinator takes all devices for dead; the training reaches its end on them. After that the cut heals."""
    undisturbed = hoop_train(*JOB, "--strategy", strategy, "--devices", str(devices), out=tmp_path / "undisturbed")
    with running_hosts(devices, tmp_path) as hosts:
        options = [*JOB, "--strategy", strategy, "--coordinator", hosts.address, "--out", str(tmp_path / "out")]
        with hoop.connect(hosts.address) as cluster:
            cluster.wait_for_devices(devices, TIMEOUT_S)
        events = hosts.start(COORDINATOR, [*HOOP, "events", "--coordinator", hosts.address, "--follow"], ENV)
        assert events.stdout is not None
        run = preloaded.Popen(
            [*hosts.network.exec_prefix(COORDINATOR), *HOOP, "train", *options, "--json"],
            text=True,
            env=ENV,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            next(line for line in events.stdout if "job_started" in line)
            with hoop.connect(hosts.address) as cluster:
                job = cluster.status().jobs[-1].id
                next(one for one in cluster.job(job).events() if one.event.kind == "steps")
            hosts.network.unplug(COORDINATOR)
            dead = (line for line in events.stdout if "device_dead" in line)
            for _ in range(devices):
                next(dead)
            hosts.wait_for_end_of_tasks(devices)
            hosts.network.plug_in(COORDINATOR)
            output, errors = run.communicate(timeout=TIMEOUT_S)
        finally:
            run.kill()
            run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, errors
    assert json.loads(output)["weights_sha256"] == undisturbed["weights_sha256"]
