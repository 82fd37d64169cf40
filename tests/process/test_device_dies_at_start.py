"""A device that dies while it starts ends ``hoop train`` with that error; the run once waited 60 s for the others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOB = """
import os, signal, threading
import torch
from torch import nn
import hoop

x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
y = (x.sum(1) > 0).long()
settings = {"epochs": 1, "batch_size": 32, "shards": 4}
job = hoop.Job(lambda seed: nn.Linear(6, 2), lambda: (x, y), settings=settings)

def break_start(work):
    from hoop.servers.device import DeviceServer
    start = DeviceServer.start

    async def broken(self):
        await work(self, start)

    DeviceServer.start = broken

async def raises(server, start):
    raise AttributeError("on purpose")

async def dies_if_first(server, start):
    await start(server)
    if server.config.device_id == 1:
        os._exit(9)
    threading.Event().wait()  # the other one never joins

async def raises_if_second(server, start):
    if server.config.device_id == 2:
        open("second", "w").close()
        raise AttributeError("on purpose")
    while not os.path.exists("second"):  # this one may be the first: then the job would be over
        threading.Event().wait(0.01)
    await start(server)

# With a thread the process cannot be forked: each device executes this file by itself.
threading.Thread(target=threading.Event().wait, daemon=True).start()
if os.environ.setdefault("COMMAND_PID", str(os.getpid())) != str(os.getpid()):
    WHAT
"""
DIES = {
    "raise AttributeError('on purpose')": (2, "your code failed", "AttributeError: on purpose"),
    "os._exit(7)": (3, " ended while the devices started: exit code 7"),
    "os.kill(os.getpid(), signal.SIGKILL)": (3, " ended while the devices started: killed by SIGKILL"),
    "break_start(dies_if_first)": (3, "device 1 ended while the devices started: exit code 9"),
    "break_start(raises)": (1, " cannot start: a bug in Hoop: AttributeError: on purpose", "Traceback"),
}


@pytest.mark.parametrize("what", DIES)
def test_the_run_ends_with_the_error_of_the_device(what: str, tmp_path: Path) -> None:
    (tmp_path / "my_job.py").write_text(JOB.replace("WHAT", what))
    command = [sys.executable, "-m", "hoop", "train", "my_job.py:job", "-n", "2"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("HOOP_")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    code, *sentences = DIES[what]
    assert done.returncode == code, done.stderr
    assert "not all there" not in done.stderr
    for sentence in sentences:
        assert str(sentence) in done.stderr


def test_a_spare_device_that_cannot_start_is_reported_and_missed_by_nobody(tmp_path: Path) -> None:
    (tmp_path / "my_job.py").write_text(JOB.replace("WHAT", "break_start(raises_if_second)"))
    command = [sys.executable, "-m", "hoop", "train", "my_job.py:job", "-n", "1:2"]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("HOOP_")}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    shown = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 0, shown
    assert "device 2 cannot start" in shown
    assert "the job goes on without it" in shown
