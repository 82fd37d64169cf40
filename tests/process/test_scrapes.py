"""``--metrics`` on real processes: what a scraper reads while a job trains and a device is killed, and who may read."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("prometheus_client", reason="prometheus-client is not installed (hoop[dashboard])")

from background import RESTING
from prometheus_client.parser import text_string_to_metric_families

import hoop
from hoop.job_events import Steps
from hoop.wire.private_files import write_private
from hoop.wire.tokens import Token, new_token

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]
    Run = Callable[..., CompletedProcess[str]]

DRIVER = Path(__file__).with_name("train_driver.py")
WAIT_S = 120.0
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def key(name: str, /, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def scrape(url: str, token: str = "") -> Samples:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=WAIT_S) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def scrape_until(url: str, reached: Callable[[Samples], bool]) -> Samples:
    """Scrapes as Prometheus does, again and again, until a scrape shows it."""
    deadline = time.monotonic() + WAIT_S
    while not reached(found := scrape(url)):
        assert time.monotonic() < deadline, found
        threading.Event().wait(0.05)
    return found


def test_a_job_a_loss_and_a_recovery_are_in_the_metrics(start: Start, run_hoop: Run) -> None:
    coordinator = start("coordinator", "--metrics", "0", "--json")
    served = json.loads(coordinator.line())
    address = served["coordinator"]
    options = ("--join", address, "--memory", "64MiB", "--jobs", DRIVER.parent, "--metrics", "0", "--json")
    devices = [start("device", *options, "--id", number) for number in (1, 2, 3)]
    urls = [json.loads(one.line())["metrics"] for one in devices]
    before = scrape(served["metrics"])
    assert before[key("hoop_devices", state="alive")] == 3
    assert before[key("hoop_device_joins_total")] == 3
    assert before[key("hoop_recovery_seconds_count")] == 0
    detached = run_hoop(
        "train", f"{DRIVER}:slow", *RESTING, "--coordinator", address, "--detach", "--json", within=WAIT_S
    )
    assert detached.returncode == 0, detached.stderr
    job = str(json.loads(detached.stdout)["job_id"])
    with hoop.connect(address) as cluster:
        assert any(isinstance(one.event, Steps) for one in cluster.job(int(job)).events())
    labels = {"job": job, "name": "train_driver:slow"}
    running = scrape_until(served["metrics"], lambda found: key("hoop_job_loss", **labels) in found)
    assert running[key("hoop_jobs", status="running")] == 1
    assert running[key("hoop_job_devices", **labels)] == 3
    assert running[key("hoop_job_steps_total", **labels)] >= 1
    assert running[key("hoop_job_samples_per_second", **labels)] > 0
    assert running[key("hoop_communicator_members", communicator=job)] == 3
    for number, url in enumerate(urls, start=1):
        found = scrape(url)
        assert found[key("hoop_tasks_running")] == 1
        assert found[key("hoop_arena_used_bytes")] > 0
        assert [1 for name, of in found if name == "hoop_device_info" and ("device", str(number)) in of]
    scrape_until(urls[0], lambda found: found[key("hoop_task_steps_total", job=job)] > 0)
    devices[2].kill()
    after = scrape_until(served["metrics"], lambda found: found[key("hoop_recovery_seconds_count")] >= 1)
    assert after[key("hoop_devices", state="dead")] == 1
    assert after[key("hoop_devices", state="alive")] == 2
    assert after[key("hoop_devices_lost_total")] == 1
    assert after[key("hoop_communicator_generation", communicator=job)] == 2
    assert after[key("hoop_recovery_seconds_sum")] > 0
    done = after[key("hoop_job_steps_total", **labels)]
    scrape_until(served["metrics"], lambda found: found[key("hoop_job_steps_total", **labels)] > done)
    assert run_hoop("attach", job, "--coordinator", address, "--stop", "--json", within=WAIT_S).returncode == 0
    ended = scrape_until(served["metrics"], lambda found: found[key("hoop_jobs", status="running")] == 0)
    assert ended[key("hoop_jobs", status="ended")] == 1


def test_dead_scrapers_do_not_stop_a_coordinator(start: Start, run_hoop: Run) -> None:
    coordinator = start("coordinator", "--metrics", "0", "--json")
    served = json.loads(coordinator.line())
    host, _, port = served["metrics"].removeprefix("http://").removesuffix("/metrics").rpartition(":")
    dead = [socket.create_connection((host, int(port)), WAIT_S) for _ in range(10)]
    try:
        assert run_hoop("status", "--coordinator", served["coordinator"], "--json").returncode == 0
        coordinator.process.terminate()
        assert coordinator.wait() == 0
    finally:
        for one in dead:
            one.close()


def test_beyond_loopback_a_scraper_needs_a_viewer_s_token(start: Start, run_hoop: Run, tmp_path: Path) -> None:
    secret, file = new_token(), tmp_path / "token"
    write_private(file, secret)
    coordinator = start("coordinator", "--metrics", "0.0.0.0:0", "--token-file", file, "--json")
    served = json.loads(coordinator.line())
    options = ("--memory", "8MiB", "--metrics", "0.0.0.0:0", "--token-file", file, "--json")
    device = start("device", "--join", served["coordinator"], *options)
    viewer = Token.parse(secret).role_token("viewer")
    for url in (served["metrics"], json.loads(device.line())["metrics"]):
        here = url.replace("0.0.0.0", "127.0.0.1")
        for wrong in ("", "x", secret, Token.parse(new_token()).role_token("viewer")):
            with pytest.raises(urllib.error.HTTPError) as refused:
                scrape(here, wrong)
            assert refused.value.code == 401
            refused.value.close()
        assert [1 for name, _ in scrape(here, viewer) if name == "hoop_build_info"]
    refused_start = run_hoop("device", "--join", served["coordinator"], "--metrics", "nonsense:")
    assert refused_start.returncode == 2
    assert "--metrics: 'nonsense:' is neither a port" in refused_start.stderr


def test_up_serves_the_coordinator_and_every_device(start: Start) -> None:
    up = start("up", "--devices", "2", "--memory", "8MiB", "--metrics", "0")
    assert up.first_line.startswith("coordinator ")
    deadline = time.monotonic() + WAIT_S
    while len(lines := [line for line in up.errors.splitlines() if "metrics at http://127.0.0.1:" in line]) < 3:
        assert time.monotonic() < deadline, up.errors  # a device prints its address after it has joined
        threading.Event().wait(0.05)
    names = [{name for name, _ in scrape(line.split()[-1])} for line in lines]
    assert sorted(("hoop_devices" in one, "hoop_tasks_running" in one) for one in names) == [
        (False, True),
        (False, True),
        (True, False),
    ]
