"""How soon a browser shows that a device is dead: seconds from SIGKILL to the text on the page, device by device.

    python benchmarks/dashboard/kills.py
    python benchmarks/dashboard/kills.py --devices 8 --json

It starts ``hoop up --dashboard``, trains ``mnist`` there, opens the page in Chromium, and kills one device after the
other until one is left. It needs Chromium and ``pip install playwright``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time

import hoop

HOOP = [sys.executable, "-m", "hoop"]
WAIT_MS = 120_000


def measured(devices: int) -> list[float]:
    """Seconds from each kill to the page that shows it."""
    from playwright.sync_api import sync_playwright

    up = subprocess.Popen(
        [*HOOP, "up", "--devices", str(devices), "--dashboard", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert up.stdout is not None
    train = None
    try:
        address = up.stdout.readline().split()[-1]
        url = up.stdout.readline().split()[-1]
        command = [*HOOP, "train", "mnist", "-c", address, "--epochs", "100000", "--json"]
        train = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with sync_playwright() as driver, hoop.connect(address) as cluster:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(WAIT_MS)
            page.goto(url)
            page.get_by_text(f"{devices} devices on 1 host: {devices} training.").wait_for()
            pids = [one.device.pid for one in cluster.status().devices]
            found = []
            for dead, pid in enumerate(pids[1:], start=1):
                page.get_by_text(re.compile(rf"{devices - dead + 1} training")).wait_for()
                killed = time.perf_counter()
                os.kill(pid, signal.SIGKILL)
                page.get_by_text(re.compile(rf"\b{dead} dead")).wait_for()
                found.append(time.perf_counter() - killed)
            browser.close()
        return found
    finally:
        for process in (train, up):
            if process is not None:
                process.terminate()
                process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        raise SystemExit("chromium is not on the PATH; Debian: apt install chromium")
    found = measured(options.devices)
    about = {"cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()[0]}
    if options.json:
        print(json.dumps({**about, "seconds": found}))
        return
    print("| kill | seconds until the page shows it |\n|---|---|")
    for number, seconds in enumerate(found, start=1):
        print(f"| {number} | {seconds:.2f} |")
    print(f"\nmedian {statistics.median(found):.2f} s, longest {max(found):.2f} s; {about}")


if __name__ == "__main__":
    main()
