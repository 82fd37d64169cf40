"""How responsive the page stays with many devices: times of frames in Chromium, and of an update on the server.

    python benchmarks/dashboard/frames.py
    python benchmarks/dashboard/frames.py --devices 64 --seconds 10 --json

The devices are simulated: every update of the page (two a second) shows other figures of all of them, as in a running
job, with one device in fifty dying and coming back. The page is served as by ``hoop dashboard``. In the browser the
times between frames (``requestAnimationFrame``), tasks above 50 ms and the share of the page's main thread that works
are measured, on the server the time of an update. It needs Chromium and ``pip install playwright``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import time
from typing import Any

from hoop.dashboard.activity_view import ActivityView, LinkBytes, Sample
from hoop.dashboard.curve import Curve
from hoop.dashboard.document import Page
from hoop.dashboard.job_view import JobView
from hoop.dashboard.server import DashboardConfig, DashboardServer
from hoop.dashboard.view import BufferView, ClusterView, DeviceState, DeviceView

MEASURE = """
seconds => new Promise(done => {
  const frames = [], long = [];
  const observer = new PerformanceObserver(list => list.getEntries().forEach(one => long.push(one.duration)));
  observer.observe({entryTypes: ['longtask']});
  let last = performance.now();
  const end = last + 1000 * seconds;
  const tick = now => {
    frames.push(now - last);
    last = now;
    if (now < end) { requestAnimationFrame(tick) } else { observer.disconnect(); done([frames, long]) }
  };
  requestAnimationFrame(tick);
})
"""
PER_HOST = 8


class SimulatedCluster:
    """A cluster whose figures differ at every look."""

    def __init__(self, devices: int) -> None:
        self._count, self._turn = devices, 0

    def view(self) -> ClusterView:
        self._turn += 1
        turn, count = self._turn, self._count
        steps = tuple(float(step) for step in range(600))
        losses = tuple(2.0 / (1 + (step + turn) / 50) for step in steps)
        job = JobView(
            1, "simulated", tuple(range(1, count + 1)), "running", strategy="data", batch_size=4096, steps=10**6,
            done=600 + turn, loss=Curve(steps, losses), speed=Curve(steps, losses), step_seconds=Curve(steps, losses),
            num_microbatches=count, predicted_step_seconds=0.02,
        )  # fmt: skip
        return ClusterView(
            "127.0.0.1:4021", 1, "simulated", "", True, self._devices(turn), jobs=(job,), now=float(turn)
        )

    def _devices(self, turn: int) -> tuple[DeviceView, ...]:
        return tuple(self._device(number, turn) for number in range(self._count))

    def _device(self, number: int, turn: int) -> DeviceView:
        dead = (number + turn // 10) % 50 == 0
        jitter = ((number * 7919 + turn * 104729) % 1000) / 1000
        peer = (number + 1) % self._count + 1
        first = Sample(0.0, 0, (0.0,) * 6, 0, (LinkBytes(peer, 0, 0),))
        parts = (0.1, 1.0, 1.8, 0.4, 0.2, 0.3 + jitter)
        last = Sample(4.0, 200, parts, int(1e7 * (1 + jitter)), (LinkBytes(peer, int(4e6 * (1 + jitter)), 0),))
        return DeviceView(
            number + 1, f"host-{number // PER_HOST}", "127.0.0.1:1", 1, f"run-{number}",
            DeviceState.DEAD if dead else DeviceState.TRAINING, used=int(2**24 * jitter), capacity=2**25,
            buffers=(BufferView("stage0.weights", 2**22), BufferView("stage0.slots", int(2**23 * jitter))),
            job=0 if dead else 1, rank=number, gone_at=float(turn) if dead else 0.0,
            activity=None if dead else ActivityView(1, number, 1, (first, last), 4.0, (number,), (0,)),
        )  # fmt: skip


def timed_updates(page_update: Any, times: list[float]) -> Any:
    def update(self: Page) -> None:
        began = time.perf_counter()
        page_update(self)
        times.append(time.perf_counter() - began)

    return update


def busy_seconds(tools: Any) -> float:
    """Seconds that the page's main thread has worked so far."""
    metrics = tools.send("Performance.getMetrics")["metrics"]
    return next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")


def measured(devices: int, seconds: float, tabs: list[str]) -> list[dict[str, Any]]:
    from playwright.sync_api import sync_playwright

    cluster, updates = SimulatedCluster(devices), list[float]()
    Page.update = timed_updates(Page.update, updates)  # type: ignore[method-assign]
    server = DashboardServer(cluster.view, DashboardConfig())
    server.start()
    rows = []
    try:
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.set_default_timeout(300_000)
            page.goto(server.url)
            page.get_by_text("training").first.wait_for(state="attached")
            tools = page.context.new_cdp_session(page)
            tools.send("Performance.enable")
            for tab in tabs:
                page.get_by_role("button", name=tab, exact=True).click()
                page.wait_for_timeout(2000)
                updates.clear()
                busy, began = busy_seconds(tools), time.perf_counter()
                frames, long = page.evaluate(MEASURE, seconds)
                busy, took = busy_seconds(tools) - busy, time.perf_counter() - began
                frames.sort()
                rows.append(
                    {
                        "tab": tab,
                        "devices": devices,
                        "frame_ms": statistics.median(frames),
                        "p95_ms": frames[int(0.95 * (len(frames) - 1))],
                        "longest_ms": frames[-1],
                        "long_tasks": len(long),
                        "main_thread": busy / took,
                        "updates_a_second": len(updates) / seconds,
                        "server_ms": 1e3 * statistics.median(updates) if updates else 0.0,
                    }
                )
            browser.close()
    finally:
        server.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--tabs", default="Cluster,Job")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        raise SystemExit("chromium is not on the PATH; Debian: apt install chromium")
    rows = measured(options.devices, options.seconds, options.tabs.split(","))
    about = {"seconds": options.seconds, "cores": os.cpu_count(), "machine": platform.machine()}
    if options.json:
        print(json.dumps({**about, "load": os.getloadavg(), "rows": rows}))
        return
    print("| tab | frame, ms (median) | 95 % | longest | tasks above 50 ms | main thread | updates/s | server, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['tab']} | {row['frame_ms']:.1f} | {row['p95_ms']:.1f} | {row['longest_ms']:.0f} | "
            f"{row['long_tasks']} | {row['main_thread']:.0%} | {row['updates_a_second']:.1f} | {row['server_ms']:.1f} |"
        )
    print(f"\n{options.devices} devices; {about}; load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
