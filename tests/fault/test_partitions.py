"""Packets of one device are dropped by the kernel: it is evicted, and the others train on to the same weights."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import namespaces
import pytest
from fault_cluster import job_of, result_of, until, until_step
from reported_rows import check_same
from trainings import DRIVER, ENV, HOOP, PATIENCE_S, hoop_train

import hoop
from hoop import job_events as ev

pytestmark = pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
COORDINATOR, VICTIM, OTHER = 1, 3, 4
"""Hosts; device n is on host n + 1."""
HOSTS = 5
PORT = "4021"
JOB = [f"{DRIVER}:job", "--set", "epochs=1000", "--set", "evaluate_every=0", "--set", "checkpoint_every=0"]
SLOWLY = ["--set", "slowdown=[20, 20, 20, 20]"]
TIMEOUT = ["--set", f"timeout_s={10 * PATIENCE_S:g}"]
"""Of a collective: what ends a wait in these tests is never that."""


@pytest.fixture
def net(tmp_path: Path) -> Iterator[namespaces.Network]:
    """A coordinator and four devices, each on a host of its own."""
    with ExitStack() as ended:
        net = ended.enter_context(namespaces.network(HOSTS))

        def start(host: int, *arguments: str) -> None:
            there = "--host", net.address(host), "--port", PORT, "--insecure"
            with open(tmp_path / "errors", "ab") as errors:
                process = subprocess.Popen(
                    [*net.on(host), *HOOP, *arguments, *there],
                    text=True,
                    env=ENV,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            ended.callback(process.communicate, timeout=PATIENCE_S)
            ended.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline()

        start(COORDINATOR, "coordinator")
        for host in range(2, HOSTS + 1):
            data = "--data-port", "4022", "--advertise-data", f"{net.address(host)}:4022"  # no shared memory
            where = "--join", f"{net.address(COORDINATOR)}:{PORT}", "--jobs", str(DRIVER.parent)
            start(host, "device", *where, *data, "--id", str(host - 1))
        yield net


@pytest.mark.parametrize(
    ("came", "left", "kind", "goes"),
    [
        pytest.param(
            "", f"10.251.77.{OTHER}", "device_evicted", {"2", "3"}, id="one way to one peer", marks=pytest.mark.slow
        ),
        pytest.param(
            *[f"10.251.77.{OTHER}"] * 2, "device_evicted", {"2", "3"}, id="from one peer", marks=pytest.mark.slow
        ),
        pytest.param("all", "all", "device_dead", {"2"}, id="cut off"),
        pytest.param("", "all", "device_dead", {"2"}, id="nothing leaves", marks=pytest.mark.slow),
        pytest.param("all", "", "device_dead", {"2"}, id="nothing comes", marks=pytest.mark.slow),
    ],
)
def test_a_partition_costs_a_device_and_no_bit(
    net: namespaces.Network, tmp_path: Path, came: str, left: str, kind: str, goes: set[str]
) -> None:
    check_costs_a_device_and_no_bit(net, tmp_path, (VICTIM, came, left), (kind, goes), "data")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(4, 2, id="to the other replica"),
        pytest.param(2, 3, id="to the next stage", marks=pytest.mark.slow),
    ],
)
def test_a_link_of_a_hybrid_that_drops_one_way(
    net: namespaces.Network, tmp_path: Path, source: int, target: int
) -> None:
    """Ranks wait in the sums of their groups, for ranks that wait for a link: all leave that generation at once."""
    gone = {str(source - 1), str(target - 1)}
    drop = source, "", net.address(target)
    check_costs_a_device_and_no_bit(net, tmp_path, drop, ("device_evicted", gone), "hybrid:replicas=2")


def check_costs_a_device_and_no_bit(
    net: namespaces.Network,
    folder: Path,
    cut: tuple[int, str, str],
    expected: tuple[str, set[str]],
    strategy: str,
) -> None:
    """Trains on all four, cuts, waits until three go on, and compares with one device that nothing happens to."""
    address = f"{net.address(COORDINATOR)}:{PORT}"
    with ExitStack() as ended:
        out = folder / "disturbed"
        train = ["train", *JOB, *SLOWLY, *TIMEOUT, "--strategy", strategy, "--coordinator", address]
        run = subprocess.Popen([*HOOP, *train, "--json", "--out", str(out)], text=True, env=ENV, stdout=subprocess.PIPE)
        ended.callback(run.wait, PATIENCE_S)
        ended.callback(run.kill)
        with hoop.connect(address) as cluster:
            job = job_of(cluster)
            until_step(cluster, job, 3)
            net.cut(*cut)
            news = cluster.events(follow=True)
            gone = next(one for one in news if one.kind in ("device_evicted", "device_dead"))
            kind, devices = expected
            assert (gone.kind, gone.fields["device"] in devices) == (kind, True), gone
            until(cluster, job, ev.Recovered, ranks=3)
            cluster.job(job).stop()
            result = result_of(run)
    limit = "--set", f"max_steps={result['steps']}"
    alone = hoop_train(*JOB, "--devices", "1", *limit, out=folder / "undisturbed")
    check_same({**result, "out": str(out)}, alone)
