"""The targets for recovery from faults, each with its measured figure.

    python benchmarks/recovery/bars.py                 all of them, three times each: some minutes
    python benchmarks/recovery/bars.py --only kill,stop --turns 5

It measures and does not judge: the exit code is always 0. A client outside the cluster takes the times, so they include
the time until an event reaches it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from alone import client_killed, connection_reset, many_join

from hoop.client.cluster import Cluster, connect
from hoop.errors import DeadlineExceeded, HoopError
from hoop.job_events import FaultInjected, Started, Straggler
from hoop.lab.chaos.fault_actions import FaultActions, FaultOutcome, ScheduledFault
from hoop.lab.chaos.job_watch import PATIENCE_S, JobWatch
from hoop.lab.chaos.processes import ClusterProcesses

DEVICES, MEMORY, GAP = 4, 64 << 20, 10
SLOW_STEPS = ["--set", f"slowdown={[4] * 32}"]
"""Makes a step long enough for a fault to happen within it."""
SLOW_FROM, SLOW_FACTOR, REPORTED_S = 20, 50, 20.0


@dataclass
class Bar:
    """One target."""

    fault: str
    what: str
    most: float
    unit: str = "s"
    found: list[float | None] = field(default_factory=list)
    """The measured value of each turn; None: it did not happen."""

    def row(self) -> str:
        values = sorted(one for one in self.found if one is not None)
        digits = 3 if self.unit == "s" else 0
        median = f"{statistics.median(values):.{digits}f}" if values else "–"
        worst = f"{values[-1]:.{digits}f}" if values else "–"
        happened = f"{len(values)} of {len(self.found)}"
        return f"| {self.fault} | {self.what} | {self.most:g} {self.unit} | {median} | {worst} | {happened} |"


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _training(*more: str, devices: int = DEVICES) -> Iterator[tuple[ClusterProcesses, Cluster, JobWatch]]:
    """A cluster of processes that trains MNIST until the end of the block."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        ClusterProcesses(Path(scratch), devices, MEMORY) as fleet,
        connect(fleet.address) as cluster,
    ):
        cluster.wait_for_devices(devices, PATIENCE_S)
        settings = ["--set", "evaluate_every=0", "--set", "checkpoint_every=0", "--set", "epochs=1000000"]
        target = ["--coordinator", str(fleet.address), "--devices", str(devices), "--json"]
        watch = JobWatch(cluster, devices)
        fleet.start("train", "mnist", *settings, *more, *target)
        watch.wait_event(Started, 0)
        yield fleet, cluster, watch


def _inject(kind: str, turns: int) -> Iterator[FaultOutcome]:
    """Inject a fault of this kind ``turns`` times; each is over, and all devices are back, before the next."""
    with _training(*SLOW_STEPS) as (fleet, cluster, watch):
        actions = FaultActions(fleet, cluster, watch, DEVICES, every_s=0.0)
        for turn in range(turns):
            yield actions.inject(ScheduledFault(turn + 1, kind, GAP, turn / turns))


def kill(turns: int) -> list[Bar]:
    known = Bar("SIGKILL of a device", "the others know", 0.25)
    step = Bar("SIGKILL of a device", "the step is finished by the others", 1.0)
    for one in _inject("kill", turns):
        known.found.append(one.detected_s)
        step.found.append(one.pause_s)
    return [known, step]


def stop(turns: int) -> list[Bar]:
    evicted = Bar("SIGSTOP of a device", "evicted", 1.5)
    back = Bar("SIGCONT after eviction", "in the job again", 3.0)
    for one in _inject("stop", turns):
        evicted.found.append(one.detected_s)
        back.found.append(one.back_s)
    return [evicted, back]


def coordinator(turns: int) -> list[Bar]:
    found = [one.back_s for one in _inject("coordinator", turns)]
    what = "from the new process's start: all devices, and the job's next steps"
    return [Bar("coordinator SIGKILL, restarted", what, 2.0, found=found)]


def slow(turns: int) -> list[Bar]:
    """The last rank becomes slow. Ranks do not share cores: a rank that shares one may have no shards."""
    devices = max(2, min(DEVICES, os.cpu_count() or 1))
    last, bar = devices - 1, Bar("a device becomes slow", "steps until it is named", 10, "steps")
    healthy = Bar("a device becomes slow", "healthy ones that are named", 0, "names")
    for _ in range(turns):
        fault = f"slow@rank={last},step={SLOW_FROM},factor={SLOW_FACTOR}"
        with _training("--fault", fault, devices=devices) as (_, _, watch):
            fault_event = watch.wait_event(FaultInjected, 0).event
            assert isinstance(fault_event, FaultInjected)
            fault_step = fault_event.step

            def reports(since: int = fault_step, watch: JobWatch = watch) -> list[tuple[int, bool]]:
                """The step of each straggler report, and whether the report is correct."""
                events = [one.event for one in watch.events]
                slow = [event for event in events if isinstance(event, Straggler) and event.slow]
                return [(one.step, one.straggler == last and one.step >= since) for one in slow]

            with suppress(DeadlineExceeded):  # it was reported before the fault, wrongly
                watch.wait_until(lambda: any(correct for _, correct in reports()), "its name", REPORTED_S)
            correct = [step - fault_step for step, correct in reports() if correct]
            bar.found.append(correct[0] if correct else None)
            healthy.found.append(sum(not correct for _, correct in reports()))
    return [bar, healthy]


def joins(turns: int) -> list[Bar]:
    return [Bar("200 devices join at once", "all are in", 3.0, found=[many_join() for _ in range(turns)])]


def client(turns: int) -> list[Bar]:
    found = [client_killed() for _ in range(turns)]
    return [Bar("client SIGKILL in mid-operation", "its memory and communicator are freed", 5.0, found=found)]


def reset(turns: int) -> list[Bar]:
    what = "from the reset to the sum, sent again, or a typed error"
    return [Bar("connection reset in a chunk", what, 0.25, found=[connection_reset() for _ in range(turns)])]


MEASURES: dict[str, Callable[[int], list[Bar]]] = {
    one.__name__: one for one in (kill, stop, coordinator, joins, client, reset, slow)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="of each")
    parser.add_argument("--only", default=",".join(MEASURES), help=f"some of {','.join(MEASURES)}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.only.split(",")
    if unknown := sorted(set(names) - set(MEASURES)):
        parser.error(f"--only: {', '.join(unknown)} is unknown; there are {', '.join(MEASURES)}")
    bars: list[Bar] = []
    started = time.monotonic()
    for number, name in enumerate(names, start=1):
        _log(f"{time.monotonic() - started:4.0f} s  {name}, {number} of {len(names)} …")
        try:
            bars += MEASURES[name](options.turns)
        except (HoopError, TimeoutError) as error:  # a failure is a result as well
            _log(f"{name}: {error}")
            bars.append(Bar(name, "did not come to an end", 0, found=[None]))
    load = os.getloadavg()[1]
    if options.json:
        facts = {"machine": platform.platform(), "cores": os.cpu_count(), "load": load}
        print(json.dumps({**facts, "bars": [asdict(one) for one in bars]}))
        return
    print("| fault | what | at most | median | worst | happened |")
    print("|---|---|---|---|---|---|")
    for bar in bars:
        print(bar.row())
    print(f"\n{DEVICES} devices and a coordinator, {os.cpu_count()} cores, load {load:.1f}")


if __name__ == "__main__":
    main()
