"""A checkpoint of 1.15 GB: how long a step waits, how long until the file is there, and the memory of the writer.

    python benchmarks/large/checkpoint.py --strategy data --memory 5500MiB
    python benchmarks/large/checkpoint.py --source OTHER/src      the same with another version of Hoop

Trains the MLP of ``jobs.py`` for three epochs of five steps on 2 devices, with a checkpoint after each. Limits, of the
same minute: one copy of the state in memory (a step must wait for it), one SHA-256 of it, and a write of as many
bytes to the same disk, with fsync.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from gpt import peak_private_bytes

JOB = Path(__file__).resolve().parent / "jobs.py"
STATE_BYTES, PIECE = 1_150_000_000, 1 << 28
MOST_S = 600.0


def limits(folder: Path) -> dict[str, float]:
    """Seconds for the whole state: copied, hashed, written."""
    source, target = np.ones(PIECE, np.uint8), np.ones(PIECE, np.uint8)
    found: dict[str, list[float]] = {"one copy in memory": [], "one SHA-256": [], "one write with fsync": []}
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, source)
        found["one copy in memory"].append(time.perf_counter() - began)
        began = time.perf_counter()
        hashlib.sha256(source).digest()
        found["one SHA-256"].append(time.perf_counter() - began)
        began = time.perf_counter()
        with open(folder / "limit", "wb") as file:
            file.write(source.data)
            file.flush()
            os.fsync(file.fileno())
        found["one write with fsync"].append(time.perf_counter() - began)
        (folder / "limit").unlink()
    return {name: statistics.median(values) * STATE_BYTES / PIECE for name, values in found.items()}


def train(options: argparse.Namespace, out: Path) -> int:
    """Run the job; returns the most private memory of all its processes together."""
    command = [sys.executable, "-m", "hoop", "train", f"{JOB}:mlp", "--devices", "2", "--strategy", options.strategy]
    command += ["--memory", options.memory, "--out", str(out), "--keep", "1", "--json"]
    command += ["--set", "epochs=3", "--set", "checkpoint_every=1"]
    environment = {**os.environ, "PYTHONPATH": str(options.source)} if options.source else None
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        done = threading.Thread(target=process.wait)
        done.start()
        most = peak_private_bytes(process, done, MOST_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: code {process.returncode}")
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description="Checkpoints of 1.15 GB.")
    parser.add_argument("--strategy", default="data")
    parser.add_argument("--memory", default="5500MiB", help="of each device")
    parser.add_argument("--source", type=Path, help="the folder src of another version")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        before, out = limits(Path(folder)), Path(folder) / "run"
        most = train(options, out)
        rows = {f"limit: {name}": f"{seconds:.2f} s" for name, seconds in before.items()}
        trace = json.loads((out / "trace.json").read_text())["traceEvents"]
        waits: dict[object, list[float]] = {}
        for one in trace:
            if one["name"] == "snapshot":
                waits.setdefault(one["pid"], []).append(one["dur"] / 1e6)
        longest = [max(at_rank) for at_rank in zip(*waits.values(), strict=True)]
        *during, last = longest
        rows["a step waits (while training goes on)"] = ", ".join(f"{one:.2f}" for one in during) + " s"
        rows["the final snapshot, with its checksum"] = f"{last:.2f} s"
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        written = [one["event"] for one in events if one["kind"] == "checkpoint"]
        rows["the file, in the background"] = ", ".join(f"{one['seconds']:.2f}" for one in written) + " s"
        rows["files written"] = f"{len(written)} of {max(one['bytes'] for one in written) / 1e9:.2f} GB"
        rows["private memory of all processes, at most"] = f"{most / 1e9:.1f} GB"
    print(f"{options.strategy} on 2 devices, load {os.getloadavg()[0]:.1f}\n\n| what | |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
