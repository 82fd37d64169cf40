"""``hoop demo``: buttons signal its own devices, the weights are those of an undisturbed run, Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import preloaded
import pytest

pytest.importorskip("bokeh", reason="the demo needs bokeh: pip install 'hoop[dashboard]'")

from hoop.client.cluster import connect
from hoop.dashboard.actions import Action
from hoop.errors import FailedPrecondition
from hoop.lab.chaos.processes import ClusterProcesses
from hoop.lab.demo import MAX_DEVICES, DemoActor, idle_reason

if TYPE_CHECKING:
    from background import Running

    Start = Callable[..., Running]

WITHIN_S = 240.0
"""A machine that is busy with other tests starts and joins a device within this time."""
DEMO = ("--no-browser", "--port", 0, "--json", "--once")


def wait_stopped(pid: int, stopped: bool) -> None:
    """Waits until a process is stopped (T in /proc), or is not."""
    deadline, pause = time.monotonic() + WITHIN_S, threading.Event()
    while (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T") != stopped:
        assert time.monotonic() < deadline, f"process {pid} is {'not ' if stopped else ''}stopped"
        pause.wait(0.01)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of Hoop that this process starts are forked with their imports."""
    monkeypatch.setattr(subprocess, "Popen", preloaded.Popen)


@pytest.mark.usefixtures("forked")
def test_the_buttons_signal_the_demos_own_devices(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 2, 4 << 20) as processes, connect(processes.address) as cluster:
        cluster.wait_for_devices(2, WITHIN_S)
        actor = DemoActor(processes)
        pids = {one.device.device_id: one.device.pid for one in cluster.status().devices}
        first, second = sorted(pids)
        actor.act(Action.STOP, first)
        wait_stopped(pids[first], True)
        for action in (Action.KILL, Action.STOP, Action.LEAVE):
            with pytest.raises(FailedPrecondition, match="last device"):
                actor.act(action, second)
        with pytest.raises(FailedPrecondition, match="continue it first"):
            actor.act(Action.SLOW, first)
        actor.act(Action.CONTINUE, first)
        wait_stopped(pids[first], False)
        actor.act(Action.SLOW, first)
        actor.act(Action.ADD, 0)
        cluster.wait_for_devices(3, WITHIN_S)
        leaving, killed = (next(one for one in processes.devices if one.pid == pids[key]) for key in (first, second))
        actor.act(Action.LEAVE, first)
        assert leaving.wait(WITHIN_S) == 0, "also a device that was slow leaves in order"
        actor.act(Action.KILL, second)
        assert killed.wait(WITHIN_S) == -signal.SIGKILL
        with pytest.raises(FailedPrecondition, match="no process any more"):
            actor.act(Action.KILL, second)
        with pytest.raises(FailedPrecondition, match="has ended"):
            actor.act(Action.FINISH, 0)
        actor.close()
        with pytest.raises(FailedPrecondition, match="the demo ends"):
            actor.act(Action.ADD, 0)


@pytest.mark.usefixtures("forked")
def test_a_pid_that_the_coordinator_tells_is_not_signalled_unless_it_is_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: signalled.append(pid))
    with ClusterProcesses(tmp_path, 1, 4 << 20) as processes, connect(processes.address) as cluster:
        cluster.wait_for_devices(1, WITHIN_S)
        (device,) = cluster.status().devices
        actor = DemoActor(processes)
        processes.devices, devices = [], processes.devices  # as if another process had joined as this device
        with pytest.raises(FailedPrecondition, match="no process any more"):
            actor.act(Action.STOP, device.device.device_id)
        assert signalled == []
        processes.devices = devices * MAX_DEVICES
        with pytest.raises(FailedPrecondition, match="run already"):
            actor.act(Action.ADD, 0)
        processes.devices = devices


@pytest.mark.slow
def test_an_undisturbed_demo_ends_with_equal_hashes(start: Start) -> None:
    demo = start("demo", *DEMO, "--devices", 2, "--steps", 12, "--pace", 1)
    assert json.loads(demo.first_line)["dashboard"].startswith("http://127.0.0.1:")
    verdict = json.loads(demo.line(WITHIN_S))
    assert verdict["equal"]
    assert verdict["weights"] == verdict["undisturbed"]
    assert re.fullmatch(r"[0-9a-f]{64}", verdict["weights"])
    assert verdict["steps"] == 12
    assert demo.wait(WITHIN_S) == 0


def test_ctrl_c_ends_all_processes_of_the_demo(start: Start, wait_for_exit: Callable[..., None]) -> None:
    demo = start("demo", *DEMO, "--devices", 2, "--steps", 100_000)
    url = json.loads(demo.first_line)["dashboard"]
    children = [int(one) for one in Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()]
    assert len(children) >= 4, "a coordinator, two devices and the client"
    os.kill(children[-1], signal.SIGSTOP)  # one that is stopped goes too
    os.kill(demo.pid, signal.SIGINT)
    assert demo.wait(WITHIN_S) == 130
    for pid in children:
        wait_for_exit(pid)
    assert url


# ---- in a browser


def test_the_demos_buttons_work_in_a_browser(browser: Any, start: Start, tmp_path: Path) -> None:
    demo = start("demo", *DEMO, "--devices", 3, "--steps", 100_000)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(1e3 * WITHIN_S)
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(json.loads(demo.first_line)["dashboard"])
    page.get_by_text("3 devices on 1 host: 3 training.").wait_for()

    def press(button: str, device: int, said: str) -> None:
        if device:
            page.get_by_label("Device", exact=True).select_option(label=f"device {device}")
        page.get_by_role("button", name=button, exact=True).click()
        page.get_by_text(said).wait_for()

    press("Kill", 1, "device 1 was killed")
    page.get_by_text("1 dead").wait_for()
    press("Add a device", 0, "a device starts")
    page.get_by_text("3 training").wait_for()
    press("Stop", 2, "device 2 was stopped")
    press("Continue", 0, "device 2 continues")
    page.get_by_text("3 training").wait_for()
    press("Slow", 3, "device 3 runs at a quarter")
    press("Leave", 3, "device 3 was asked to leave")
    page.get_by_text("2 training").wait_for()
    folder = Path(os.environ.get("HOOP_SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / "demo.png", full_page=True)
    press("Finish the job", 0, "the job stops after this step")
    page.get_by_text("They are the same, to the bit.").wait_for()
    verdict = json.loads(demo.line(WITHIN_S))
    assert verdict["equal"]
    assert verdict["steps"] > 0
    assert demo.wait(WITHIN_S) == 0
    assert [one for one in problems if "WebSocket" not in one] == [], "the server has ended: its socket may say so"


def test_without_bokeh_the_demo_names_the_remedy(run_hoop: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bokeh.py").write_text("raise ModuleNotFoundError(\"No module named 'bokeh'\", name='bokeh')\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done: subprocess.CompletedProcess[str] = run_hoop("demo", "--no-browser", environment={"PYTHONPATH": path})
    assert done.returncode == 2
    assert "pip install 'hoop[dashboard]'" in done.stderr


@pytest.mark.parametrize(("devices", "cores", "sentences"), [(6, 2, 1), (2, 1, 1), (2, 2, 0), (4, 16, 0)])
def test_the_page_says_why_devices_idle(devices: int, cores: int, sentences: int) -> None:
    found = idle_reason(devices, cores)
    assert len(found) == sentences
    assert all(f"{cores} core" in sentence and "they only update their weights" in sentence for sentence in found)
