"""``hoop.train(on=hoop.Ray(…))`` and ``hoop train --on ray`` on real Ray clusters of several nodes on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed; pip install 'hoop[ray]'", allow_module_level=True)

FOLDER = Path(__file__).parent
TIMEOUT_S = 550.0
ENVIRONMENT = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}


def run(command: list[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own, which is killed if it does not end in time."""
    with subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(stdin, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, errors = process.communicate()
            pytest.fail(f"not within {TIMEOUT_S:g} s: {errors[-3000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def scenario(nodes: int, devices: int, script: list[str], elastic: tuple[int, int] | None = None) -> dict[str, Any]:
    asked = {"nodes": nodes, "devices": devices, "script": script, "elastic": elastic}
    done = run([sys.executable, str(FOLDER / "ray_driver.py")], json.dumps(asked))
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert not found["script_left"], found
    return found


def test_a_node_is_lost_and_one_is_added() -> None:
    """The job goes on without the lost node's device; Ray starts it again on the new node, and the job takes it in."""
    script = ["steps", "remove_node", "recovered", "add_node", "resized", "hurry"]
    found = scenario(nodes=2, devices=2, script=script)
    assert "lost" in found["seen"]
    assert found["steps"] == 300
    assert found["ray"] == found["alone"]
    assert {"metrics.jsonl", "result.json", "checkpoints"} <= set(found["files"])
