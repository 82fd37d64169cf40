"""What a training process imports: modules that take seconds and that Hoop does not need stay out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
from torch import nn
from hoop.engine.stage.accelerator import use_deterministic_algorithms
from hoop.engine.stage.autograd import AutogradStage
from hoop.engine.trainer import Trainer

use_deterministic_algorithms()
blocks = [nn.Linear(3, 2), nn.Tanh()]
parameters = list(blocks[0].parameters())
stage = AutogradStage([(blocks, len(parameters))], 0, parameters)
outputs = stage.forward(0, torch.ones(4, 3), 0)
into = [torch.zeros_like(one) for one in parameters]
stage.backward(0, torch.ones_like(outputs), into, False)
assert into[1].abs().sum() > 0
assert torch.are_deterministic_algorithms_enabled()
print(*sorted(set(sys.modules) & {"sympy", "torch._dynamo", "torch._inductor.config"}))
"""


def test_a_step_imports_neither_sympy_nor_the_compiler() -> None:
    """``torch.autograd.grad`` and ``torch.use_deterministic_algorithms`` would: 1 to 6 s of every start."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


DASHBOARD_PROGRAM = """
import sys
import hoop.cli.dashboard
from hoop.dashboard.server import DashboardServer
from hoop.engine.settings import Settings
from hoop.runs.prediction import predicted_step_seconds
from hoop.simulate.simulation import simulate

print("torch" in sys.modules)
"""


def test_the_dashboard_predicts_without_pytorch() -> None:
    """It starts beside the devices of a run, and importing PyTorch would take a second of their cores."""
    pytest.importorskip("bokeh", reason="the dashboard is an extra: pip install 'hoop[dashboard]'")
    program = [sys.executable, "-c", DASHBOARD_PROGRAM]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


AUDIT_PROGRAM = """
import sys
from hoop.cli.main import main

try:
    main()
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def test_an_audit_with_checkpoints_needs_no_pytorch(tmp_path: Path) -> None:
    """It takes a few tenths of a second, and importing PyTorch took 3 to 6 s."""
    out = tmp_path / "run"
    train = [sys.executable, "-m", "hoop", "train", "mnist", "-n", "1", "--set", "max_steps=3", "--out", str(out)]
    subprocess.run([*train, "--set", "batch_size=20000"], capture_output=True, text=True, timeout=500, check=True)
    command = [sys.executable, "-c", AUDIT_PROGRAM, "audit", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "False\n"), done.stdout
    found = json.loads(done.stdout)
    assert (found["holds"], found["steps"]) == (True, 3)
    assert found["checkpoints"]


LOCAL_PROGRAM = """
import asyncio
import sys
import hoop
from hoop.servers.coordinator import CoordinatorConfig
from hoop.servers.coordinator_service import CoordinatorServer
from hoop.servers.device import DeviceConfig, DeviceServer
from hoop.wire.auth import Credentials
from hoop.wire.roles import Role

async def run():
    coordinator = CoordinatorServer(CoordinatorConfig(credentials=Credentials(Role.COORDINATOR, local=True)))
    address = await coordinator.start()
    device = DeviceServer(DeviceConfig(address, memory=1 << 20, credentials=Credentials(Role.DEVICE, local=True)))
    await device.start()
    await asyncio.to_thread(lambda: hoop.connect(address).close())
    await device.stop()
    await coordinator.stop()

asyncio.run(run())
print("cryptography" in sys.modules)
"""


def test_a_cluster_of_one_machine_does_not_load_the_library_of_certificates() -> None:
    """It takes 60 ms, and the sockets need no certificates."""
    program = [sys.executable, "-c", LOCAL_PROGRAM]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
