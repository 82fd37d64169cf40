"""Recovery and join with 1.15 GB of state: how long the others pause, beside the time of one copy of the state.

    python benchmarks/large/state.py --devices 3 --memory 4400MiB --strategy data
    python benchmarks/large/state.py --devices 3 --memory 2800MiB --strategy pipeline --turns 3

A cluster of processes trains the MLP of ``jobs.py`` (1.15 GB of weights and moments). In every turn a device is killed,
and a new one joins. The times are those that the job reports, and from the signal until a client has the event. The
limit is the time of one copy of the bytes that must move, at the bandwidth that this process measures in the same
minute.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from hoop.client.cluster import connect
from hoop.config import parse_size
from hoop.job_events import Ready, Recovered, Resized, Started, Steps
from hoop.lab.chaos.job_watch import JobWatch
from hoop.lab.chaos.processes import ClusterProcesses

FOLDER = Path(__file__).resolve().parent
STATE_BYTES = 1_150_000_000
WAIT_S = 240.0


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def copy_seconds(size: int = 1 << 28) -> float:
    """Seconds per byte of a copy between two arrays in memory; the median of five."""
    source, target, found = np.ones(size, np.uint8), np.ones(size, np.uint8), []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        found.append(time.perf_counter() - began)
    return statistics.median(found) / size


class Turns:
    """Kills devices of a running job and lets new ones join; keeps the seconds of each."""

    def __init__(self, fleet: ClusterProcesses, watch: JobWatch) -> None:
        self._fleet, self._watch = fleet, watch
        self.seconds: dict[str, list[float]] = {}

    def note(self, name: str, value: float) -> None:
        log(f"  {name}: {value:.2f} s")
        self.seconds.setdefault(name, []).append(value)

    def steps(self, count: int) -> None:
        """Wait for this many more steps."""
        goal = self._watch.step + count
        self._watch.wait_until(lambda: self._watch.step >= goal, f"step {goal}", WAIT_S)

    def kill(self) -> None:
        """Kill the newest device; wait for the next step of the others."""
        self.steps(2)
        seen, began = len(self._watch.events), time.monotonic()
        self._fleet.devices[-1].send_signal(signal.SIGKILL)
        event = self._watch.wait_event(Recovered, seen, WAIT_S)
        assert isinstance(event.event, Recovered)
        self.note("kill: from the signal to recovered", event.at - began)
        self.note("kill: pause of a rank", event.event.pause_s)
        after = self._watch.wait_event(Steps, self._watch.events.index(event), WAIT_S)
        self.note("kill: from the signal to the next step", after.at - began)

    def join(self) -> None:
        """Start a device; wait until it takes part."""
        self.steps(2)
        seen, began = len(self._watch.events), time.monotonic()
        self._fleet.start_device()
        ready = self._watch.wait_event(Ready, seen, WAIT_S)
        kinds = (Resized, Recovered)

        def changed() -> bool:
            return any(isinstance(one.event, kinds) for one in self._watch.events[seen:])

        self._watch.wait_until(changed, "resized", WAIT_S)
        event = next(one for one in self._watch.events[seen:] if isinstance(one.event, kinds))
        assert isinstance(event.event, kinds)
        self.note("join: process, PyTorch, code, data and model loaded", ready.at - began)
        self.note("join: from ready to resized", event.at - ready.at)
        self.note("join: pause of a rank", event.event.pause_s)


def run(options: argparse.Namespace) -> dict[str, list[float]]:
    settings = ["--set", "epochs=100000", "--strategy", options.strategy]
    with (
        tempfile.TemporaryDirectory() as scratch,
        ClusterProcesses(Path(scratch), options.devices, parse_size(options.memory, "--memory")) as fleet,
        connect(fleet.address) as cluster,
    ):
        cluster.wait_for_devices(options.devices, WAIT_S)
        watch = JobWatch(cluster, options.devices)
        target = ["--coordinator", str(fleet.address), "--devices", str(options.devices), "--json"]
        began = time.monotonic()
        fleet.start("train", f"{FOLDER / 'jobs.py'}:mlp", *settings, *target)
        try:
            started = watch.wait_event(Started, 0, WAIT_S)
            turns = Turns(fleet, watch)
            turns.note("start: from the command to the first step", started.at - began)
            for turn in range(options.turns):
                log(f"turn {turn + 1}, load {os.getloadavg()[0]:.1f}")
                turns.kill()
                turns.join()
            turns.note("a step (median)", watch.median_step_s)
        except BaseException:
            log(fleet.stderr_tails())
            raise
    return turns.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Recovery and join with 1.15 GB of state.")
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--memory", default="4400MiB", help="of each device")
    parser.add_argument("--strategy", default="data")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    os.chdir(FOLDER)  # devices look for jobs.py here
    limit = copy_seconds() * STATE_BYTES
    found = run(options)
    limit = statistics.median([limit, copy_seconds() * STATE_BYTES])
    print(f"{options.strategy} on {options.devices} devices; one copy of {STATE_BYTES / 1e9:.2f} GB: {limit:.2f} s")
    print("| what | median, s | all |")
    print("|---|---|---|")
    for name, values in found.items():
        print(f"| {name} | {statistics.median(values):.2f} | {', '.join(f'{one:.2f}' for one in values)} |")


if __name__ == "__main__":
    main()
