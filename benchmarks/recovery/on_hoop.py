"""Hoop, data parallel on the devices of a local cluster; the samples of its steps are read from its ledger."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tally import BATCH, EPOCHS, SAMPLES, STEPS, STEPS_AN_EPOCH, Tally

from hoop.client.cluster import Cluster, connect
from hoop.data.sampler import SampleOrder, shard
from hoop.engine.stage.provenance import sample_fingerprint
from hoop.job_events import Recovered, Steps
from hoop.runs.audit import audit
from hoop.runs.ledger import lines

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
REST_S, END_S = 600.0, 20.0


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A ``hoop`` command, which is terminated at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "hoop", *arguments],
        env=ENV,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def hoop(ranks: int, fault: signal.Signals | None, timeout: float, options: Any) -> dict[str, Any]:
    """Inject the fault into the device with the highest id during training, then let the others train to the end."""
    with tempfile.TemporaryDirectory() as scratch:
        address, out = Path(scratch) / "address", Path(scratch) / "run"
        with running("up", "--devices", str(ranks), "--address-file", str(address)) as up:
            assert up.stdout is not None, "stdout is a pipe"
            up.stdout.readline()
            coordinator = address.read_text().strip()
            train = ["train", "mnist", "--batch-size", str(BATCH), "--optimizer", "sgd", "--lr", "0.05"]
            train += ["--epochs", str(EPOCHS), "--set", "evaluate_every=0", "--out", str(out)]
            with (
                connect(coordinator) as cluster,
                running(*train, "--coordinator", coordinator, "--json") as run,
            ):
                found = {} if fault is None else _inject_fault(cluster, fault, timeout)
                output, _ = run.communicate(timeout=REST_S)
            weights = json.loads(output)["weights_sha256"]
        return {**found, **_count_samples(out), "weights": weights}


def _inject_fault(cluster: Cluster, fault: signal.Signals, timeout: float) -> dict[str, float]:
    """Wait for ``Recovered``, which is emitted when the others continue, and then for the next step and its time."""
    started = (event for event in cluster.events(follow=True) if event.kind == "job_started")
    job = cluster.job(int(next(started).fields["job"]))
    pids = {one.device.device_id: one.device.pid for one in cluster.status().devices}
    victim = pids[max(pids)]
    fault_time, last, recovered_at = 0.0, 0, 0.0
    recovered: Recovered | None = None
    try:
        for observed in job.events():
            event = observed.event
            if isinstance(event, Steps):
                if recovered is not None and event.first + len(event.loss) > recovered.step:
                    index = max(0, recovered.step - event.first)
                    seconds = recovered_at + event.seconds[index] - fault_time
                    return {"seconds": seconds, "steps_repeated": max(0, last - recovered.step)}
                last = event.first + len(event.loss)
                if not fault_time and last > 100:
                    fault_time = time.time()
                    os.kill(victim, fault)
            if isinstance(event, Recovered):
                recovered, recovered_at = event, observed.time
            if fault_time and observed.time - fault_time > timeout:
                break
    finally:
        if fault == signal.SIGSTOP:  # a stopped process cannot be terminated
            os.kill(victim, signal.SIGCONT)
    raise TimeoutError(f"not within {timeout:g} s: a step after the fault")


def _count_samples(out: Path) -> dict[str, int]:
    """Count the shards of the ledger whose fingerprint matches their samples; ``hoop audit`` must find the same."""
    tally, order, num_shards = Tally(), SampleOrder(0, 1), 1
    for line in lines(out / "ledger.jsonl"):
        entry = line.entry
        if "begin" in entry:
            order, num_shards = SampleOrder(entry["seed"], entry["samples"]), entry["micros"]
            assert order.length == SAMPLES, f"the ledger is of {order.length} samples"
        if "step" in entry:
            samples = order.indices(*divmod(entry["step"] - 1, STEPS_AN_EPOCH), BATCH)
            for number, device in enumerate(entry["by"]):
                part = shard(samples, number, num_shards)
                if device > 0 and entry["fed"][6 * number :][:6] == f"{sample_fingerprint(part):06x}":
                    tally.feed(entry["step"], part)
    verdict = audit(out)
    assert verdict.violation is None, verdict.violation
    assert verdict.steps == STEPS, f"{verdict.steps} steps of {STEPS}"
    return {"samples_lost": tally.lost, "samples_repeated": tally.repeated}
