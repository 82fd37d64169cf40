"""What an open dashboard costs a training run: the same job without and with a page in a browser, in turns.

    python benchmarks/dashboard/overhead.py
    python benchmarks/dashboard/overhead.py --turns 3 --epochs 100 --json

Each turn trains ``hoop train mnist --devices 2`` as often as there are kinds: without a dashboard, with one that no
browser has opened, and with one that headless Chromium shows. The figures of a run are the mean and the median time of
a step in its second half: on two busy cores Chromium needs 10 to 15 s to start and to load the page, once. The browser
runs on the same machine, and takes processor time there that a user's own machine would give: with
``--browser-nice 19`` little that the devices need.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ("none", "served", "open")
LABELS = {"none": "no dashboard", "served": "a dashboard, no browser", "open": "a dashboard, open in Chromium"}
RUN_S = 1800.0


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


def train(kind: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One run: its result. ``folder``: for its files."""
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
        text = process.stdout.read()
        process.wait(RUN_S)
    finally:
        reader.join()
        opened.close()
    if process.returncode:
        raise SystemExit(f"the run failed with code {process.returncode}: {''.join(errors)[-1000:]}")
    result: dict[str, Any] = json.loads(text)
    return result


def step_times(folder: str) -> list[float]:
    """The milliseconds of each step in the second half of a run."""
    lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    steps = [1e3 * row["seconds"] for row in map(json.loads, lines) if "seconds" in row and "step" in row]
    return steps[len(steps) // 2 :]


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
    means: dict[str, list[float]] = {kind: [] for kind in KINDS}
    medians: dict[str, list[float]] = {kind: [] for kind in KINDS}
    hashes = set()
    for turn in range(options.turns):
        order = KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]
        for kind in order:
            with tempfile.TemporaryDirectory(prefix="hoop-overhead-") as folder:
                result = train(kind, options, folder)
                steps = step_times(folder)
            means[kind].append(statistics.fmean(steps))
            medians[kind].append(statistics.median(steps))
            hashes.add(result["weights_sha256"])
            figures = f"{means[kind][-1]:.3f} ms a step, median {medians[kind][-1]:.3f}"
            print(f"turn {turn + 1}: {LABELS[kind]}: {figures}", file=sys.stderr)
    rows = [
        {
            "kind": LABELS[kind],
            "mean_ms": statistics.median(means[kind]),
            "least_mean_ms": min(means[kind]),
            "most_mean_ms": max(means[kind]),
            "mean_overhead": statistics.median(means[kind]) / statistics.median(means["none"]) - 1,
            "median_ms": statistics.median(medians[kind]),
            "median_overhead": statistics.median(medians[kind]) / statistics.median(medians["none"]) - 1,
        }
        for kind in KINDS
    ]
    about = {
        "turns": options.turns,
        "epochs": options.epochs,
        "browser_nice": options.browser_nice,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    if options.json:
        print(json.dumps({**about, "load": os.getloadavg(), "same_weights": len(hashes) == 1, "rows": rows}))
        return
    print("| | mean step, ms (median of runs) | least to most | overhead | median step, ms | overhead |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        between = f"{row['least_mean_ms']:.3f} to {row['most_mean_ms']:.3f}"
        mean = f"{row['mean_ms']:.3f} | {between} | {row['mean_overhead']:+.1%}"
        print(f"| {row['kind']} | {mean} | {row['median_ms']:.3f} | {row['median_overhead']:+.1%} |")
    same = "the same weights" if len(hashes) == 1 else "DIFFERENT WEIGHTS"
    print(f"\n{about}; load at the end {os.getloadavg()[0]:.1f}; {same} in all runs")


if __name__ == "__main__":
    main()
