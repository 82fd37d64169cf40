"""A rank is killed (SIGKILL) in the middle of a training: how long until the next step is finished, and what was lost.

    python benchmarks/recovery/recovery.py --turns 3

Hoop, data parallel on devices of this machine, beside ``torchrun`` elastic with DDP over Gloo: the same MLP
784-128-64-10, global batch 256, SGD, every process with one core, in turns. torchrun restarts every rank, which goes on
from its last checkpoint, written after every ``--every`` steps; Hoop's survivors finish the step they are in.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BATCH = 256
PATIENCE_S = 120.0
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def rank_main(folder: Path, every: int) -> None:
    """One rank under torchrun; tells each step that it has finished, with the time, in a file of its process."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    layers = [nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    images, labels = torch.rand(BATCH, 784), torch.randint(0, 10, (BATCH,))
    own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    checkpoint, done = folder / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["done"]
    with open(folder / f"steps-{os.getpid()}", "a", buffering=1) as told:
        while True:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[own]), labels[own]).backward()
            optimizer.step()
            done += 1
            told.write(f"{rank} {done} {time.time()}\n")
            if rank == 0 and done % every == 0:
                fresh = checkpoint.with_suffix(".new")
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": done}
                torch.save(state, fresh)
                fresh.replace(checkpoint)


def steps_in(folder: Path) -> dict[int, list[tuple[int, int, float]]]:
    """What each process has told: (rank, step, time)."""
    found = {}
    for path in folder.glob("steps-*"):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[int(path.name[6:])] = [
            (int(r), int(s), float(t)) for r, s, t in (x for x in lines if len(x) == 3)
        ]
    return found


def until(happened: Any, what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := happened()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(0.005)
    return found


@contextmanager
def running(*command: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, env=ENV, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def torchrun(ranks: int, every: int) -> dict[str, float]:
    """Kills the highest rank after some steps; the first step of the next generation ends the wait."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={ranks}"]
        with socket.create_server(("127.0.0.1", 0)) as probe:  # --standalone does not survive a restart
            port = probe.getsockname()[1]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--max-restarts=3"]
        command += [__file__, "--rank", scratch, "--every", str(every)]
        with running(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            until(
                lambda: sum(len(told) > 1.5 * every for told in steps_in(folder).values()) == ranks,
                "first steps",
            )
            before = steps_in(folder)
            victim = next(pid for pid, told in before.items() if told[-1][0] == ranks - 1)
            killed = time.time()
            os.kill(victim, signal.SIGKILL)

            def again() -> list[tuple[int, int, float]]:
                after = {pid: told for pid, told in steps_in(folder).items() if pid not in before}
                return [told[0] for told in after.values() if told] if len(after) >= ranks else []

            first = until(lambda: len(again()) == ranks and again(), "a step after the restart")
            last = max(told[-1][1] for pid, told in steps_in(folder).items() if pid in before)
        next_step = max(moment for _, _, moment in first)
        return {"seconds": next_step - killed, "repeated": max(0, last - (first[0][1] - 1))}


def hoop(ranks: int, _: int) -> dict[str, float]:
    """Kills a device; ``recovered`` is told when the step under way is finished by the others."""
    with tempfile.TemporaryDirectory() as scratch:
        address = Path(scratch) / "address"
        up = [sys.executable, "-m", "hoop", "up", "--devices", str(ranks), "--address-file", str(address)]
        with running(*up, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as cluster:
            assert cluster.stdout is not None
            cluster.stdout.readline()
            return _hoop(address.read_text().strip(), ranks)


def _hoop(address: str, ranks: int) -> dict[str, float]:
    from hoop.client.cluster import connect

    train = [sys.executable, "-m", "hoop", "train", "mnist", "--batch-size", str(BATCH), "--optimizer", "sgd"]
    train += ["--epochs", "1000", "--set", "evaluate_every=0", "--coordinator", address, "--json"]
    with (
        connect(address) as cluster,
        running(*train, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL),
    ):
        started = (event for event in cluster.events(follow=True) if event.kind == "job_started")
        job = cluster.job(int(next(started).fields["job"]))
        pids = {one.device.device_id: one.device.pid for one in cluster.status().devices}
        killed = last = 0.0
        for event in job.events():
            if event.kind == "steps":
                last = event.told["first"] + len(event.told["loss"])
                if not killed and last > 100:
                    killed = time.time()
                    os.kill(pids[max(pids)], signal.SIGKILL)
            if event.kind == "recovered":
                # The step is finished when this is told; had one been begun anew, its number would show.
                return {"seconds": event.time - killed, "repeated": max(0.0, last - event.told["step"])}
    raise RuntimeError(f"hoop did not recover on {ranks} devices")


CONTENDERS = {"hoop": hoop, "torchrun": torchrun}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="of each contender")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=100, help="steps between torchrun's checkpoints")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, given.every)
        return
    names = given.contenders.split(",")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(given.turns):
        for name in names:
            try:
                found[name].append(CONTENDERS[name](given.ranks, given.every))
            except TimeoutError as error:  # which is a result as well
                print(f"turn {turn + 1}, {name}: {error}", file=sys.stderr)
                found[name].append({"seconds": math.inf, "repeated": 0})
            print(f"turn {turn + 1}, {name}: {found[name][-1]}", file=sys.stderr, flush=True)
    if given.json:
        print(json.dumps({"machine": platform.platform(), "ranks": given.ranks, **found}))
        return
    print("| | kill to the next finished step, s | fastest, slowest | steps repeated |")
    print("|---|---|---|---|")
    for name, runs in found.items():
        times = sorted(run["seconds"] for run in runs)
        repeated = sorted(int(run["repeated"]) for run in runs)
        spread = f"{times[0]:.2f}, {times[-1]:.2f}"
        print(f"| {name} | {statistics.median(times):.2f} | {spread} | {repeated[len(repeated) // 2]} |")


if __name__ == "__main__":
    main()
