"""A program of scripts/golden: a cluster of processes, and what happens to it while it trains.

    cluster.py SCENARIO OUT       prints the result as JSON

The job is ``golden_job:paced``. The program waits for what it needs to see and then lets the job run at full speed, so
that no step depends on a clock.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOOP = [sys.executable, "-P", "-m", "hoop"]
DEADLINE_S = 300.0
POLL_S = 0.02
PACE_FILE = Path("paced")


class Cluster:
    """A coordinator, two devices with arenas, and a client that trains on them."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.processes: list[subprocess.Popen[str]] = []
        self.address = ""
        self.devices: dict[int, subprocess.Popen[str]] = {}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen([*HOOP, *arguments], stdout=subprocess.PIPE, text=True)
        self.processes.append(process)
        return process

    def start_coordinator(self) -> subprocess.Popen[str]:
        port = self.address.rpartition(":")[2] or "0"
        process = self.start("coordinator", "--journal", "journal", "--port", port)
        assert process.stdout is not None
        self.address = process.stdout.readline().split()[-1]
        return process

    def start_device(self, number: int) -> None:
        options = ["--id", str(number), "--arena", f"arena{number}", "--memory", "64MiB", "--jobs", "."]
        self.devices[number] = self.start("device", "--join", self.address, *options)

    def train(self, devices: str) -> subprocess.Popen[str]:
        job = ["train", "golden_job:paced", "--coordinator", self.address, "--devices", devices]
        return self.start(*job, "--out", str(self.out), "--json")

    def kill(self, *processes: subprocess.Popen[str]) -> None:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait(DEADLINE_S)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in lines(self.out / "events.jsonl") if event.get("kind") == kind]

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may not be there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_until(what: str, condition: Callable[[], object], client: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if client.poll() is not None:
            raise SystemExit(f"the job ended with {client.returncode} before: {what}")
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {DEADLINE_S:g} s: {what}")
        time.sleep(POLL_S)


def join(cluster: Cluster, client: subprocess.Popen[str]) -> None:
    cluster.start_device(3)
    wait_until("a third device trains", lambda: cluster.events("resized"), client)


def drain(cluster: Cluster, client: subprocess.Popen[str]) -> None:
    subprocess.run([*HOOP, "drain", "2", "-c", cluster.address, "--timeout", "1s"], check=True, timeout=DEADLINE_S)
    wait_until("device 2 has left", lambda: cluster.events("resized"), client)


def killed(cluster: Cluster, client: subprocess.Popen[str]) -> None:
    cluster.kill(cluster.devices[2])
    wait_until("device 1 goes on alone", lambda: cluster.events("recovered"), client)


def arenas(cluster: Cluster, client: subprocess.Popen[str]) -> None:
    cluster.kill(*cluster.devices.values())
    for number in (1, 2):
        cluster.start_device(number)
    wait_until("both devices have their state again", lambda: len(cluster.events("state")) == 2, client)


def coordinator(cluster: Cluster, client: subprocess.Popen[str]) -> None:
    cluster.kill(cluster.processes[0])
    cluster.start_coordinator()
    wait_until("the client is back", lambda: cluster.events("coordinator_back"), client)


def stopped(cluster: Cluster, client: subprocess.Popen[str]) -> None:
    cluster.devices[2].send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    cluster.devices[2].send_signal(signal.SIGCONT)


SCENARIOS = {scenario.__name__: scenario for scenario in (join, drain, killed, arenas, coordinator, stopped)}


def main(name: str, out: str) -> None:
    PACE_FILE.touch()
    cluster = Cluster(Path(out))
    try:
        cluster.start_coordinator()
        for number in (1, 2):
            cluster.start_device(number)
        client = cluster.train("2:3")
        wait_until("5 steps", lambda: len(lines(cluster.out / "metrics.jsonl")) >= 5, client)
        SCENARIOS[name](cluster, client)
        PACE_FILE.unlink()
        output, _ = client.communicate(timeout=DEADLINE_S)
        if client.returncode:
            raise SystemExit(f"the client ended with {client.returncode}")
        print(json.dumps({**json.loads(output), "faults": []}))
    finally:
        cluster.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
