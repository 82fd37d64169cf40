"""What an open dashboard costs a training run: the step times of one run, while the page works and while it is stopped.

    python benchmarks/dashboard/overhead.py --tab cluster
    python benchmarks/dashboard/overhead.py --tab job --keep pairs.jsonl

It runs ``hoop train mnist --devices 2 --dashboard`` with the page open in headless Chromium on the same machine, which
takes processor time there that a user's own machine would give. After ``SETTLE_S`` seconds, in which Chromium and V8
finish what they do after a start, windows alternate (stopped, open, open, stopped, …), so that a slow drift of the
machine is in both kinds alike: two runs differ by far more than a dashboard costs.

In a stopped window the server of the dashboard and all processes of Chromium are stopped (SIGSTOP): nothing of them
takes processor time. A hidden page, or one that is closed, would leave the server's polls in the windows without a
dashboard. SIGCONT continues them. Then the server takes the events of the meantime and sends an update, and Chromium
draws it: a dashboard that is always open does this work too, so it counts as open, from the signal on. The first
``GUARD_S`` seconds after a SIGSTOP are in no window: steps recover from what the dashboard did before. The coordinator
goes on to send the events of the job to the server's socket, two messages a second at most, in both kinds of windows.

The job's events have the seconds of each step (``mean`` and ``median``, without evaluations) and the number of steps
done at a time, from which follows the time by step with all that is between steps (``whole``). The overhead of a pair
of windows is the open one's time divided by that of the stopped one, minus 1; the result is the median of all pairs
with the 95 % interval of 10,000 bootstrap samples of them. ``--keep`` appends the pairs to a file, and the result is of
all pairs in the file with the same tab: a long measurement can be divided into short ones.

The processor times of the open and of the stopped windows are in milliseconds a second: of the dashboard's server, of
Chromium, and of the run's other processes than the devices (coordinator and command), which answer the dashboard.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np

import hoop
from hoop import job_events as ev

DEVICES = 2
TABS = ("cluster", "job", "timeline")
FIGURES = ("mean", "median", "whole")
PARTS = ("server", "chromium", "coordinator")
"""Whose processor time is measured; ``coordinator``: the command too."""
SETTLE_S = 75.0
"""Between the start of Chromium and of the run, and the first window. Chromium works for 40 s after its start, and V8
tidies up half a minute after the page was loaded."""
GUARD_S = 0.5
START_S = 60.0
END_S = 30.0
CHROMIUM = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--window-size=1280,900"),
    *("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update"),
    "--disable-sync",
)
SAMPLES = 10_000


@dataclass(frozen=True)
class Process:
    """One line of /proc."""

    parent: int
    part: str
    """Of ``PARTS``; of any other process ``coordinator``."""
    seconds: float
    """Processor time so far."""


def processes() -> dict[int, Process]:
    """All processes of this machine, by number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = folder.joinpath("cmdline").read_bytes().split(b"\0")
            fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        part = "chromium" if b"chromium" in command[0] else "server" if b"dashboard" in command[:6] else "coordinator"
        seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found[int(folder.name)] = Process(int(fields[1]), part, seconds)
    return found


def descendants(all_processes: dict[int, Process], roots: Sequence[int]) -> set[int]:
    """The processes with these numbers, their children, and so on."""
    children = defaultdict(list)
    for number, one in all_processes.items():
        children[one.parent].append(number)
    found, ahead = set[int](), list(roots)
    while ahead:
        found.add(number := ahead.pop())
        ahead += children[number]
    return found & all_processes.keys()


