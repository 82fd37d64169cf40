"""What an open dashboard costs a training run: the same job without and with a page in a browser, in turns.

    python benchmarks/dashboard/overhead.py
    python benchmarks/dashboard/overhead.py --turns 3 --epochs 200 --json

Each turn trains ``hoop train mnist --devices 2`` as often as there are kinds: without a dashboard, with one that no
browser has opened, and with one that headless Chromium shows. The figures of a run are the mean and the median time of
a step after the first minute; the overhead is the median, over the turns, of the difference from the run without a
dashboard in the same turn, so that a bad run or a slow drift of the machine does not decide it.

Chromium runs on the same machine, and takes processor time there that a user's own machine would give: with
``--browser-nice 19`` little that the devices need. It is started once, before all runs, and shows a blank page but for
the runs with an open one: it works for 40 s after its start whatever it shows, then, with a blank page, for 0.03 ms a
second. A page is opened when the dashboard is served; to load it takes 10 s on two busy cores, and V8 tidies up half a
minute later, once: both are in the first minute.

The processor times are those after it too, in milliseconds a second: of the dashboard's server, of Chromium,
and of the run's other processes than the devices (coordinator and command), which answer the dashboard.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

KINDS = ("none", "served", "open")
LABELS = {"none": "no dashboard", "served": "a dashboard, no browser", "open": "a dashboard, open in Chromium"}
RUN_S = 1800.0
SAMPLE_S = 4.0
"""Between two readings of processor times."""
CPU_PARTS = {"server": "server", "chromium": "Chromium", "coordinator": "coordinator"}
"""Parts whose processor time is measured, and their titles."""
QUIET_S = 60.0
"""How long Chromium is left alone after its start."""


@dataclass(frozen=True)
class Process:
    """One line of /proc."""

    parent: int
    part: str
    """Of ``CPU_PARTS``; of any other process ``coordinator``."""
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


def descendants(all_processes: dict[int, Process], roots: list[int]) -> set[int]:
    """The processes with these numbers, their children, and so on."""
    children = defaultdict(list)
    for number, one in all_processes.items():
        children[one.parent].append(number)
    found, ahead = set[int](), list(roots)
    while ahead:
        found.add(number := ahead.pop())
        ahead += children[number]
    return found


class ProcessorTimes:
    """Reads the processor times of a run and of the browser while the run lasts."""

    def __init__(self, roots: list[int], devices: int) -> None:
        """``roots``: the processes that started the others. ``devices``: how many of them are devices."""
        self._roots, self._devices = roots, devices
        self._samples = [(time.time(), processes())]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> ProcessorTimes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            self._samples.append((time.time(), processes()))

    def shares(self, begin: float, end: float) -> dict[str, float]:
        """Milliseconds a second between two times, by part; 0 if too few readings lie between them."""
        inside = [one for one in self._samples if begin <= one[0] <= end - SAMPLE_S]  # the last may be after its end
        found = dict.fromkeys(CPU_PARTS, 0.0)
        if len(inside) < 2:
            return found
        (first, before), (last, after) = inside[0], inside[-1]
        taken = {
            number: 1e3 * (after[number].seconds - (before[number].seconds if number in before else 0)) / (last - first)
            for number in descendants(after, self._roots) & after.keys()
        }
        busiest = sorted((one for one in taken if after[one].part == "coordinator"), key=lambda one: -taken[one])
        for number in taken.keys() - set(busiest[: self._devices]):
            found[after[number].part] += taken[number]
        return found


class Browser:
    """Headless Chromium, which shows a blank page, or one that is opened by ``page``."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self._port = process, port

    @contextlib.contextmanager
    def page(self, url: str) -> Iterator[None]:
        """Shows a page in a new tab, and closes it."""
        tab = self._ask("PUT", f"new?{url}")
        try:
            yield
        finally:
            self._ask("GET", f"close/{json.loads(tab)['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            connection.request(method, f"/json/{path}")
            return connection.getresponse().read()
        finally:
            connection.close()


@contextlib.contextmanager
def browser(niceness: int) -> Iterator[Browser]:
    """Headless Chromium with this niceness, once it does nothing any more."""
    chromium = shutil.which("chromium")
    assert chromium is not None, "checked at the start"
    with tempfile.TemporaryDirectory(prefix="hoop-chromium-", ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        options += ["--remote-debugging-port=0", "--window-size=1280,900"]
        command = ["nice", "-n", str(niceness), chromium, *options, "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(QUIET_S)
            port = Path(profile, "DevToolsActivePort").read_text().split()[0]
            yield Browser(process, int(port))
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class Run:
    """One run after its first minute."""

    steps: list[float]
    """Milliseconds of each step."""
    processor: dict[str, float]
    """Milliseconds a second, by part."""
    weights: str


def train(kind: str, options: argparse.Namespace, chromium: Browser, folder: str) -> Run:
    """``folder``: for the run's files."""
    command = [sys.executable, "-m", "hoop", "train", options.job, "--devices", str(options.devices), "--json"]
    command += ["--epochs", str(options.epochs), "--out", folder]
    if kind != "none":
        command += ["--dashboard", "0"]
    environment = {**os.environ, "HOOP_NO_REPORT": "1"}  # it would be made between the last step and the run's end
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    assert process.stderr is not None
    opened = contextlib.ExitStack()
    errors: list[str] = []

    def read_errors() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            errors.append(line)
            if kind == "open" and (found := re.match(r"dashboard (\S+)", line)):
                opened.enter_context(chromium.page(f"{found[1]}/?tab={options.tab}"))

    reader = threading.Thread(target=read_errors)
    reader.start()
    try:
        with ProcessorTimes([process.pid, chromium.process.pid], options.devices) as times:
            text = process.stdout.read()
            process.wait(RUN_S)
            end = time.time()
    finally:
        reader.join()
        opened.close()
    if process.returncode:
        raise SystemExit(f"the run failed with code {process.returncode}: {''.join(errors)[-1000:]}")
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    steps = [1e3 * row["seconds"] for row in map(json.loads, lines) if "seconds" in row and "step" in row]
    ends = itertools.accumulate(steps)
    measured = [step for step, since_first in zip(steps, ends, strict=True) if since_first > 1e3 * options.warm_up]
    if not measured:
        raise SystemExit(f"the run's steps took {sum(steps) / 1e3:.0f} s, less than --warm-up; give more --epochs")
    return Run(measured, times.shares(end - sum(measured) / 1e3, end), json.loads(text)["weights_sha256"])


def table_rows(runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """One row a kind: medians over its runs, and the overhead by turn."""
    rows: list[dict[str, Any]] = []
    for kind, of_kind in runs.items():
        row: dict[str, Any] = {"kind": LABELS[kind], "weights": sorted({run.weights for run in of_kind})}
        for figure, of_steps in (("mean", statistics.fmean), ("median", statistics.median)):
            times = [of_steps(run.steps) for run in of_kind]
            plain = [of_steps(run.steps) for run in runs["none"]]
            turns = [time / without - 1 for time, without in zip(times, plain, strict=True)]
            row[f"{figure}_ms"] = statistics.median(times)
            row[f"{figure}_overhead"] = statistics.median(turns)
            row[f"{figure}_overhead_by_turn"] = turns
        for part in CPU_PARTS:
            row[f"{part}_ms_a_second"] = statistics.median(run.processor[part] for run in of_kind)
        rows.append(row)
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    titles = ", ms/s | ".join(CPU_PARTS.values())
    print(f"| | mean step, ms | overhead | by turn | median step, ms | overhead | by turn | {titles}, ms/s |")
    print("|---|---|---|---|---|---|---|" + "---|" * len(CPU_PARTS))
    for row in rows:
        cells = [row["kind"]]
        for figure in ("mean", "median"):
            turns = row[f"{figure}_overhead_by_turn"]
            cells += [f"{row[f'{figure}_ms']:.3f}", f"{row[f'{figure}_overhead']:+.1%}"]
            cells.append(f"{min(turns):+.1%} to {max(turns):+.1%}")
        cells += [f"{row[f'{part}_ms_a_second']:.1f}" for part in CPU_PARTS]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="mnist")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds of steps that are not measured")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--browser-nice", type=int, default=0, help="niceness of Chromium; 19: it takes what the devices leave"
    )
    parser.add_argument("--tab", default="cluster", help="tab of the page that is open")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        raise SystemExit("chromium is not on the PATH; Debian: apt install chromium")
    if not Path.cwd().joinpath("src", "hoop").is_dir() and "PYTHONPATH" not in os.environ:
        print("this measures the installed Hoop", file=sys.stderr)
    runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    with browser(options.browser_nice) as chromium:
        for turn in range(options.turns):
            order = KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]
            for kind in order:
                with tempfile.TemporaryDirectory(prefix="hoop-overhead-") as folder:
                    run = train(kind, options, chromium, folder)
                runs[kind].append(run)
                figures = f"{statistics.fmean(run.steps):.3f} ms a step, median {statistics.median(run.steps):.3f}"
                figures += "".join(f", {title} {run.processor[part]:.1f} ms/s" for part, title in CPU_PARTS.items())
                print(f"turn {turn + 1}: {LABELS[kind]}: {figures}", file=sys.stderr)
    rows = table_rows(runs)
    same_weights = len({one for row in rows for one in row["weights"]}) == 1
    about = {
        "turns": options.turns,
        "epochs": options.epochs,
        "warm_up": options.warm_up,
        "tab": options.tab,
        "browser_nice": options.browser_nice,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    if options.json:
        print(json.dumps({**about, "load": os.getloadavg(), "same_weights": same_weights, "rows": rows}))
        return
    print_table(rows)
    same = "the same weights" if same_weights else "DIFFERENT WEIGHTS"
    print(f"\n{about}; load at the end {os.getloadavg()[0]:.1f}; {same} in all runs")


if __name__ == "__main__":
    main()
