"""From the command to the first finished step, and the time of a step: each launcher that is installed.

    scripts/mpi-wheels                                   # once, for mpirun
    scripts/slurm-cluster up                             # once, for srun, as root on Debian
    python benchmarks/clusters/start.py --turns 3

``hoop train mnist`` with two devices and 200 steps of the MLP, by local, torchrun, mpirun, srun and Ray in turns. The
clock runs from the start of the command until ``metrics.jsonl`` in ``--out`` has its first row, which is written about
four times a second. Ray's cluster, a head and two nodes on this machine, is up before; ``ray, new`` starts one within
the command.

    python benchmarks/clusters/start.py --programs --turns 5

Instead: a program that calls ``hoop.train`` twice, on two devices for ten steps, with an optimizer by name (the flat
path) and with a function that makes one. The clock runs from each call to its return. With ``PYTHONPATH`` the program
uses another checkout of Hoop.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "recovery"))

from tally import until

DEVICES, TURN_S = 2, 900.0
HOOP = [sys.executable, "-m", "hoop", "train"]
MPI = Path(os.environ.get("HOOP_MPI", "/tmp/hoop-mpi"))  # noqa: S108 - where scripts/mpi-wheels installs it
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def commands(ray_address: str, steps: int) -> dict[str, list[str]]:
    """By name of the launcher. One that is not installed has none."""
    count = str(DEVICES)
    train = ["mnist", "--epochs", "1", "--set", f"max_steps={steps}", "--set", "evaluate_every=0", "--memory", "64MiB"]
    torchrun = str(Path(sysconfig.get_path("scripts")) / "torchrun")
    found = {
        "local": [*HOOP, *train, "--on", "local", "-n", count],
        "torchrun": [torchrun, "--nproc-per-node", count, "-m", "hoop", "train", *train],
    }
    for name in ("openmpi", "mpich"):
        program = MPI / name / "bin" / "mpirun"
        options = ["--allow-run-as-root", "--oversubscribe"] if name == "openmpi" else []
        if program.exists():
            found[f"mpirun ({name})"] = [str(program), *options, "-n", count, *HOOP, *train]
    if shutil.which("srun") and subprocess.run(["sinfo"], capture_output=True, check=False).returncode == 0:
        found["srun"] = ["srun", "--ntasks", count, "--kill-on-bad-exit=1", *HOOP, *train]
    if ray_address:
        found["ray"] = [*HOOP, *train, "--on", "ray", "-n", count, "--ray-address", ray_address]
        found["ray, new"] = [*HOOP, *train, "--on", "ray", "-n", count, "--ray-address", "local"]
    return found


@contextmanager
def ray_nodes(wanted: bool) -> Iterator[str]:
    """The address of a Ray cluster on this machine; empty if Ray is not installed, or not wanted."""
    if not wanted:
        yield ""
        return
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        yield ""
        return
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(DEVICES):
            cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


def measure(command: list[str], steps: int) -> dict[str, Any]:
    """One training: seconds to the first step, seconds a step, and the hash of the weights."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        began = time.monotonic()
        process = subprocess.Popen(
            [*command, "--out", str(out)],
            env=ENV,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            rows = out / "metrics.jsonl"

            def stepped() -> bool | None:
                assert process.poll() in (None, 0), process.communicate()[1][-2000:]
                return (rows.exists() and rows.stat().st_size > 0) or None

            until(stepped, TURN_S, "the first step")
            first = time.monotonic() - began
            _, errors = process.communicate(timeout=TURN_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        assert process.returncode == 0, errors[-2000:]
        result = json.loads((out / "result.json").read_text())
    return {"first": first, "step": result["seconds"] / steps, "weights": result["weights_sha256"]}


PROGRAM = """
import functools, json, sys, time
import torch
from torch import nn
import hoop

rows = torch.Generator().manual_seed(1)
data = torch.randn(960, 20, generator=rows), torch.randint(0, 5, (960,), generator=rows)
own = {"optimizer": functools.partial(torch.optim.AdamW, lr=1e-3)} if sys.argv[1] == "own" else {}
walls, weights = [], set()
for _ in range(int(sys.argv[2])):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    began = time.monotonic()
    weights.add(hoop.train(model, data, devices=2, epochs=1, batch_size=96, shards=4, **own).weights_sha256)
    walls.append(time.monotonic() - began)
time.sleep(2)  # the processor time of processes counts when they have been waited for
print(json.dumps({"walls": walls, "weights": sorted(weights)}))
"""


def measure_program(kind: str, trainings: int) -> dict[str, Any]:
    """One program: seconds of each call, and the processor time of the program and of all that it has started."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, str(trainings)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TURN_S,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def measure_programs(turns: int) -> None:
    """Prints the table of programs that call ``hoop.train``."""
    print("| optimizer | first call, s (median) | least to most | second call, s (median) | least to most |", end=" ")
    print("processor time: no call, s | first call | second call |")
    print("|---" * 8 + "|")
    for kind, name in (("named", "by name"), ("own", "a function")):
        measured: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
        for turn in range(turns):
            for trainings, programs in measured.items():
                programs.append(measure_program(kind, trainings))
                print(f"{name}, turn {turn + 1}: {programs[-1]}", file=sys.stderr, flush=True)
        none, first, both = (
            statistics.median(program["processor"] for program in measured[count]) for count in (0, 1, 2)
        )
        calls = [sorted(program["walls"][call] for program in measured[2]) for call in (0, 1)]
        walls = " | ".join(f"{statistics.median(call):.1f} | {call[0]:.1f} to {call[-1]:.1f}" for call in calls)
        print(f"| {name} | {walls} | {none:.1f} | {first - none:.1f} | {both - first:.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="of each launcher")
    parser.add_argument("--steps", type=int, default=200, help="of a training")
    parser.add_argument("--launchers", help="some of them, with semicolons; otherwise all that are installed")
    parser.add_argument("--programs", action="store_true", help="programs that call hoop.train twice, and no launcher")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.programs:
        measure_programs(options.turns)
        return
    wanted = options.launchers.split(";") if options.launchers else None
    with ray_nodes(wanted is None or "ray" in wanted) as address:
        known = commands(address, options.steps)
        names = wanted or list(known)
        if missing := [name for name in names if name not in known]:
            parser.error(f"--launchers: {', '.join(missing)} is not installed or unknown; there is {'; '.join(known)}")
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for turn in range(options.turns):
            for name in names:
                found[name].append(measure(known[name], options.steps))
                print(f"{name}, turn {turn + 1}: {found[name][-1]}", file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"machine": platform.platform(), "load": os.getloadavg()[0], "turns": found}))
        return
    hashes = {one["weights"] for turns in found.values() for one in turns}
    print("| | command to first step, s (median) | least to most | a step, ms (median) |")
    print("|---" * 4 + "|")
    for name, turns in found.items():
        first, step = sorted(one["first"] for one in turns), statistics.median(one["step"] for one in turns)
        print(f"| {name} | {statistics.median(first):.1f} | {first[0]:.1f} to {first[-1]:.1f} | {1e3 * step:.1f} |")
    print(f"\nThe weights are {'the same' if len(hashes) == 1 else 'NOT the same'} in all {len(found)} rows.")


if __name__ == "__main__":
    main()
