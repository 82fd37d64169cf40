"""Is a healthy device ever taken for dead, when the machine has many times as much to do as it can?

    python benchmarks/recovery/overload.py --minutes 30 --busy 12

A coordinator and devices train slowly on this machine, beside so many processes that never sleep. Counted from when
the training is under way: devices that were suspected, that were taken for dead, links that were doubted; and the
longest silence that the coordinator saw between two heartbeats of a device. Nothing is killed, so all of them should
be 0; the exit code is 1 if a device was evicted. Ctrl-C ends it early, with what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

import hoop
from hoop.job_events import Steps

PATIENCE_S = 300.0
LOOK_S = 0.05
TELL_S = 10.0
BUSY = "while True: pass"
FALSE = ("device_suspect", "device_dead", "device_evicted", "links_failed")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(*command: str) -> Iterator[IO[str]]:
    """A process that does not outlive this."""
    quiet: dict[str, Any] = {
        "stderr": subprocess.DEVNULL,
        "start_new_session": True,
    }  # Ctrl-C is for this one
    process = subprocess.Popen(command, text=True, env=ENV, stdout=subprocess.PIPE, **quiet)
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def under_way(cluster: Any) -> int:
    """The job, once every device has loaded what it needs and steps go on."""
    job = next(int(one.fields["job"]) for one in cluster.events(follow=True) if one.kind == "job_started")
    for observed in cluster.job(job).events(coordinator_timeout=PATIENCE_S):
        if isinstance(observed.event, Steps) and observed.event.first >= 3:
            return job
    raise SystemExit(f"job {job} was over before it was under way")


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Runs it, and counts."""
    program = [sys.executable, "-m", "hoop"]
    slowdown = json.dumps([given.slowdown] * given.devices)
    job = ["train", "mnist", "--set", "epochs=1000000", "--set", f"slowdown={slowdown}"]
    quiet = ["--set", "evaluate_every=0", "--set", "checkpoint_every=0", "--detach"]
    with contextlib.ExitStack() as ended:
        coordinator = ended.enter_context(started(*program, "coordinator", "--lease", f"{given.lease}s"))
        address = coordinator.readline().split()[-1]
        print(f"coordinator at {address}; {given.devices} devices are started", file=sys.stderr)
        for _ in range(given.devices):
            ended.enter_context(started(*program, "device", "--join", address, "--memory", "64MiB"))
        cluster = ended.enter_context(hoop.connect(address))
        cluster.wait_for_devices(given.devices)
        train = [*program, *job, *quiet, "--coordinator", address]
        subprocess.run(train, env=ENV, stdout=subprocess.DEVNULL, check=True, timeout=PATIENCE_S)
        under_way(cluster)
        before = max(one.sequence for one in cluster.events())
        for _ in range(given.busy):
            ended.enter_context(started(sys.executable, "-c", BUSY))
        print(f"{given.devices} devices train beside {given.busy} busy processes", file=sys.stderr)
        begun, told, silent = time.monotonic(), time.monotonic(), 0.0
        pause = threading.Event()
        try:
            while (seconds := time.monotonic() - begun) < 60 * given.minutes:
                silent = max([silent, *(one.silent_s for one in cluster.status().devices)])
                if time.monotonic() - told >= TELL_S:
                    told = time.monotonic()
                    seen = Counter(one.kind for one in cluster.events(after=before))
                    counts = ", ".join(f"{kind} {seen[kind]}" for kind in FALSE)
                    print(f"{seconds:.0f} s: {counts}; longest silence {silent:.2f} s", file=sys.stderr)
                pause.wait(LOOK_S)
        except KeyboardInterrupt:
            seconds = time.monotonic() - begun
        events = list(cluster.events(after=before))
    seen = Counter(one.kind for one in events)
    return {
        "minutes": round(seconds / 60, 2),
        "devices": given.devices,
        "busy": given.busy,
        "cores": os.cpu_count(),
        "lease_s": given.lease,
        "longest_silence_s": round(silent, 3),
        **{kind: seen[kind] for kind in FALSE},
        "why": [one.text for one in events if one.kind in FALSE],
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--busy", type=int, default=6 * (os.cpu_count() or 1), help="processes that never sleep")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--lease", type=float, default=1.5, help="seconds of silence that are a death")
    parser.add_argument("--slowdown", type=int, default=50, help="so many times slower than they could")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    given = parser.parse_args()
    found = measured(given)
    if given.json:
        print(json.dumps(found))
    else:
        shown = {name: value for name, value in found.items() if name != "why"}
        print("| " + " | ".join(shown) + " |\n|" + "---|" * len(shown))
        print("| " + " | ".join(str(value) for value in shown.values()) + " |")
        for text in found["why"]:
            print(f"- {text}")
    sys.exit(1 if found["device_dead"] or found["device_evicted"] else 0)


if __name__ == "__main__":
    main()
