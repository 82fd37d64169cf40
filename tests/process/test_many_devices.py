"""64 devices train one job on this machine."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import preloaded
import pytest

TIMEOUT_S = 500.0
DEVICES, STEPS = 64, 6


def train(devices: int, *options: object) -> dict[str, Any]:
    """The result of a short run with a shard for each of 64 devices."""
    run = ["--devices", devices, "--shards", DEVICES, "--memory", "32MiB", "--set", f"max_steps={STEPS}", *options]
    done = preloaded.run(
        [*preloaded.HOOP, "train", "mnist", *map(str, run), "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_64_devices_train_the_weights_of_one_and_one_of_them_may_be_killed() -> None:
    alone = train(1)
    together = train(DEVICES, "--fault", "kill@rank=40,step=3")
    assert together["devices"] == DEVICES
    assert len(together["device_ids"]) == DEVICES - 1
    assert together["faults"] == ["kill@rank=40,step=3"]
    assert together["steps"] == STEPS
    assert together["weights_sha256"] == alone["weights_sha256"]
