"""Devices of other hosts that send no heartbeats and live: the coordinator alone cannot reach them, or user code holds
their interpreter's lock. They are not dead, and the training goes on; one that stays cut off is dead after four leases.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import preloaded
import pytest
from fault_cluster import result_of, wait_for_event, wait_for_job, wait_for_step
from host_cluster import COORDINATOR, host_cluster
from reported_rows import check_same
from test_slowness import FALSE_DEATHS, kinds_of, wait_until
from trainings import DRIVER, ENV, HOOP, TIMEOUT_S, hoop_train

import hoop
from hoop import job_events as ev
from hoop.client.cluster import Cluster
from hoop.lab.chaos.network import unavailable_reason

JOB = [f"{DRIVER}:job", "--set", "epochs=1000", "--set", "evaluate_every=0", "--set", "checkpoint_every=0"]
SLOWDOWN = ["--set", "slowdown=[20, 20, 20, 20]"]
LEASE_S = 10.0
"""So long that a busy machine has time to heal the cut within four of them."""


def member(cluster: Cluster, device_id: int) -> Any:
    return next(one for one in cluster.status().devices if one.device.device_id == device_id)


@pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason())
@pytest.mark.slow
def test_a_device_that_other_devices_reach_lives_until_the_coordinator_was_cut_off_for_four_leases(
    tmp_path: Path,
) -> None:
    """The first cut ends in time: no rank changes. The second one does not."""
    with host_cluster(3, tmp_path, options=("--lease", f"{LEASE_S:g}s")) as hosts, ExitStack() as cleanup:
        hosts.add_devices([2, 3, 4])
        cluster = cleanup.enter_context(hoop.connect(hosts.address, connect_timeout=TIMEOUT_S))
        cluster.wait_for_devices(3, TIMEOUT_S)
        train = [*HOOP, "train", *JOB, *SLOWDOWN, "--coordinator", hosts.address, "--json"]
        run = preloaded.Popen([*train, "--out", str(tmp_path / "out")], text=True, env=ENV, stdout=-1)
        cleanup.callback(run.wait, TIMEOUT_S)
        cleanup.callback(run.kill)
        job = wait_for_job(cluster)
        wait_for_step(cluster, job, 3)
        coordinator = hosts.network.address(COORDINATOR)
        hosts.network.cut(3, coordinator, coordinator)
        wait_until(lambda: member(cluster, 2).silent_s > 1.5 * LEASE_S, "silence for more than a lease")
        assert member(cluster, 2).state == "suspect"
        hosts.network.heal(3)
        wait_until(lambda: member(cluster, 2).silent_s < 1.0, "the next heartbeat")
        assert not FALSE_DEATHS & set(kinds_of(cluster)), list(cluster.events())
        hosts.network.cut(3, coordinator, coordinator)
        dead = next(event for event in cluster.events(follow=True) if event.kind == "device_dead")
        assert dead.fields["device"] == "2"
        assert "other devices reach it, and the coordinator has not for" in dead.text
        wait_for_event(cluster, job, ev.Recovered, ranks=2)
        cluster.job(job).stop()
        result = result_of(run, tmp_path / "out")
    limit = "--set", f"max_steps={result['steps']}"
    check_same(result, hoop_train(*JOB, "--devices", "1", *limit, out=tmp_path / "undisturbed"))


HELD_S = 9.0
"""Six leases of several hosts."""
HOLDING_JOB = f"""
import ctypes, os
from pathlib import Path
import torch
import hoop

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(6, 3), 0

    def forward(self, inputs):
        self.calls += 1
        if self.training and self.calls > 200:  # it has loaded the job long since
            try:
                os.close(os.open(Path(__file__).with_name("held"), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                ctypes.PyDLL(None).usleep({HELD_S * 1e6:.0f})  # does not release the interpreter's lock
        return self.layer(inputs)

def model(seed):
    torch.manual_seed(seed)
    return Net()

def data():
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    found = hoop.TensorData(inputs, inputs.argmax(1) % 3)
    return hoop.Splits(found, found)

settings = {{"epochs": 60, "batch_size": 8, "shards": 2, "evaluate_every": 0, "checkpoint_every": 0}}
job = hoop.Job(model, data, settings=settings)
"""


@pytest.mark.skipif(bool(unavailable_reason(rules=False)), reason=unavailable_reason(rules=False))
def test_a_device_of_another_host_whose_interpreter_is_held_is_not_dead_and_training_goes_on(tmp_path: Path) -> None:
    """Heartbeats stop for six leases; gRPC answers the coordinator's probes meanwhile, without the interpreter."""
    (tmp_path / "holding.py").write_text(HOLDING_JOB)
    job = f"{tmp_path / 'holding.py'}:job"
    with host_cluster(2, tmp_path) as hosts:
        hosts.add_devices([2, 3], jobs=tmp_path)
        with hoop.connect(hosts.address, connect_timeout=TIMEOUT_S) as cluster:
            cluster.wait_for_devices(2, TIMEOUT_S)
            result = hoop_train(job, "--coordinator", hosts.address, out=tmp_path / "out")
            assert (tmp_path / "held").exists(), "the lock was held"
            assert not FALSE_DEATHS & set(kinds_of(cluster)), list(cluster.events())
            silences = [event.text for event in cluster.events() if event.kind == "device_suspect"]
            assert any("s (lease 1.5 s), and its process runs" in text for text in silences), silences
    check_same(result, hoop_train(job, "--devices", "1", out=tmp_path / "undisturbed"))
