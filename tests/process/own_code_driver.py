"""Trains an example of ``examples/own_code`` on several devices, in one process; prints a JSON line for each run.

own_code_driver.py EXAMPLE '[[1, ""], [2, "kill@rank=1,step=4"]]'
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "own_code"


def main(example: str, runs: str) -> None:
    spec = importlib.util.spec_from_file_location(example, EXAMPLES / f"{example}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for devices, faults in json.loads(runs):
        result = module.train(devices, accelerator="cpu", faults=faults, memory="32MiB")
        print(
            json.dumps(
                {
                    "devices": devices,
                    "faults": result.summary["faults"],
                    "weights": result.weights_sha256,
                    "loss": result.loss,
                    "metrics": dict(result.metrics),
                }
            ),
            flush=True,
        )


main(*sys.argv[1:])
