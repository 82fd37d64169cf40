"""Is a healthy device ever declared dead when the machine is heavily overloaded?

    python benchmarks/recovery/overload.py --minutes 30 --busy 12

A coordinator and devices train slowly on this machine, beside ``--busy`` processes that never sleep. Once training has
begun, the script counts devices that are suspected or declared dead and links that are reported as failed, and takes
the longest silence between two heartbeats of a device. Nothing is killed, so all counts should be 0; the exit code is
1 if a device was evicted. Ctrl-C ends it early, with the figures so far.
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

TIMEOUT_S = 300.0
POLL_S = 0.05
REPORT_S = 10.0
BUSY = "while True: pass"
FALSE_ALARMS = ("device_suspect", "device_dead", "device_evicted", "links_failed")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextlib.contextmanager
def started(*command: str) -> Iterator[IO[str]]:
    """A process that is killed at the end of the block."""
    quiet: dict[str, Any] = {
        "stderr": subprocess.DEVNULL,
        "start_new_session": True,
    }  # Ctrl-C goes to this script only
    process = subprocess.Popen(command, text=True, env=ENV, stdout=subprocess.PIPE, **quiet)
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)


def wait_for_steps(cluster: Any) -> int:
    """The job, once every device has loaded its data and steps are finished."""
    job = next(int(one.fields["job"]) for one in cluster.events(follow=True) if one.kind == "job_started")
    for observed in cluster.job(job).events(coordinator_timeout=TIMEOUT_S):
        if isinstance(observed.event, Steps) and observed.event.first >= 3:
            return job
    raise SystemExit(f"job {job} was over before it was under way")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Train beside the busy processes, and count the events."""
    program = [sys.executable, "-m", "hoop"]
    slowdown = json.dumps([options.slowdown] * options.devices)
    job = ["train", "mnist", "--set", "epochs=1000000", "--set", f"slowdown={slowdown}"]
    quiet = ["--set", "evaluate_every=0", "--set", "checkpoint_every=0", "--detach"]
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(started(*program, "coordinator", "--lease", f"{options.lease}s"))
        address = coordinator.readline().split()[-1]
        print(f"coordinator at {address}; {options.devices} devices are started", file=sys.stderr)
        for _ in range(options.devices):
            stack.enter_context(started(*program, "device", "--join", address, "--memory", "64MiB"))
        cluster = stack.enter_context(hoop.connect(address))
        cluster.wait_for_devices(options.devices)
        train = [*program, *job, *quiet, "--coordinator", address]
        subprocess.run(train, env=ENV, stdout=subprocess.DEVNULL, check=True, timeout=TIMEOUT_S)
        wait_for_steps(cluster)
        before = max(one.sequence for one in cluster.events())
        for _ in range(options.busy):
            stack.enter_context(started(sys.executable, "-c", BUSY))
        print(f"{options.devices} devices train beside {options.busy} busy processes", file=sys.stderr)
        start, last_report, longest_silence = time.monotonic(), time.monotonic(), 0.0
        pause = threading.Event()
        try:
            while (seconds := time.monotonic() - start) < 60 * options.minutes:
                longest_silence = max([longest_silence, *(one.silent_s for one in cluster.status().devices)])
                if time.monotonic() - last_report >= REPORT_S:
                    last_report = time.monotonic()
                    by_kind = Counter(one.kind for one in cluster.events(after=before))
                    counts = ", ".join(f"{kind} {by_kind[kind]}" for kind in FALSE_ALARMS)
                    print(f"{seconds:.0f} s: {counts}; longest silence {longest_silence:.2f} s", file=sys.stderr)
                pause.wait(POLL_S)
        except KeyboardInterrupt:
            seconds = time.monotonic() - start
        events = list(cluster.events(after=before))
    by_kind = Counter(one.kind for one in events)
    return {
        "minutes": round(seconds / 60, 2),
        "devices": options.devices,
        "busy": options.busy,
        "cores": os.cpu_count(),
        "lease_s": options.lease,
        "longest_silence_s": round(longest_silence, 3),
        **{kind: by_kind[kind] for kind in FALSE_ALARMS},
        "why": [one.text for one in events if one.kind in FALSE_ALARMS],
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: 30)")
    parser.add_argument("--busy", type=int, default=6 * (os.cpu_count() or 1), help="processes that never sleep")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--lease", type=float, default=1.5, help="seconds of silence that are a death")
    parser.add_argument("--slowdown", type=int, default=50, help="how many times slower the devices compute")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    options = parser.parse_args()
    found = measure(options)
    if options.json:
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
