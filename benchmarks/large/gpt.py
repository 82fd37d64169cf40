"""A GPT of 124 million parameters by data, pipeline and hybrid on 4 devices, and on 1: times, memory, and the weights.

    HOOP_DATA=FOLDER python benchmarks/large/gpt.py            SGD with momentum: 1.0 GB of state
    HOOP_DATA=FOLDER python benchmarks/large/gpt.py --set momentum=0 --memory data=2400MiB

FOLDER has tinyshakespeare.txt. Ends with code 1 if the weights of two runs differ in a bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

JOB = Path(__file__).resolve().parent / "jobs.py"
RUNS = {
    "data, 1 device": ("data", 1, "4100MiB"),
    "data": ("data", 4, "3400MiB"),
    "pipeline": ("pipeline", 4, "1900MiB"),
    "hybrid:replicas=2": ("hybrid:replicas=2", 4, "2400MiB"),
}
"""Strategy, devices, and the arena of each."""
STARTED_S, SAMPLE_S = 900.0, 0.25


def private_bytes(root: int) -> int:
    """Private memory of a process and its descendants: without arenas, which they share."""
    parents, private = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":", 1) for line in lines)
        parents[int(folder.name)] = int(fields["PPid"])
        private[int(folder.name)] = 1024 * int(fields.get("RssAnon", "0").split()[0])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(private.get(pid, 0) for pid in family)


def peak_private_bytes(process: subprocess.Popen[Any], end: threading.Thread, most_s: float) -> int:
    """The most private memory that a process and its descendants have until ``end`` ends.

    After ``most_s`` seconds the process is terminated.
    """
    most, began = 0, time.monotonic()
    while end.is_alive():
        end.join(SAMPLE_S)
        most = max(most, private_bytes(process.pid))
        if time.monotonic() - began > most_s:
            process.terminate()
    return most


def train(strategy: str, devices: int, memory: str, options: argparse.Namespace) -> dict[str, Any]:
    """The result of one run, with the most private memory that its processes had together."""
    command = [sys.executable, "-m", "hoop", "train", f"{JOB}:gpt", "--strategy", strategy, "--devices", str(devices)]
    settings = [f"max_steps={options.steps}", *options.set]
    command += ["--memory", memory, *(text for one in settings for text in ("--set", one))]
    began = time.monotonic()
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True) as process:
        output: list[str] = []
        assert process.stdout is not None
        reader = threading.Thread(target=lambda pipe: output.append(pipe.read()), args=(process.stdout,))
        reader.start()
        most = peak_private_bytes(process, reader, STARTED_S)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: code {process.returncode}")
    return {**json.loads(output[0]), "private": most, "whole_s": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description="A GPT of 124 million parameters on 4 devices.")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of every run")
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--memory", nargs="*", default=[], metavar="RUN=SIZE", help="another arena for a run")
    options = parser.parse_args()
    memory = dict(one.rsplit("=", 1) for one in options.memory)
    hashes = set()
    print("| run | start, s | a step, s | whole command, s | arena of a device, used | private, all | load | weights |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.only:
        strategy, devices, usual = RUNS[name]
        found = train(strategy, devices, memory.get(name, usual), options)
        hashes.add(found["weights_sha256"])
        used = f"{max(found['memory']) / 1e9:.2f} GB"
        row = [
            name,
            f"{found['start_seconds']:.1f}",
            f"{found['step_seconds'] or 0:.1f}",
            f"{found['whole_s']:.0f}",
            used,
        ]
        row += [f"{found['private'] / 1e9:.1f} GB", f"{os.getloadavg()[0]:.1f}", f"`{found['weights_sha256'][:12]}`"]
        print(f"| {' | '.join(row)} |", flush=True)
    if len(hashes) > 1:
        sys.exit("the weights differ")


if __name__ == "__main__":
    main()
