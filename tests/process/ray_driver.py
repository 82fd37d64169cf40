"""Trains on a Ray cluster; the model is slow while a file does not exist, so that a test has time to disturb it.

Run by ``test_ray.py``: ``ray_driver.py ADDRESS DEVICES LEAST MOST OUT``. Prints every event as a line of JSON, but for
the steps after the first; the last line is the result, with the hash of the same training on devices of this process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hoop

HURRY = "HOOP_TEST_HURRY"
"""Environment variable: the path of the file."""
PACE_S = 1.0
"""A step of one device takes four times as long, and there are 60 steps."""
DATA = torch.Generator().manual_seed(5)
INPUTS = torch.randn(203, 6, generator=DATA)
TARGETS = (INPUTS @ torch.randn(6, 3, generator=DATA)).argmax(1)
SETTINGS: dict[str, Any] = {
    "epochs": 1_000,
    "batch_size": 8,
    "shards": 4,
    "max_steps": 60,
    "evaluate_every": 0,
    "memory": "16MiB",
    "timeout_s": 300,
}


class Paced(nn.Module):
    """A small network. It is of ``__main__``, so that no node could import it: Ray must bring its code."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not os.path.exists(os.environ[HURRY]):
            time.sleep(PACE_S)
        outputs: torch.Tensor = self.layers(values)
        return outputs


def main() -> None:
    address, devices, least, most, out = sys.argv[1:]
    hurry = Path(os.environ[HURRY])
    hurry.touch()
    alone = hoop.train(Paced(), (INPUTS, TARGETS), devices=2, **SETTINGS)
    hurry.unlink()
    began = False

    def note(event: dict[str, Any]) -> None:
        nonlocal began
        if not began or event["kind"] != "steps":
            print(json.dumps(event), flush=True)
        began = began or event["kind"] == "steps"

    where = hoop.Ray(
        devices=int(devices),
        elastic=(int(least), int(most)),
        placement="spread",
        address=address,
        runtime_env={"env_vars": {HURRY: str(hurry)}},
    )
    trained = hoop.train(Paced(), (INPUTS, TARGETS), on=where, progress=note, out=out, **SETTINGS)
    report = {name: trained.summary[name] for name in ("weights_sha256", "steps", "device_ids")}
    print(json.dumps({"kind": "trained", "alone": alone.summary["weights_sha256"], **report}), flush=True)


if __name__ == "__main__":
    main()