@contextlib.contextmanager
def chromium() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Headless Chromium with a blank page: its process and the port of its developer tools."""
    program = shutil.which("chromium")
    assert program is not None, "checked at the start"
    with tempfile.TemporaryDirectory(prefix="hoop-chromium-", ignore_cleanup_errors=True) as profile:
        command = [program, *CHROMIUM, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            written = Path(profile, "DevToolsActivePort")
            wait_for(lambda: written.exists() and "\n" in written.read_text(), "Chromium's port")
            yield process, int(written.read_text().split()[0])
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def show_page(port: int, url: str) -> None:
    """Opens a tab of Chromium with this address."""
    connection = HTTPConnection("127.0.0.1", port, timeout=START_S)
    try:
        connection.request("PUT", f"/json/new?{url}")
        connection.getresponse().read()
    finally:
        connection.close()


def wait_for(look: Any, what: str) -> Any:
    """What ``look`` returns, once it is true."""
    until = time.monotonic() + START_S
    while not (found := look()):
        if time.monotonic() > until:
            raise SystemExit(f"{what} is not there after {START_S:g} s")
        time.sleep(0.05)
    return found


class Run:
    """``hoop train`` with a dashboard, until ``close``."""

    def __init__(self, folder: str) -> None:
        self.address_file = Path(folder, "address")
        command = [sys.executable, "-m", "hoop", "train", "mnist", "--devices", str(DEVICES), "--json"]
        command += ["--epochs", "100000", "--dashboard", "0", "--address-file", str(self.address_file)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self._errors: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(iter(self.process.stderr.readline, ""))

    def page(self) -> str:
        """The address of the dashboard."""
        found = wait_for(
            lambda: [one for line in list(self._errors) for one in re.findall(r"^dashboard (\S+)", line)],
            "the dashboard's address",
        )
        return str(found[0])

    def steps(self, until: float) -> list[tuple[float, ev.Steps]]:
        """The reports of steps until this time of the clock, and when the coordinator got them."""
        found: list[tuple[float, ev.Steps]] = []
        with hoop.connect(self.address_file.read_text().strip()) as cluster:
            for observed in cluster.job(cluster.status().jobs[0].id).events():
                if isinstance(observed.event, ev.Steps):
                    found.append((observed.time, observed.event))
                if observed.time > until:
                    return found
        raise SystemExit(f"the run ended too early: {''.join(self._errors)[-1000:]}")

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        finally:
            self.process.kill()
            self._reader.join()


class Dashboard:
    """The processes of the dashboard and of the browser."""

    def __init__(self, run: Run, browser: subprocess.Popen[bytes]) -> None:
        self._roots = (run.process.pid, browser.pid)
        self._stopped: list[int] = []

    def parts(self) -> dict[int, Process]:
        """The processes of the run and of the browser."""
        found = processes()
        return {number: found[number] for number in descendants(found, self._roots)}

    def stop(self) -> None:
        for number, one in self.parts().items():
            if one.part in ("server", "chromium"):
                self._stopped.append(number)
                os.kill(number, signal.SIGSTOP)

    def go_on(self) -> None:
        for number in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)
        self._stopped.clear()


@dataclass(frozen=True)
class Window:
    """Some seconds in which the dashboard was open, or stopped."""

    is_open: bool
    begin: float
    """By the clock, as the times of events."""
    end: float
    processor: dict[str, float]
    """Milliseconds a second, by part."""


def processor_times(before: dict[int, Process], after: dict[int, Process], seconds: float) -> dict[str, float]:
    """Milliseconds a second between two readings, by part; the processes that took most of it are the devices."""
    taken = {
        number: 1e3 * (one.seconds - (before[number].seconds if number in before else 0)) / seconds
        for number, one in after.items()
    }
    busiest = sorted((one for one in taken if after[one].part == "coordinator"), key=lambda one: -taken[one])
    found = dict.fromkeys(PARTS, 0.0)
    for number in taken.keys() - set(busiest[:DEVICES]):
        found[after[number].part] += taken[number]
    return found


def measured_windows(dashboard: Dashboard, pairs: int, window_s: float) -> list[Window]:
    """Pairs of windows, the first with a stopped one first, the second with an open one first, and so on."""
    windows: list[Window] = []
    was_open = True
    try:
        for is_open in (kind for pair in range(pairs) for kind in ((False, True), (True, False))[pair % 2]):
            if is_open and not was_open:
                dashboard.go_on()
            elif was_open and not is_open:
                dashboard.stop()
                time.sleep(GUARD_S)
            was_open = is_open
            begin, before = time.time(), dashboard.parts()
            time.sleep(window_s)
            end, after = time.time(), dashboard.parts()
            windows.append(Window(is_open, begin, end, processor_times(before, after, end - begin)))
    finally:
        dashboard.go_on()
    return windows


def times_of(window: Window, reports: Sequence[tuple[float, ev.Steps]]) -> dict[str, float]:
    """Milliseconds of a step in a window, by figure. A report's last step ended when the coordinator got it."""
    steps: list[float] = []
    inside = [(at, event.first + len(event.loss)) for at, event in reports if window.begin <= at <= window.end]
    for at, event in reports:
        ended = at
        for seconds in reversed(event.seconds):
            if window.begin <= ended - seconds and ended <= window.end:
                steps.append(1e3 * seconds)
            ended -= seconds
    if len(inside) < 2:
        raise SystemExit(f"{len(inside)} reports of steps in a window; give a longer --window")
    (first, done_then), (last, done) = inside[0], inside[-1]
    whole = 1e3 * (last - first) / (done - done_then)
    return {"mean": statistics.fmean(steps), "median": statistics.median(steps), "whole": whole}


