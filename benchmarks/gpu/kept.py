"""Milliseconds of a step on devices whose state on the GPU is kept for a restart, and is not. Prints a table.

    python benchmarks/gpu/kept.py                          two minutes
    python benchmarks/gpu/kept.py --accelerator emulated --steps 50     without a GPU: tries the script

Each row is two runs of ``hoop train mnist`` on devices of a cluster that were started with ``--arena``, the second run
with ``HOOP_GPU_KEEPER=0``. The time is the median over the second half of the steps; the weights must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

HOOP = [sys.executable, "-m", "hoop"]
END_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="1,2", help="numbers of devices; default: %(default)s")
    parser.add_argument("--steps", type=int, default=4000, help="default: %(default)s")
    parser.add_argument("--accelerator", default="cuda", help="default: %(default)s")
    options = parser.parse_args()
    print("| devices | ms a step, kept | not kept | weights |\n|---|---|---|---|", flush=True)
    for devices in map(int, options.devices.split(",")):
        kept, weights = run(devices, options.steps, options.accelerator, {})
        plain, others = run(devices, options.steps, options.accelerator, {"HOOP_GPU_KEEPER": "0"})
        same = weights if weights == others else f"**{weights} and {others}**"
        print(f"| {devices} | {kept:.3f} | {plain:.3f} | {same} |", flush=True)


def run(devices: int, steps: int, accelerator: str, environment: dict[str, str]) -> tuple[float, str]:
    """Milliseconds of a step, and the beginning of the weights' hash."""
    variables = {**os.environ, **environment}
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory()))

        def start(*words: str) -> str:
            """Start a process of the cluster; returns the first line that it prints."""
            process = cleanup.enter_context(
                subprocess.Popen(
                    [*HOOP, *words], env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            )
            cleanup.callback(process.wait, END_S)
            cleanup.callback(process.terminate)
            assert process.stdout is not None
            return process.stdout.readline().strip()

        address = start("coordinator", "--port", "0").split()[-1]
        for number in range(1, devices + 1):
            start("device", "--join", address, "--id", str(number), "--arena", str(folder / f"arena{number}"))
        words = ["train", "mnist", "--coordinator", address, "--accelerator", accelerator, "--json"]
        for setting in ("evaluate_every=0", "checkpoint_every=0", f"max_steps={steps}"):
            words += ["--set", setting]
        words += ["--out", str(folder / "out")]
        done = subprocess.run([*HOOP, *words], env=variables, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"hoop {' '.join(words)}: {done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    result = json.loads(done.stdout.splitlines()[-1])
    return 1e3 * statistics.median(seconds[len(seconds) // 2 :]), result["weights_sha256"][:12]


if __name__ == "__main__":
    main()
