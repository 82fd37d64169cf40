"""The kernel drops packets of one device: it is evicted, and the other devices finish with the same weights."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import preloaded
import pytest
from fault_cluster import result_of, wait_for_event, wait_for_job, wait_for_step
from reported_rows import check_same
from trainings import DRIVER, ENV, HOOP, TIMEOUT_S, hoop_train

import hoop
from hoop import job_events as ev
from hoop.lab.chaos.network import Network, private_network, unavailable_reason

pytestmark = pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason())
COORDINATOR, VICTIM, OTHER = 1, 3, 4
"""Host numbers; device n is on host n + 1."""
HOSTS = 5
PORT = "4021"
JOB = [f"{DRIVER}:job", "--set", "epochs=1000", "--set", "evaluate_every=0", "--set", "checkpoint_every=0"]
SLOWDOWN = ["--set", "slowdown=[20, 20, 20, 20]"]
COLLECTIVE_TIMEOUT = ["--set", f"timeout_s={10 * TIMEOUT_S:g}"]
"""Timeout of a collective, so long that it never ends a wait in these tests."""


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    """A coordinator and four devices, each on its own host."""
    with ExitStack() as cleanup:
        network = cleanup.enter_context(private_network(HOSTS))

        def start(host: int, *arguments: str) -> None:
            listen_options = "--host", network.address(host), "--port", PORT, "--insecure"
            with open(tmp_path / "errors", "ab") as errors:
                process = preloaded.Popen(
                    [*network.exec_prefix(host), *HOOP, *arguments, *listen_options],
                    text=True,
                    env=ENV,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                )
            cleanup.callback(process.communicate, timeout=TIMEOUT_S)
            cleanup.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline()

        start(COORDINATOR, "coordinator")
        for host in range(2, HOSTS + 1):
            data_options = (
                "--data-port",
                "4022",
                "--advertise-data",
                f"{network.address(host)}:4022",
            )  # no shared memory
            join_options = "--join", f"{network.address(COORDINATOR)}:{PORT}", "--jobs", str(DRIVER.parent)
            start(host, "device", *join_options, *data_options, "--id", str(host - 1))
        yield network


@pytest.mark.parametrize(
    ("incoming", "outgoing", "kind", "evicted"),
    [
        pytest.param("", "peer", "device_evicted", {"2", "3"}, id="to one peer", marks=pytest.mark.slow),
        pytest.param(*["peer"] * 2, "device_evicted", {"2", "3"}, id="to and from one peer", marks=pytest.mark.slow),
        pytest.param("all", "all", "device_dead", {"2"}, id="to and from all hosts", marks=pytest.mark.slow),
        pytest.param("", "all", "device_dead", {"2"}, id="outgoing packets", marks=pytest.mark.slow),
        pytest.param("all", "", "device_dead", {"2"}, id="incoming packets", marks=pytest.mark.slow),
    ],
)
def test_a_partition_evicts_a_device_and_keeps_the_weights(
    network: Network, tmp_path: Path, incoming: str, outgoing: str, kind: str, evicted: set[str]
) -> None:
    places = {"peer": network.address(OTHER)}
    drop = VICTIM, places.get(incoming, incoming), places.get(outgoing, outgoing)
    check_eviction_keeps_weights(network, tmp_path, drop, (kind, evicted), "data")


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param(4, 2, id="to the other replica", marks=pytest.mark.slow),
        pytest.param(2, 3, id="to the next stage", marks=pytest.mark.slow),
    ],
)
def test_a_hybrid_link_that_drops_packets_one_way(network: Network, tmp_path: Path, source: int, target: int) -> None:
    """Ranks block in reductions of their groups on ranks that wait for the link: all leave the generation at once."""
    ends = {str(source - 1), str(target - 1)}
    drop = source, "", network.address(target)
    check_eviction_keeps_weights(network, tmp_path, drop, ("device_evicted", ends), "hybrid:replicas=2")


def check_eviction_keeps_weights(
    network: Network,
    folder: Path,
    cut: tuple[int, str, str],
    expected: tuple[str, set[str]],
    strategy: str,
) -> None:
    """Trains on four devices, cuts, waits until three continue, and compares with an undisturbed run on one device."""
    address = f"{network.address(COORDINATOR)}:{PORT}"
    with ExitStack() as cleanup:
        out = folder / "disturbed"
        train = ["train", *JOB, *SLOWDOWN, *COLLECTIVE_TIMEOUT, "--strategy", strategy, "--coordinator", address]
        run = preloaded.Popen([*HOOP, *train, "--json", "--out", str(out)], text=True, env=ENV, stdout=subprocess.PIPE)
        cleanup.callback(run.wait, TIMEOUT_S)
        cleanup.callback(run.kill)
        with hoop.connect(address) as cluster:
            job = wait_for_job(cluster)
            wait_for_step(cluster, job, 3)
            network.cut(*cut)
            events = cluster.events(follow=True)
            lost = next(event for event in events if event.kind in ("device_evicted", "device_dead"))
            kind, devices = expected
            assert (lost.kind, lost.fields["device"] in devices) == (kind, True), lost
            wait_for_event(cluster, job, ev.Recovered, ranks=3)
            cluster.job(job).stop()
            result = result_of(run)
    limit = "--set", f"max_steps={result['steps']}"
    undisturbed = hoop_train(*JOB, "--devices", "1", *limit, out=folder / "undisturbed")
    check_same({**result, "out": str(out)}, undisturbed)
