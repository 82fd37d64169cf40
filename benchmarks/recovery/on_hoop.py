"""Hoop, data parallel on the devices of a local cluster; what went into its steps is read from its ledger."""

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
    """A command of Hoop's, which is told to end with what it started."""
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


def hoop(ranks: int, fault: signal.Signals | None, patience: float, given: Any) -> dict[str, Any]:
    """Strikes the device with the highest number in mid-training, then lets the others train to the end."""
    with tempfile.TemporaryDirectory() as scratch:
        address, out = Path(scratch) / "address", Path(scratch) / "run"
        with running("up", "--devices", str(ranks), "--address-file", str(address)) as up:
            assert up.stdout is not None, "its output is a pipe"
            up.stdout.readline()
            where = address.read_text().strip()
            train = ["train", "mnist", "--batch-size", str(BATCH), "--optimizer", "sgd", "--lr", "0.05"]
            train += ["--epochs", str(EPOCHS), "--set", "evaluate_every=0", "--out", str(out)]
            with (
                connect(where) as cluster,
                running(*train, "--coordinator", where, "--json") as run,
            ):
                found = {} if fault is None else _strike(cluster, fault, patience)
                told, _ = run.communicate(timeout=REST_S)
            weights = json.loads(told)["weights_sha256"]
        return {**found, **_fed(out), "weights": weights}


def _strike(cluster: Cluster, fault: signal.Signals, patience: float) -> dict[str, float]:
    """``recovered`` is told when the others go on; the step after it, which is told with its time, ends the wait."""
    started = (event for event in cluster.events(follow=True) if event.kind == "job_started")
    job = cluster.job(int(next(started).fields["job"]))
    pids = {one.device.device_id: one.device.pid for one in cluster.status().devices}
    victim = pids[max(pids)]
    struck, last, recovered_at = 0.0, 0, 0.0
    recovered: Recovered | None = None
    try:
        for observed in job.events():
            event = observed.event
            if isinstance(event, Steps):
                if recovered is not None and event.first + len(event.loss) > recovered.step:
                    index = max(0, recovered.step - event.first)
                    seconds = recovered_at + event.seconds[index] - struck
                    return {"seconds": seconds, "steps_repeated": max(0, last - recovered.step)}
                last = event.first + len(event.loss)
                if not struck and last > 100:
                    struck = time.time()
                    os.kill(victim, fault)
            if isinstance(event, Recovered):
                recovered, recovered_at = event, observed.time
            if struck and observed.time - struck > patience:
                break
    finally:
        if fault == signal.SIGSTOP:  # it may come back; else nobody could end it
            os.kill(victim, signal.SIGCONT)
    raise TimeoutError(f"not within {patience:g} s: a step after the fault")


def _fed(out: Path) -> dict[str, int]:
    """Every shard of the ledger whose print is that of its samples; ``hoop audit`` must find the same."""
    tally, order, micros = Tally(), SampleOrder(0, 1), 1
    for line in lines(out / "ledger.jsonl"):
        entry = line.entry
        if "begin" in entry:
            order, micros = SampleOrder(entry["seed"], entry["samples"]), entry["micros"]
            assert order.length == SAMPLES, f"the ledger is of {order.length} samples"
        if "step" in entry:
            samples = order.indices(*divmod(entry["step"] - 1, STEPS_AN_EPOCH), BATCH)
            for number, by in enumerate(entry["by"]):
                part = shard(samples, number, micros)
                if by > 0 and entry["fed"][6 * number :][:6] == f"{sample_fingerprint(part):06x}":
                    tally.feed(entry["step"], part)
    verdict = audit(out)
    assert verdict.violation is None, verdict.violation
    assert verdict.steps == STEPS, f"{verdict.steps} steps of {STEPS}"
    return {"samples_lost": tally.lost, "samples_repeated": tally.repeated}
