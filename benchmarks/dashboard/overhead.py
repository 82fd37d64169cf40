"""What an open dashboard costs a training run: the same job without and with a page in a browser, in turns.

    python benchmarks/dashboard/overhead.py
    python benchmarks/dashboard/overhead.py --turns 3 --epochs 100 --json

Each turn trains ``hoop train mnist --devices 2`` as often as there are kinds: without a dashboard, with one that no
browser has opened, and with one that headless Chromium shows. The figures of a run are the mean and the median time of
a step in its second half: on two busy cores Chromium needs 10 to 15 s to start and to load the page, once. The browser
runs on the same machine, and takes processor time there that a user's own machine would give: with
``--browser-nice 19`` little that the devices need. The processor time of the dashboard's server and of Chromium, in
milliseconds a second, is that of the second half too.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("none", "served", "open")
LABELS = {"none": "no dashboard", "served": "a dashboard, no browser", "open": "a dashboard, open in Chromium"}
RUN_S = 1800.0
SAMPLE_S = 2.0
"""Between two readings of processor times."""
CPU_PARTS = ("server", "chromium")


def processor_seconds() -> dict[str, float]:
    """Processor time that the dashboard's server and Chromium have taken so far, from /proc."""
    found = dict.fromkeys(CPU_PARTS, 0.0)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = folder.joinpath("cmdline").read_bytes().split(b"\0")
            times = folder.joinpath("stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if b"chromium" in command[0]:
            part = "chromium"
        elif b"dashboard" in command[:6]:
            part = "server"
        else:
            continue
        found[part] += (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")
    return found


class ProcessorTimes:
    """Reads processor times while a run lasts."""

    def __init__(self) -> None:
        self._samples = [(time.time(), processor_seconds())]
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
            self._samples.append((time.time(), processor_seconds()))

    def shares(self, begin: float, end: float) -> dict[str, float]:
        """Milliseconds a second between two times, by part; 0 if too few readings lie between them."""
        inside = [one for one in self._samples if begin <= one[0] <= end - SAMPLE_S]  # the last may be after its end
        if len(inside) < 2:
            return dict.fromkeys(CPU_PARTS, 0.0)
        (first, before), (last, after) = inside[0], inside[-1]
        return {part: 1e3 * (after[part] - before[part]) / (last - first) for part in CPU_PARTS}


@contextlib.contextmanager
def browser(url: str, niceness: int) -> Iterator[None]:
    """Headless Chromium that shows the page, with this niceness."""
    chromium = shutil.which("chromium")
    assert chromium is not None, "checked at the start"
    with tempfile.TemporaryDirectory(prefix="hoop-chromium-") as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        options += ["--remote-debugging-port=0", "--window-size=1280,900"]  # with a port it stays open
        command = ["nice", "-n", str(niceness), chromium, *options, url]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True)
class Run:
    """The second half of one run."""

    steps: list[float]
    """Milliseconds of each step."""
    processor: dict[str, float]
    """Milliseconds a second that the server and Chromium took."""
    weights: str


def train(kind: str, options: argparse.Namespace, folder: str) -> Run:
    """``folder``: for the run's files."""
    command = [sys.executable, "-m", "hoop", "train", options.job, "--devices", str(options.devices), "--json"]
    command += ["--epochs", str(options.epochs), "--out", folder]
    if kind != "none":
        command += ["--dashboard", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    opened = contextlib.ExitStack()
    errors: list[str] = []

    def read_errors() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            errors.append(line)
            if kind == "open" and (found := re.match(r"dashboard (\S+)", line)):
                opened.enter_context(browser(found[1], options.browser_nice))

    reader = threading.Thread(target=read_errors)
    reader.start()
    try:
        with ProcessorTimes() as times:
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
    half = steps[len(steps) // 2 :]
    return Run(half, times.shares(end - sum(half) / 1e3, end), json.loads(text)["weights_sha256"])


def table_rows(runs: dict[str, list[Run]]) -> list[dict[str, Any]]:
    """One row a kind, by kind: medians over its runs."""
    rows: list[dict[str, Any]] = []
    for kind, of_kind in runs.items():
        means = [statistics.fmean(one.steps) for one in of_kind]
        row = {
            "kind": LABELS[kind],
            "mean_ms": statistics.median(means),
            "least_mean_ms": min(means),
            "most_mean_ms": max(means),
            "median_ms": statistics.median(statistics.median(one.steps) for one in of_kind),
            **{f"{part}_ms_a_second": statistics.median(one.processor[part] for one in of_kind) for part in CPU_PARTS},
        }
        for figure in ("mean", "median"):
            row[f"{figure}_overhead"] = row[f"{figure}_ms"] / (rows[0] if rows else row)[f"{figure}_ms"] - 1
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="mnist")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--browser-nice", type=int, default=0, help="niceness of Chromium; 19: it takes what the devices leave"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        raise SystemExit("chromium is not on the PATH; Debian: apt install chromium")
    if not Path.cwd().joinpath("src", "hoop").is_dir() and "PYTHONPATH" not in os.environ:
        print("this measures the installed Hoop", file=sys.stderr)
    runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for turn in range(options.turns):
        order = KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]
        for kind in order:
            with tempfile.TemporaryDirectory(prefix="hoop-overhead-") as folder:
                run = train(kind, options, folder)
            runs[kind].append(run)
            figures = f"{statistics.fmean(run.steps):.3f} ms a step, median {statistics.median(run.steps):.3f}"
            figures += "".join(f", {part} {run.processor[part]:.0f} ms/s" for part in CPU_PARTS)
            print(f"turn {turn + 1}: {LABELS[kind]}: {figures}", file=sys.stderr)
    rows = table_rows(runs)
    same_weights = len({run.weights for of_kind in runs.values() for run in of_kind}) == 1
    about = {
        "turns": options.turns,
        "epochs": options.epochs,
        "browser_nice": options.browser_nice,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    if options.json:
        print(json.dumps({**about, "load": os.getloadavg(), "same_weights": same_weights, "rows": rows}))
        return
    print(
        "| | mean step, ms (median of runs) | least to most | overhead | median step, ms | overhead "
        "| server, ms/s | Chromium, ms/s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        between = f"{row['least_mean_ms']:.3f} to {row['most_mean_ms']:.3f}"
        mean = f"{row['mean_ms']:.3f} | {between} | {row['mean_overhead']:+.1%}"
        processor = " | ".join(f"{row[f'{part}_ms_a_second']:.0f}" for part in CPU_PARTS)
        print(f"| {row['kind']} | {mean} | {row['median_ms']:.3f} | {row['median_overhead']:+.1%} | {processor} |")
    same = "the same weights" if same_weights else "DIFFERENT WEIGHTS"
    print(f"\n{about}; load at the end {os.getloadavg()[0]:.1f}; {same} in all runs")


if __name__ == "__main__":
    main()
