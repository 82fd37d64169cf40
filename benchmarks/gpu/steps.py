"""Milliseconds of a training step on a GPU: Hoop on 1, 2 and 4 devices, beside PyTorch alone. Prints a table.

    python benchmarks/gpu/steps.py                    all cases, some minutes on an H200
    python benchmarks/gpu/steps.py --only mnist       those whose name contains this
    python benchmarks/gpu/steps.py --accelerator emulated --steps 20 --only mnist     without a GPU: tries the script

Each case is a run of ``hoop train``; its time is the median over the second half of its steps. Runs of one job with
another number of devices, or another strategy, must end with the same weights: the last column shows the beginning of
their hash.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TF32, HALF = "tf32=true", "precision=bfloat16,channels_last=true"
PARTITIONED = [
    ("pipeline:1f1b", 2),
    ("pipeline:1f1b", 4),
    ("hybrid:replicas=2", 4),
    ("ps:bsp", 3),
    ("ring", 2),
]
"""Strategies that partition the state, and devices."""
CASES = [
    *((f"mnist, {count} device{'s' * (count > 1)}", "mnist", count, "", 2000) for count in (1, 2, 4)),
    *((f"mobilenet TF32, {count}", "mobilenet", count, TF32, 128) for count in (1, 2, 4)),
    *((f"mobilenet bfloat16, {count}", "mobilenet", count, HALF, 128) for count in (1, 2, 4)),
    *((f"gpt, {count}", "gpt", count, "", 360) for count in (1, 2, 4)),
    *((f"gpt {strategy}, {count}", "gpt", count, f"strategy={strategy}", 120) for strategy, count in PARTITIONED),
    *(
        (f"mobilenet TF32 {strategy}, {count}", "mobilenet", count, f"{TF32},strategy={strategy}", 64)
        for strategy, count in PARTITIONED
    ),
]


def run(job: str, devices: int, settings: str, steps: int, accelerator: str) -> tuple[float, str]:
    """Milliseconds of a step, and the hash of the weights."""
    name = job if job == "mnist" else f"{HERE / 'jobs.py'}:{job}"
    words = ["train", name, "--devices", str(devices), "--accelerator", accelerator, "--memory", "1GiB", "--json"]
    for setting in ["evaluate_every=0", "checkpoint_every=0", f"max_steps={steps}", *filter(None, settings.split(","))]:
        words += ["--set", setting]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--out", folder]
        done = subprocess.run([sys.executable, "-m", "hoop", *words], capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise SystemExit(f"hoop {' '.join(words)}: {done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    result = json.loads(done.stdout.splitlines()[-1])
    return 1e3 * statistics.median(seconds[len(seconds) // 2 :]), result["weights_sha256"][:12]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--accelerator", default="cuda")
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of each run; default: as many as a second or two takes"
    )
    options = parser.parse_args()
    print("| case | ms a step | weights |\n|---|---|---|", flush=True)
    for name, job, devices, settings, steps in CASES:
        if options.only in name:
            ms, weights = run(job, devices, settings, options.steps or steps, options.accelerator)
            print(f"| Hoop, {name} | {ms:.3f} | {weights} |", flush=True)
    if options.accelerator == "cuda":
        done = subprocess.run([sys.executable, str(HERE / "pytorch.py")], capture_output=True, text=True, timeout=600)
        for line in done.stdout.splitlines():
            row = json.loads(line)
            kind = "one CUDA graph" if row["graph"] else "eager"
            precision = "TF32" if row["tf32"] else "bfloat16, channels last" if row["bfloat16"] else "float32"
            print(f"| PyTorch alone, {row['model']}, {precision}, {kind} | {row['ms']:.3f} | |", flush=True)


if __name__ == "__main__":
    main()
