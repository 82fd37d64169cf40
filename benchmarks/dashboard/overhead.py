"""What an open dashboard costs a training run: the same job without and with a page in a browser, in turns.

    python benchmarks/dashboard/overhead.py
    python benchmarks/dashboard/overhead.py --turns 3 --epochs 4 --json

Each turn trains ``hoop train mnist --devices 2`` as often as there are kinds: without a dashboard, with one that no
browser has opened, and with one that headless Chromium shows. A run's figure is the median time of its steps. The
browser runs on the same machine, and takes processor time there that a user's own machine would give: with
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


def train(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run: its result."""
    command = [sys.executable, "-m", "hoop", "train", options.job, "--devices", str(options.devices), "--json"]
    command += ["--epochs", str(options.epochs)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="mnist")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
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
    steps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    hashes = set()
    for turn in range(options.turns):
        order = KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]
        for kind in order:
            result = train(kind, options)
            steps[kind].append(1e3 * result["step_seconds"])
            hashes.add(result["weights_sha256"])
            print(f"turn {turn + 1}: {LABELS[kind]}: {steps[kind][-1]:.3f} ms a step", file=sys.stderr)
    least = statistics.median(steps["none"])
    rows = [
        {
            "kind": LABELS[kind],
            "step_ms": statistics.median(steps[kind]),
            "least_ms": min(steps[kind]),
            "most_ms": max(steps[kind]),
            "overhead": statistics.median(steps[kind]) / least - 1,
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
    print("| | a step, ms (median of runs) | least to most | overhead |\n|---|---|---|---|")
    for row in rows:
        between = f"{row['least_ms']:.3f} to {row['most_ms']:.3f}"
        print(f"| {row['kind']} | {row['step_ms']:.3f} | {between} | {row['overhead']:+.1%} |")
    same = "the same weights" if len(hashes) == 1 else "DIFFERENT WEIGHTS"
    print(f"\n{about}; load at the end {os.getloadavg()[0]:.1f}; {same} in all runs")


if __name__ == "__main__":
    main()
