"""Own batches, losses, optimizers and workers on 1, 2 and 3 devices, of which one is killed: the same weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest

DRIVER = Path(__file__).with_name("own_code_driver.py")
RUNS = [
    [1, ""],
    [2, "kill@rank=1,step=4"],
    [3, "kill@rank=0,step=3,instruction=reduce; kill@rank=2,step=5,instruction=update"],
]


def trained(example: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(DRIVER), example, json.dumps(RUNS)]
    done = preloaded.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("example", ["language_model", "augmented_images"])
def test_the_weights_are_the_same_on_any_number_of_devices_and_after_a_kill(example: str) -> None:
    found = trained(example)
    assert [len(one["faults"]) for one in found] == [0, 1, 2], "every fault has struck"
    assert len({one["weights"] for one in found}) == 1
    assert len({(one["loss"], *one["metrics"].values()) for one in found}) == 1
