"""64 devices in one job on this machine: start, memory of a device, a step; one is killed, one leaves, one joins.

    python benchmarks/large/many.py --devices 64

The devices are processes forked from one that has loaded PyTorch and MNIST, as with ``hoop train --devices 64``; the
one that joins is a new process. Prints a table, and the hash of the weights beside that of one device.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from hoop.client.cluster import Cluster, connect
from hoop.client.jobs import JobHandle
from hoop.job_events import JobEvent, Recovered, Resized, Started, Steps
from hoop.topology import Address

WAIT_S, STEPS = 400.0, 60
HOOP = [sys.executable, "-m", "hoop"]


class Watch:
    """The events of a job, with the time of each."""

    def __init__(self, job: JobHandle) -> None:
        self._changed = threading.Condition()
        self._seen: list[tuple[float, JobEvent]] = []
        threading.Thread(target=self._follow, args=(job,), daemon=True).start()

    def _follow(self, job: JobHandle) -> None:
        for observed in job.events():
            with self._changed:
                self._seen.append((time.monotonic(), observed.event))
                self._changed.notify_all()

    def wait(self, kinds: tuple[type[JobEvent], ...], after: float) -> tuple[float, JobEvent]:
        """The first event of these kinds after this time."""

        def found() -> list[tuple[float, JobEvent]]:
            return [one for one in self._seen if one[0] > after and isinstance(one[1], kinds)]

        with self._changed:
            if not self._changed.wait_for(lambda: bool(found()), WAIT_S):
                raise SystemExit(f"no {' or '.join(one.__name__ for one in kinds)} within {WAIT_S:g} s")
            return found()[0]


def memory_of(pid: int) -> dict[str, int]:
    """Kilobytes of a process: its own (Private_Dirty) and its share of everything that it maps (Pss)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    fields = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return {"own": fields["Private_Dirty"], "pss": fields["Pss"]}


def wait_for_file(path: Path, process: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + WAIT_S
    while not path.exists() or not path.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the job has not started")
        threading.Event().wait(0.05)
    return path.read_text().strip()


class Rows(list[tuple[str, str]]):
    """The rows of the table; each is shown as soon as it is measured."""

    def append(self, row: tuple[str, str]) -> None:
        print(*row, sep=": ", file=sys.stderr, flush=True)
        super().append(row)


def disturb(cluster: Cluster, address: Address, devices: int) -> list[tuple[str, str]]:
    """Measure the running job; kill a device, let one leave and one join."""
    job = cluster.job(next(int(one.fields["job"]) for one in cluster.events(follow=True) if one.kind == "job_started"))
    watch, rows = Watch(job), Rows()
    _, started = watch.wait((Started,), 0.0)
    assert isinstance(started, Started)
    rows.append(("all devices set up, first step", f"{started.seconds:.1f} s"))
    watch.wait((Steps,), 0.0)
    members = {one.device.device_id: one.device.pid for one in cluster.status().devices}
    found = [memory_of(pid) for pid in members.values()]
    for name, what in (("own", "private memory of a device"), ("pss", "its share of all memory, arena included")):
        rows.append((f"{what} (median)", f"{statistics.median(one[name] for one in found) / 1024:.0f} MiB"))
    files = statistics.median(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in members.values())
    rows.append(("open files of a device (median)", f"{files:.0f}"))
    changes = (Recovered, Resized)
    began = time.monotonic()
    os.kill(members[devices // 2], signal.SIGKILL)
    at, event = watch.wait(changes, began)
    rows.append(("SIGKILL: until the others have finished the step", f"{at - began:.1f} s ({event.ranks} ranks)"))
    began = time.monotonic()
    cluster.drain(devices // 3, timeout=0.0)
    at, event = watch.wait(changes, began)
    rows.append(("hoop drain: until the others go on without it", f"{at - began:.1f} s ({event.ranks} ranks)"))
    began = time.monotonic()
    with subprocess.Popen([*HOOP, "device", "--join", str(address), "--memory", "64MiB", "--quiet"]) as device:
        at, event = watch.wait(changes, began)
        rows.append(("a new process joins: until it takes part", f"{at - began:.1f} s ({event.ranks} ranks)"))
        rows.append(("of that, the pause of the others", f"{event.pause_s:.1f} s"))
        watch.wait((Steps,), at)
        job.stop()
        device.terminate()  # it would wait for the coordinator to come back
    return rows


def train(devices: int, address_file: Path | None, steps: int) -> subprocess.Popen[str]:
    options = ["--devices", str(devices), "--shards", "64", "--memory", "64MiB", "--set", f"max_steps={steps}"]
    options += ["--address-file", str(address_file)] if address_file else []
    return subprocess.Popen([*HOOP, "train", "mnist", *options, "--json"], stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, _ = process.communicate(timeout=WAIT_S)
    found: dict[str, Any] = json.loads(output)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="64 devices in one job on this machine.")
    parser.add_argument("--devices", type=int, default=64)
    options = parser.parse_args()
    many, one = (result(train(devices, None, 20)) for devices in (options.devices, 1))
    same = "the same" if many["weights_sha256"] == one["weights_sha256"] else "OTHER WEIGHTS"
    rows = [
        ("20 steps, weights beside one device's", f"{many['weights_sha256'][:12]}: {same}"),
        ("all devices set up, first step", f"{many['start_seconds']:.1f} s"),
        ("a step (median)", f"{1000 * many['step_seconds']:.0f} ms; on one device {1000 * one['step_seconds']:.0f} ms"),
    ]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "address"
        process = train(options.devices, file, 1_000_000)
        try:
            address = Address.parse(wait_for_file(file, process))
            with connect(address) as cluster:
                cluster.wait_for_devices(options.devices, WAIT_S)
                rows += disturb(cluster, address, options.devices)
            rows.append(("steps in all", str(result(process)["steps"])))
        finally:
            process.terminate()
    print(f"{options.devices} devices, {os.cpu_count()} cores, load {os.getloadavg()[0]:.0f}\n")
    print("| what | |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