@dataclass(frozen=True)
class Pair:
    """A stopped window and an open one, one after the other."""

    tab: str
    stopped: dict[str, float]
    """Milliseconds of a step, by figure."""
    open: dict[str, float]
    stopped_processor: dict[str, float]
    open_processor: dict[str, float]

    def overhead(self, figure: str) -> float:
        return self.open[figure] / self.stopped[figure] - 1


def measured_pairs(tab: str, pairs: int, window_s: float) -> list[Pair]:
    """The pairs of one run."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hoop-overhead-") as folder, chromium() as (browser, port):
        run = Run(folder)
        try:
            show_page(port, f"{run.page()}/?tab={tab}")
            time.sleep(max(0.0, SETTLE_S - (time.monotonic() - began)))
            windows = measured_windows(Dashboard(run, browser), pairs, window_s)
            reports = run.steps(windows[-1].end)
        finally:
            run.close()
    found = []
    for one, other in zip(windows[::2], windows[1::2], strict=True):
        stopped, opened = (other, one) if one.is_open else (one, other)
        found.append(
            Pair(tab, times_of(stopped, reports), times_of(opened, reports), stopped.processor, opened.processor)
        )
    return found


def result(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Medians of the pairs and the overhead by figure, with its 95 % interval."""
    chosen = np.random.default_rng(0).integers(0, len(pairs), (SAMPLES, len(pairs)))
    row: dict[str, Any] = {"tab": pairs[0].tab, "pairs": len(pairs)}
    for figure in FIGURES:
        overheads = np.array([one.overhead(figure) for one in pairs])
        low, high = np.percentile(np.median(overheads[chosen], axis=1), (2.5, 97.5))
        row[figure] = {
            "stopped_ms": statistics.median(one.stopped[figure] for one in pairs),
            "open_ms": statistics.median(one.open[figure] for one in pairs),
            "overhead": float(np.median(overheads)),
            "interval": [float(low), float(high)],
        }
    for kind in ("stopped", "open"):
        row[f"{kind}_processor"] = {
            part: statistics.fmean(getattr(one, f"{kind}_processor")[part] for one in pairs) for part in PARTS
        }
    return row


def print_table(row: dict[str, Any]) -> None:
    print("| tab | pairs | figure of a step | stopped, ms | open, ms | overhead | 95 % interval |")
    print("|---|---|---|---|---|---|---|")
    for figure in FIGURES:
        one = row[figure]
        low, high = one["interval"]
        print(
            f"| {row['tab']} | {row['pairs']} | {figure} | {one['stopped_ms']:.3f} | {one['open_ms']:.3f} | "
            f"{one['overhead']:+.1%} | {low:+.1%} to {high:+.1%} |"
        )
    print()
    for kind in ("stopped", "open"):
        parts = ", ".join(f"{part} {one:.1f}" for part, one in row[f"{kind}_processor"].items())
        print(f"processor time, ms a second, {kind}: {parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tab", default="cluster", choices=TABS, help="tab of the page that is open")
    parser.add_argument("--pairs", type=int, default=22, help="pairs of windows")
    parser.add_argument("--window", type=float, default=3.0, help="seconds of a window")
    parser.add_argument("--keep", type=Path, help="file of pairs, one a line: these are added, and all of them count")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        raise SystemExit("chromium is not on the PATH; Debian: apt install chromium")
    pairs = measured_pairs(options.tab, options.pairs, options.window)
    if options.keep is not None:
        with options.keep.open("a") as file:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in pairs)
        kept = [Pair(**json.loads(line)) for line in options.keep.read_text().splitlines()]
        pairs = [one for one in kept if one.tab == options.tab]
    row = result(pairs)
    about = {"window_s": options.window, "cores": os.cpu_count(), "machine": platform.machine()}
    if options.json:
        print(json.dumps({**about, "load": os.getloadavg(), **row}))
        return
    print_table(row)
    print(f"\n{about}; load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
